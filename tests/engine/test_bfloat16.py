"""The engine in bfloat16, as GPUs serve: near float32's numbers, with drafts, reused pages and preemption."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.model.params import Params, param_specs
from tests.engine.plain import widest
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    chosen_logprobs,
    make_engine,
    prompts,
    serve,
    tiny_params,
)
from tests.rounding import error, largest_logit

pytestmark = pytest.mark.rest


@functools.cache
def rounded() -> Params:
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_params())


def engine(**config: Any) -> Engine:
    return make_engine(rounded(), dtype="bfloat16", **config)


@functools.cache
def reference() -> Reference:
    """The plain loop with the same weights, in float32."""
    return Reference(jax.tree.map(lambda a: a.astype(jnp.float32), rounded()))


# A state is rounded behind every product of the trunk. Its entries' errors are independent: a logit's is in
# proportion to the root of the sum of its squared terms, which is a sqrt(D)th of the largest possible sum.
ROUNDINGS = len(jax.tree.leaves(param_specs(TINY).layers)) + 1
LOGIT = largest_logit(tiny_params(), TINY) / TINY.hidden_size**0.5
MOVED = float(error(ROUNDINGS, LOGIT, jnp.bfloat16))


def check(requests: list[Request]) -> None:
    """Greedy by float32's reckoning of the same text, up to rounding; and drafts come true."""
    for r in requests:
        rows = reference().logprobs([*r.prompt, *r.progress.output])[len(r.prompt) - 1 : -1]
        own = rows[np.arange(len(r.progress.output)), r.progress.output]
        # Logits that move by MOVED at most multiply a token's odds by exp(2 * MOVED) at most.
        chance = np.exp(own)
        assert (np.abs(chosen_logprobs(r) - own) < np.log(chance + (1 - chance) * np.exp(2 * MOVED))).all()
        assert (own > rows.max(axis=1) - 2 * MOVED).all()
    jobs = [(r.prompt, replace(GREEDY, max_tokens=len(r.progress.output))) for r in requests]
    exact = serve(widest(), jobs, compiled=True)
    most, steps = (sum(getattr(r.progress.speculation, n) for r in exact) for n in ("accepted", "steps"))
    assert most > steps
    assert sum(r.progress.speculation.accepted for r in requests) > 0.85 * most


@pytest.mark.slow
def test_a_batch():
    found = engine()
    check(serve(found, [(p, GREEDY) for p in prompts(5)]))
    state = local_runner(found).state
    kept = (state.trunk, state.drafter.pages, state.drafter.slots.pending)
    assert {a.dtype for a in jax.tree.leaves(kept)} == {jnp.dtype("bfloat16")}


def test_a_prompt_goes_on_from_cached_pages():
    found, prompt = engine(), prompts(1, shortest=40)[0]
    first, again = (serve(found, [(prompt, GREEDY)])[0] for _ in range(2))
    assert (first.progress.cached_tokens, again.progress.cached_tokens) == (0, 32)
    check([first])
    check([again])


def test_preempted_requests():
    found = engine(num_pages=6)
    # Where rounding changes an expert, a log-probability moves by more than rounding; with these it does not.
    jobs = [(p, replace(GREEDY, max_tokens=30)) for p in prompts(4, shortest=14, seed=7)]
    requests = serve(found, jobs)
    assert found.stats().preemptions > 0
    check(requests)
