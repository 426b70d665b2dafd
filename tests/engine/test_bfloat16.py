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
from tests.models import (
    GREEDY,
    Reference,
    chosen_logprobs,
    make_engine,
    prompts,
    serve,
    tiny_params,
)

pytestmark = pytest.mark.rest


def engine(**config: Any) -> Engine:
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_params())
    return make_engine(params, dtype="bfloat16", **config)


@functools.cache
def reference() -> Reference:
    return Reference(tiny_params())


def check(requests: list[Request]) -> None:
    """Greedy by float32's reckoning of the same text, up to rounding; and drafts come true."""
    for r in requests:
        rows = reference().logprobs([*r.prompt, *r.progress.output])[len(r.prompt) - 1 : -1]
        own = rows[np.arange(len(r.progress.output)), r.progress.output]
        np.testing.assert_allclose(chosen_logprobs(r), own, atol=0.15)
        assert (own > rows.max(axis=1) - 0.15).all()
    exact = serve(
        make_engine(), [(r.prompt, replace(GREEDY, max_tokens=len(r.progress.output))) for r in requests]
    )
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
