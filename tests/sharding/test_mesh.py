"""Eight devices compute what one does: tokens, acceptance and sampled output, on every shape of mesh."""

import functools
from collections.abc import Sequence
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
from tests.rounding import near, of_model

CFG = replace(TINY, num_hidden_layers=1, first_k_dense_replace=0)
"""One layer with experts, and drafts by a dense one."""
DEPTH, TOKENS = 2, 16
SLOW = [pytest.param(*m, marks=pytest.mark.slow) for m in ((8, 1), (2, 4), (1, 8))]
SHORT = replace(GREEDY, max_tokens=TOKENS)
SAMPLED = replace(SHORT, temperature=1.2, top_k=20)
PROMPTS = [*prompts(6), *prompts(5, seed=1)]
JOBS = [(p, SHORT if i % 2 else replace(SAMPLED, seed=i)) for i, p in enumerate(PROMPTS)]
"""More than there are slots, some of several chunks."""


def alone(**config: Any) -> Engine:
    return make_engine(tiny_params(CFG), CFG, num_speculative_tokens=DEPTH, **config)


def engine_on(mesh: Mesh, **config: Any) -> Engine:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "num_speculative_tokens": DEPTH, **config}
    return make_engine(on_mesh(tiny_params(CFG), mesh, CFG), CFG, mesh, **sizes)


@functools.cache
def reference() -> Reference:
    return Reference(tiny_params(CFG), CFG)


@functools.cache
def on_one_device() -> list[Request]:
    return serve(alone(), JOBS)


def check(requests: Sequence[Request], tokens: int = TOKENS) -> None:
    """Assert that they are what the plain loop gives."""
    for r in requests:
        told = reference().speculate(r.prompt, tokens, DEPTH)
        assert (r.progress.output, accepted(r)) == (told.ids, told.accepted)
        assert sum(told.accepted) > 0


@pytest.mark.rest
@pytest.mark.parametrize(("data", "model"), [(4, 2), *SLOW])
def test_same_as_one_device(data, model):
    """Greedy and sampled requests side by side."""
    engine = engine_on(make_mesh(data, model))
    requests = serve(engine, JOBS)
    for got, want in zip(requests, on_one_device(), strict=True):
        assert got.progress.output == want.progress.output
        assert accepted(got) == accepted(want)
        assert got.progress.finish_reason == want.progress.finish_reason == "length"
        ids = [*got.prompt, *got.progress.output]
        largest = float(np.abs(reference().logits(ids)).max())
        terms = of_model(CFG, len(ids)) + CFG.vocab_size
        near(chosen_logprobs(got), chosen_logprobs(want), terms, size=largest)
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
    requests, want = serve(engine, both), serve(alone(), both)
    assert [r.residence.slot for r in requests] == [0, 1]
    assert all(r.progress.cached_tokens for r in requests)
    assert [r.progress.output for r in requests] == [r.progress.output for r in want]
    assert [accepted(r) for r in requests] == [accepted(r) for r in want]
    assert sum(r.progress.speculation.accepted for r in requests) > 0


@pytest.mark.slow
def test_a_prompt_goes_on_from_the_pages_of_its_shard(monkeypatch):
    """From the hidden state at their end, too, which only drafts need."""
    engine, ends = engine_on(make_mesh(2, 1)), []
    admit = local_runner(engine).programs.admit

    def seen(state, slot, arrays, page):
        ends.append(np.asarray(state.drafter.pages.boundary[page]).ravel()[: CFG.hidden_size])
        return admit(state, slot, arrays, page)

    jobs = [(p, replace(GREEDY, max_tokens=12)) for p in prompts(4, shortest=36)]
    first = serve(engine, jobs)
    assert {engine.scheduler.shard_of(r.residence.slot) for r in first} == {0, 1}
    monkeypatch.setattr(local_runner(engine).programs, "admit", seen)
    later = [serve(engine, [job])[0] for job in jobs]
    assert {engine.scheduler.shard_of(r.residence.slot) for r in later} == {0, 1}
    check(later, tokens=12)
    for r, end in zip(later, ends, strict=True):
        assert r.progress.cached_tokens >= 32
        want = reference().hidden(r.prompt)[r.progress.cached_tokens - 1]
        near(end, want, of_model(CFG, len(r.prompt)))


@pytest.mark.slow
def test_requests_preempted_on_every_shard_end_as_if_nothing_had_happened():
    engine = engine_on(make_mesh(2, 1), num_pages=6)
    jobs = [
        (p, replace(GREEDY, max_tokens=30)) for seed in (6, 7) for p in prompts(4, shortest=14, seed=seed)
    ]
    requests, calm = serve(engine, jobs), serve(alone(max_num_seqs=8), jobs)
    assert engine.stats().preemptions > 1
    assert [r.progress.output for r in requests] == [r.progress.output for r in calm]
    assert [accepted(r) for r in requests] == [accepted(r) for r in calm]
    assert sum(r.progress.speculation.accepted for r in requests) > len(requests)


@pytest.mark.slow
def test_prompts_of_every_shard_are_prefilled_together(monkeypatch):
    engine = engine_on(make_mesh(2, 1), prefill_chunk=64)
    launched: list[int] = []
    watch(monkeypatch, engine.runner, lambda step: launched.append(step.key.prompts))
    requests = serve(engine, [(p[:15], SHORT) for p in PROMPTS[:8]])
    assert max(launched) == 4
    assert sum(n > 0 for n in launched) < 8
    check(requests)


@pytest.mark.rest
def test_one_device_agrees_with_the_plain_loop():
    check(on_one_device()[1::2])


def test_parameters_lie_where_the_specs_say():
    mesh = make_mesh(2, 4)
    params = local_runner(engine_on(mesh)).params
    for array, spec in zip(jax.tree.leaves(params), jax.tree.leaves(param_specs(CFG)), strict=True):
        assert array.sharding.is_equivalent_to(param_sharding(spec, mesh), array.ndim)
    experts = params.layers[0].mlp.gate_up
    assert {s.data.shape[0] for s in experts.addressable_shards} == {1}  # 8 experts on 8 devices
    attention = params.layers[0].attention
    assert isinstance(attention, Attention)
    heads = attention.q_b
    assert {s.data.shape[0] for s in heads.addressable_shards} == {2}
    assert {s.data.shape[0] for s in params.head.addressable_shards} == {CFG.vocab_size // 4}


@pytest.mark.slow
def test_drafts_after_a_prompt_are_those_of_one_device():
    one, spread = alone(max_num_seqs=8), engine_on(make_mesh(4, 2))
    for prompt in (PROMPTS[0], PROMPTS[4], PROMPTS[0]):
        want, got = propose(one, prompt, 2), propose(spread, prompt, 2)
        assert (got[0], got[1].tolist()) == (want[0], want[1].tolist())
        near(got[2], want[2], of_model(CFG, len(prompt)))


def test_a_request_cannot_have_more_than_its_shards_pages():
    engine = make_engine(mesh=make_mesh(8, 1), max_num_seqs=8)
    assert engine.pages == engine.config.columns
    request = engine.make_request([3] * 40, replace(GREEDY, max_tokens=24))
    engine.submit(request)
    assert engine.scheduler.admit() == [request]
    assert len(request.residence.pages) == engine.config.pages_for(40) < engine.config.columns
