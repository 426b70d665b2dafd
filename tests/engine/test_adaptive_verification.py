"""Steps that verify the likeliest drafts of all rows: the text of no drafts, and rows where they pay."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.decode.launches import StepLaunch
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.model.sharding import make_mesh
from tests.engine.device import on_device
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    engine_config,
    finish,
    make_engine,
    on_mesh,
    prompts,
    rigged,
    watch,
)

PARAMS = rigged()
RANKED: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive_depth": True, "adaptive_verification": True}
COUNTS = "drafted", "accepted"
SAMPLED = SamplingParams(temperature=0.9, top_k=20, max_tokens=24, ignore_eos=True)
FULL, PLAIN = 0.2, 0.1  # shares of steps that verify all drafts, and none


def served(
    engine: Engine, jobs: Sequence[tuple[list[int], SamplingParams]], patch: pytest.MonkeyPatch, ranked: bool
) -> tuple[list[Request], list[StepLaunch]]:
    """The requests, and the steps. ranked: as chance has it most steps verify some drafts; else none does."""
    rng, steps = np.random.default_rng(0), list[StepLaunch]()

    def choose(keys: Sequence[StepKey], *_: Any) -> StepKey:
        some, full = ([k for k in keys if (k.kept is None) == whole] for whole in (False, True))
        kind = rng.random()
        if not some or not ranked or kind < FULL:
            return full[-1]
        return full[0] if kind < FULL + PLAIN else some[0]

    patch.setattr(engine.depth, "choose", choose)
    requests = [engine.make_request(*job) for job in jobs]
    # One program serves every depth.
    keys = [k for k in engine.buckets.prepare(requests) if not isinstance(k, StepKey) or k.room or k.kept]
    engine.runner.compile(keys)
    engine.warm_up(keys)
    watch(patch, engine.runner, steps.append)
    for r in requests:
        engine.submit(r)
    finish(engine)
    return requests, steps


@pytest.mark.rest
def test_the_text_is_that_of_no_drafts(monkeypatch):
    """A model decodes greedily, most steps verify a third of the drafts, and many of these are accepted."""
    engine, jobs = make_engine(PARAMS, **RANKED), [(p, GREEDY) for p in prompts(4)]
    requests, steps = served(engine, jobs, monkeypatch, ranked=True)
    kept = [s.key for s in steps if s.key.kept is not None]
    assert len(kept) >= 5
    assert {(k.slots, k.depth, k.kept) for k in kept} == {(4, 3, 1)}
    reference = Reference(PARAMS)
    for (prompt, _), r in zip(jobs, requests, strict=True):
        assert r.progress.output == reference.speculate(prompt, r.max_tokens).ids
    drafted, accepted = (sum(getattr(r.progress.speculation, of) for r in requests) for of in COUNTS)
    assert accepted / drafted > 0.35


@pytest.mark.slow
def test_a_seed_gives_one_text(monkeypatch):
    """Sampled, with coupled verification: whether drafts are ranked or all verified."""
    jobs = [(p, replace(SAMPLED, seed=i)) for i, p in enumerate(prompts(4))]
    texts = []
    for ranked in (True, False):
        with monkeypatch.context() as patch:
            requests, steps = served(make_engine(PARAMS, verifier="coupled", **RANKED), jobs, patch, ranked)
        assert any(s.key.kept for s in steps) == ranked
        assert sum(r.progress.speculation.accepted for r in requests) > 5
        texts.append([r.progress.output for r in requests])
    assert texts[0] == texts[1]


def test_a_request_with_a_depth_of_its_own_keeps_it(monkeypatch):
    """No step that it takes part in leaves a draft out."""
    engine, _ = on_device(**RANKED, keep=0.9)
    own = replace(GREEDY, num_speculative_tokens=2)
    jobs = [(p, replace(GREEDY, max_tokens=48) if i else own) for i, p in enumerate(prompts(3))]
    (fixed, *_), steps = served(engine, jobs, monkeypatch, ranked=True)
    assert any(s.key.kept for s in steps)
    assert set(fixed.progress.speculation.drafted_per_step[:-1]) == {2}


def test_structured_requests_are_verified_as_ever(monkeypatch):
    engine = make_engine(PARAMS, **RANKED)
    requests = [engine.make_request(p, GREEDY) for p in prompts(4)]
    first, rest = engine.warm_up_keys()
    structured = [k for k in (*first, *rest) if isinstance(k, StepKey) and k.mode.structured]
    assert not any(k.kept for k in structured)
    assert [k.kept for k in engine.buckets.prepare(requests) if isinstance(k, StepKey) and k.kept] == [1]


@pytest.mark.rest
def test_drafts_are_where_they_are_accepted(monkeypatch):
    """The engine learns from margins which rows go on, and gives their drafts the rows of the step."""
    engine, _ = on_device(**RANKED, max_num_seqs=8, max_model_len=512, keep=0.6)
    jobs = [(p, replace(GREEDY, max_tokens=400)) for p in prompts(8)]
    shares = []
    for ranked in (True, False):
        with monkeypatch.context() as patch:
            requests, _ = served(engine, jobs, patch, ranked)
        drafted, accepted = (sum(getattr(r.progress.speculation, of) for r in requests) for of in COUNTS)
        shares.append(accepted / drafted)
    assert shares[0] > 1.3 * shares[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"adaptive_depth": False},
            "with adaptive_depth = False: .*; take adaptive_depth = True, or",
        ),
        (
            {"num_speculative_tokens": 1},
            "with num_speculative_tokens = 1: .*; take num_.* = 2 or more",
        ),
        ({"max_num_seqs": 1}, "with max_num_seqs = 1: "),
        ({"synthetic_acceptance": 2.0}, "with synthetic_acceptance = 2.0: .*; leave one of them out"),
    ],
)
def test_steps_that_never_have_a_choice(options, message):
    with pytest.raises(ConfigError, match=f"adaptive_verification = True {message}"):
        engine_config(**RANKED | options)


@pytest.mark.rest
def test_products_have_fewer_rows():
    """A step of 8 slots that verifies 8 of 24 drafts multiplies half as many rows, attention aside."""
    runner = make_engine(PARAMS, max_num_seqs=8, **RANKED).runner
    assert isinstance(runner, LocalRunner)
    full = StepKey(8, 3, 4, SamplingMode())
    rows = [tallest(runner.programs.lowering.program(key)) for key in (full, replace(full, kept=1))]
    assert rows == [8 * 4, 8 + 8]


def tallest(program: jax.stages.Lowered) -> int:
    """The most rows that the head multiplies, in a product of one row of the result per token."""
    found = re.findall(rf"dot_general.*-> tensor<{TINY.vocab_size}x([0-9]+)xf32>", program.as_text())
    return max(map(int, found))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (1, 4)])
def test_on_a_mesh(shape, monkeypatch):
    """Each data shard ranks the drafts of its own slots."""
    mesh = make_mesh(*shape)
    engine = make_engine(on_mesh(PARAMS, mesh), mesh=mesh, **RANKED)
    requests, steps = served(engine, [(p, GREEDY) for p in prompts(4)], monkeypatch, ranked=True)
    assert sum(s.key.kept is not None for s in steps) > 3
    reference = Reference(PARAMS)
    for prompt, r in zip(prompts(4), requests, strict=True):
        assert r.progress.output == reference.speculate(prompt, r.max_tokens).ids
    drafted, accepted = (sum(getattr(r.progress.speculation, of) for r in requests) for of in COUNTS)
    assert accepted / drafted > 0.35
