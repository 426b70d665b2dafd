"""Eight devices compute what one does: tokens, acceptance and sampled output, on every shape of mesh."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mtp_jax.api.local import local_runner
from mtp_jax.api.propose import propose
from mtp_jax.decode.keys import StepKey
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.model.params import Attention, param_specs
from mtp_jax.model.sharding import make_mesh, param_sharding
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    accepted,
    chosen_logprobs,
    make_engine,
    on_mesh,
    prompts,
    serve,
    tiny_params,
    watch,
)

MESHES = [(4, 2), *(pytest.param(*m, marks=pytest.mark.slow) for m in ((8, 1), (2, 4), (1, 8)))]
SAMPLED = SamplingParams(temperature=1.2, top_k=20, max_tokens=16, ignore_eos=True, logprobs=0)
JOBS = [
    (p, replace(GREEDY, max_tokens=16) if i % 2 else replace(SAMPLED, seed=i))
    for i, p in enumerate([*prompts(6), *prompts(5, seed=1)])
]


@functools.cache
def on_one_device() -> list[Request]:
    return serve(make_engine(), JOBS)


def engine_on(mesh: Mesh, **config: Any) -> Engine:
    params = on_mesh(tiny_params(), mesh)
    return make_engine(params, mesh=mesh, max_num_seqs=8, **config)


@pytest.mark.parametrize(("data", "model"), MESHES)
def test_same_as_one_device(data, model):
    """Greedy and sampled requests side by side, more than there are slots, some prompts in several chunks."""
    engine = engine_on(make_mesh(data, model))
    requests = serve(engine, JOBS)
    for got, want in zip(requests, on_one_device(), strict=True):
        assert got.progress.output == want.progress.output
        assert accepted(got) == accepted(want)
        assert got.progress.finish_reason == want.progress.finish_reason == "length"
        np.testing.assert_allclose(chosen_logprobs(got), chosen_logprobs(want), atol=1e-4)
    assert sum(r.progress.speculation.accepted for r in requests) > len(requests)
    assert {engine.scheduler.shard_of(r.residence.slot) for r in requests} == set(range(data))
    assert engine.stats().pages_used == 0
    # The state stays where it was: each data shard holds its own pages and slots.
    state = local_runner(engine).state
    cache = jax.tree.leaves(state.trunk)[0]
    assert {s.data.shape[0] for s in cache.addressable_shards} == {cache.shape[0] // data}
    assert {s.data.shape[0] for s in state.slots.length.addressable_shards} == {8 // data}


@pytest.mark.slow
def test_what_a_server_compiles_keeps_rows_on_their_shard():
    """Two rows in the first slots, whose pages are all on one shard."""
    engine = engine_on(make_mesh(2, 1))
    first, rest = engine.warm_up_keys()
    steps = [k for k in (*first, *rest) if isinstance(k, StepKey) and k.mode.logprobs is None]
    assert {k.slots for k in steps if k.slots} == {8}
    engine.runner.compile([first[0], *steps])
    (prompt,), greedy = prompts(1, shortest=24), replace(GREEDY, logprobs=None)
    serve(engine, [(prompt, greedy)])
    both = [([*prompt, t], greedy) for t in (3, 4)]
    requests, reference = serve(engine, both), serve(make_engine(), both)
    assert [r.residence.slot for r in requests] == [0, 1]
    assert all(r.progress.cached_tokens for r in requests)
    assert [r.progress.output for r in requests] == [r.progress.output for r in reference]
    assert [accepted(r) for r in requests] == [accepted(r) for r in reference]
    assert sum(r.progress.speculation.accepted for r in requests) > 0


@pytest.mark.slow
def test_a_prompt_goes_on_from_the_pages_of_its_shard(monkeypatch):
    """From the hidden state at their end, too, which only drafts need."""
    engine, reference, ends = engine_on(make_mesh(2, 1)), Reference(tiny_params()), []
    admit = local_runner(engine).programs.admit

    def seen(state, slot, arrays, page):
        ends.append(np.asarray(state.drafter.pages.boundary[page]).ravel()[: TINY.hidden_size])
        return admit(state, slot, arrays, page)

    jobs = [(p, replace(GREEDY, max_tokens=12)) for p in prompts(4, shortest=36)]
    first = serve(engine, jobs)
    assert {engine.scheduler.shard_of(r.residence.slot) for r in first} == {0, 1}
    monkeypatch.setattr(local_runner(engine).programs, "admit", seen)
    later = [serve(engine, [job])[0] for job in jobs]
    assert {engine.scheduler.shard_of(r.residence.slot) for r in later} == {0, 1}
    for r, end in zip(later, ends, strict=True):
        told = reference.speculate(r.prompt, 12, 3)
        assert (r.progress.output, accepted(r)) == (told.ids, told.accepted)
        assert sum(told.accepted) > 0
        assert r.progress.cached_tokens >= 32
        np.testing.assert_allclose(end, reference.hidden(r.prompt)[r.progress.cached_tokens - 1], atol=1e-4)


@pytest.mark.slow
def test_requests_preempted_on_every_shard_end_as_if_nothing_had_happened():
    params = on_mesh(tiny_params(), mesh := make_mesh(2, 1))
    engine = make_engine(params, mesh=mesh, max_num_seqs=8, num_pages=6)
    jobs = [
        (p, replace(GREEDY, max_tokens=30)) for seed in (6, 7) for p in prompts(4, shortest=14, seed=seed)
    ]
    requests, calm = serve(engine, jobs), serve(make_engine(max_num_seqs=8), jobs)
    assert engine.stats().preemptions > 1
    assert [r.progress.output for r in requests] == [r.progress.output for r in calm]
    assert [accepted(r) for r in requests] == [accepted(r) for r in calm]
    assert sum(r.progress.speculation.accepted for r in requests) > len(requests)


@pytest.mark.slow
def test_prompts_of_every_shard_are_prefilled_together(monkeypatch):
    engine = engine_on(make_mesh(2, 1), prefill_chunk=64)
    launched: list[int] = []
    watch(monkeypatch, engine.runner, lambda step: launched.append(step.key.prompts))
    requests = serve(engine, [(p[:15], replace(GREEDY, max_tokens=16)) for p, _ in JOBS[:8]])
    assert max(launched) == 4
    assert sum(n > 0 for n in launched) < 8
    reference = Reference(tiny_params())
    for r in requests:
        told = reference.speculate(r.prompt, 16, 3)
        assert (r.progress.output, accepted(r)) == (told.ids, told.accepted)
        assert sum(told.accepted) > 0


def test_one_device_agrees_with_the_plain_loop():
    reference = Reference(tiny_params())
    for r in on_one_device()[1::2]:
        told = reference.speculate(r.prompt, 16, 3)
        assert (r.progress.output, accepted(r)) == (told.ids, told.accepted)


def test_parameters_lie_where_the_specs_say():
    mesh = make_mesh(2, 4)
    params = local_runner(engine_on(mesh)).params
    for array, spec in zip(jax.tree.leaves(params), jax.tree.leaves(param_specs(TINY)), strict=True):
        assert array.sharding.is_equivalent_to(param_sharding(spec, mesh), array.ndim)
    experts = params.layers[1].mlp.gate_up
    assert {s.data.shape[0] for s in experts.addressable_shards} == {1}  # 8 experts on 8 devices
    attention = params.layers[0].attention
    assert isinstance(attention, Attention)
    heads = attention.q_b
    assert {s.data.shape[0] for s in heads.addressable_shards} == {2}
    assert {s.data.shape[0] for s in params.head.addressable_shards} == {TINY.vocab_size // 4}


@pytest.mark.slow
def test_drafts_after_a_prompt_are_those_of_one_device():
    alone, spread = make_engine(max_num_seqs=8), engine_on(make_mesh(4, 2))
    for prompt in (JOBS[0][0], JOBS[4][0], JOBS[0][0]):
        want, got = propose(alone, prompt, 2), propose(spread, prompt, 2)
        assert (got[0], got[1].tolist()) == (want[0], want[1].tolist())
        np.testing.assert_allclose(got[2], want[2], atol=1e-4)


def test_a_request_cannot_have_more_than_its_shards_pages():
    engine = make_engine(mesh=make_mesh(8, 1), max_num_seqs=8)
    assert engine.pages == engine.config.columns
    request = engine.make_request([3] * 40, replace(GREEDY, max_tokens=24))
    engine.submit(request)
    assert engine.scheduler.admit() == [request]
    assert len(request.residence.pages) == engine.config.pages_for(40) < engine.config.columns
