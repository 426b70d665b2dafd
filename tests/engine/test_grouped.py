"""Grouped-query attention in the engine: the same text whatever was computed together, cached or drafted.

Tokens and acceptance are compared with the plain loop, which recomputes keys and values of every token.
"""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, SamplingParams
from mtp_jax.model.sharding import make_mesh
from tests.models import (
    GREEDY,
    Reference,
    Told,
    accepted,
    chosen_logprobs,
    grouped,
    make_engine,
    on_mesh,
    prompts,
    serve,
    tiny_params,
)

GROUPED = grouped()
PROMPTS = prompts(8)


def engine_of(**config) -> Engine:
    return make_engine(tiny_params(GROUPED), GROUPED, **config)


@cache
def told(i: int, depth: int) -> Told:
    return Reference(tiny_params(GROUPED), GROUPED).speculate(PROMPTS[i], 24, depth)


def jobs(count: int = len(PROMPTS), depth: int = 3):
    return [(p, replace(GREEDY, num_speculative_tokens=depth)) for p in PROMPTS[:count]]


def as_told(requests: list[Request], depth: int) -> None:
    for i, request in enumerate(requests):
        want = told(i, depth)
        assert request.output == want.ids
        if depth:
            assert accepted(request) == want.accepted
    assert not depth or sum(r.speculation.accepted for r in requests) > len(requests)


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_together_and_alone(depth):
    as_told(serve(engine_of(max_num_seqs=8), jobs(depth=depth)), depth)
    as_told(serve(engine_of(max_num_seqs=8), jobs(1, depth), exactly=True), depth)


@pytest.mark.parametrize(
    "sizes",
    [
        {"page_size": 4, "prefill_chunk": 5},
        pytest.param({"page_size": 32, "prefill_chunk": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pages_and_chunks(sizes):
    as_told(serve(engine_of(**sizes), jobs()), 3)


def test_cached_prefixes_hold_keys_and_values():
    engine, prompt = engine_of(), PROMPTS[-1]
    serve(engine, [(prompt, GREEDY)])
    (again,) = serve(engine, [(prompt, GREEDY)])
    assert again.cached_tokens == 16
    assert (again.output, accepted(again)) == (told(7, 3).ids, told(7, 3).accepted)


def test_preempted_requests():
    engine = engine_of(num_pages=6)
    as_told(serve(engine, jobs()), 3)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("data", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_eight_devices_compute_what_one_does(data):
    """A device has two of four groups, or one of the two heads of a group."""
    mesh = make_mesh(data, 8 // data)
    params = on_mesh(tiny_params(GROUPED), mesh, GROUPED)
    as_told(serve(make_engine(params, GROUPED, mesh, max_num_seqs=8), jobs()), 3)


def test_an_fp8_cache_holds_keys_and_values_in_eight_bits():
    requests = serve(engine_of(kv_cache_dtype="fp8"), jobs())
    engine = engine_of(kv_cache_dtype="fp8")
    assert [r.output for r in requests] == [serve(engine, [job])[0].output for job in jobs(depth=0)]
    assert sum(r.speculation.accepted for r in requests) > len(requests)
    state = local_runner(engine).state
    rows = engine.config.page_size * (engine.pages + 1)
    caches = (*state.trunk, *state.drafter.pages.cache)
    sizes = {sum(a.nbytes for a in jax.tree.leaves(c)) for c in caches}
    # Four heads of eight keys and as many values, and a scale for each head of either.
    assert sizes == {rows * (64 + 8 * 4)} == {rows * GROUPED.row.fp8_bytes}


@pytest.mark.parametrize("depth", [0, 3])
def test_sampled_text_depends_on_its_seed_alone(depth):
    sampled = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=0)
    params = replace(sampled, num_speculative_tokens=depth)
    (alone,) = serve(engine_of(verifier="coupled"), [(PROMPTS[5], sampled)])
    beside = serve(engine_of(verifier="coupled"), [*jobs(3), (PROMPTS[5], params)])[-1]
    assert beside.output == alone.output
    np.testing.assert_allclose(chosen_logprobs(beside), chosen_logprobs(alone), atol=1e-4)
    assert alone.speculation.accepted > 0
