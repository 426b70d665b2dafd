"""Coupled verification: a seed gives one text at every depth."""

from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.plain import compile_steps, widest
from tests.models import Reference, finish, make_engine, prompts, rigged, serve, watch

SAMPLED = SamplingParams(
    temperature=0.9, top_k=20, presence_penalty=0.2, max_tokens=24, ignore_eos=True, logprobs=0
)
# A drafter close to its trunk, which is not too sure of itself: sampling has a choice.
PARAMS = rigged(noise=0.2, loud=0.7, contrast=3.0)
DEPTH = 3  # of engines in tests, unless another is given


def engine_with(verifier: str) -> Engine:
    return widest(PARAMS, verifier=verifier)


def outputs(requests: list[Request]) -> list[list[int]]:
    return [r.progress.output for r in requests]


def jobs(depth: int | None = None) -> list[tuple[list[int], SamplingParams]]:
    several = enumerate(prompts(6))
    return [(p, replace(SAMPLED, seed=i, num_speculative_tokens=depth)) for i, p in several]


def run(engine: Engine, requests: list[Request]) -> list[Request]:
    """With what is compiled already."""
    for r in requests:
        engine.submit(r)
    finish(engine)
    return requests


def test_same_tokens_at_every_depth():
    """All depths share one program; other requests run beside."""
    engine = engine_with("coupled")
    deepest = run(engine, [engine.make_request(*j) for j in jobs()])
    runs = [run(engine, [engine.make_request(*j) for j in jobs(depth)]) for depth in range(DEPTH + 1)]
    mixed = run(engine, [engine.make_request(*jobs(i % (DEPTH + 1))[i]) for i in range(6)])
    assert len({tuple(t) for t in outputs(deepest)}) == 6
    for other in (*runs, mixed):
        assert outputs(other) == outputs(deepest)
    lengths = [np.mean([r.progress.speculation.acceptance_length for r in each]) for each in runs]
    assert lengths == sorted(lengths)
    assert lengths[DEPTH] > 1.5


@pytest.mark.rest
def test_same_tokens_in_a_program_that_does_not_draft(monkeypatch):
    engine = engine_with("coupled")
    (deepest,) = serve(engine, jobs()[:1], compiled=True)
    compile_steps(engine, *jobs(0)[0])
    launched = []
    watch(monkeypatch, engine.runner, lambda step: launched.append(step.key))
    assert outputs(serve(engine, jobs(0)[:1], compiled=True)) == outputs([deepest])
    assert {k.room for k in launched if not k.tokens} == {0}


@pytest.mark.slow
def test_the_other_verifiers_do_not_promise_that():
    """It would be noticed."""
    block = engine_with("block")
    deep, shallow = ([block.make_request(*j) for j in jobs(depth)] for depth in (None, 1))
    assert outputs(run(block, deep)) != outputs(run(block, shallow))


def test_a_seeded_request_may_have_its_depth_chosen():
    def is_fixed(verifier: str) -> bool:
        engine = make_engine(PARAMS, verifier=verifier, adaptive_depth=True)
        return engine.make_request(*jobs()[0]).fixed_depth

    assert is_fixed("block")
    assert not is_fixed("coupled")
    engine = engine_with("coupled")
    fixed = serve(engine, jobs(), compiled=True)
    requests = [replace(engine.make_request(*job), fixed_depth=False) for job in jobs()]
    assert outputs(run(engine, requests)) == outputs(fixed)
    assert len(engine.stats().depth_steps) > 2


def test_temperature_zero_is_greedy():
    """Beside rows that sample."""
    cold = replace(SAMPLED, temperature=0, presence_penalty=0, top_k=0)
    together = [(p, cold) if i % 2 else (p, warm) for i, (p, warm) in enumerate(jobs())]
    plain = Reference(PARAMS)
    alone = [plain.speculate(p, 24).ids for p, _ in jobs()[1::2]]
    assert outputs(serve(engine_with("coupled"), together, compiled=True))[1::2] == alone
