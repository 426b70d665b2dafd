"""Forced acceptance: the law alone, its programs, and engines whose drafts it keeps."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.decode import forced
from mtp_jax.decode.bookkeeping import abstract_state
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.decode.law import GOLDEN, Law
from mtp_jax.decode.state import State, StateShape
from mtp_jax.decode.windows import Windows, rows_of
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams, StructuredOutput
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.heads.build import build
from mtp_jax.model.backend import xla
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Model
from tests.decode.helpers import zeroed
from tests.layers import ROOT
from tests.models import TINY, Reference, make_engine, prompts, rigged, serve, tiny_params

STEPS = 20_000
# Its drafts are all but never right.
POOR = rigged(noise=3.0)
DEPTH = 3
LENGTH = 2.99
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def kept(law: Law, seeds: np.ndarray, lengths: np.ndarray, count: int | None = None) -> np.ndarray:
    """Drafts that rows with these seeds and positions keep."""
    rows, depth = len(seeds), len(law.shares)
    model = Model(TINY, xla())
    state = abstract_state(model, build(TINY), StateShape(1, 1, 16, 1))
    one = jax.tree.map(lambda a: np.zeros((rows, *a.shape[1:]), a.dtype), state.slots)
    sampling = replace(one.sampling, seed=seeds.astype(np.uint32))
    s = one.replace(length=lengths.astype(np.int32), sampling=sampling)
    counts = np.full(rows, depth if count is None else count, np.int32)
    return np.asarray(_kept(law, s, np.zeros((rows, depth), np.int32), counts))


_kept = jax.jit(forced.kept, static_argnums=0)


def spread(shares: Any) -> Any:
    """Four standard deviations of the share of ``STEPS`` independent draws."""
    return 4 * np.sqrt(np.multiply(shares, np.subtract(1, shares)) / STEPS)


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize(("length", "depth", "both"), [(2.99, 3, {1, 2}), (3.77, 6, {2, 3})])
def test_a_length_is_the_mean_of_its_two_neighbours(length, depth, both, requests):
    seeds, lengths = (
        np.repeat(np.arange(requests), STEPS // requests),
        np.tile(np.arange(STEPS // requests), requests),
    )
    found = kept(Law.of(length, depth), seeds, lengths)
    assert set(found.tolist()) == both
    assert abs(1 + found.mean() - length) < spread(length % 1)


def test_shares_are_those_of_each_position():
    shares = 0.8, 0.6, 0.4
    found = kept(Law.of(shares, 5), np.zeros(STEPS), np.arange(STEPS))
    assert (np.abs([(found > i).mean() - share for i, share in enumerate(shares)]) < spread(shares)).all()
    assert found.max() == 3


def test_a_draw_depends_on_seed_and_position_alone():
    law, seeds, lengths = Law.of(2.5, 3), np.array([3, 4, 3, 4, 3, 4]), np.array([7, 7, 8, 8, 9, 9])
    found = kept(law, seeds, lengths)
    order = np.array([5, 3, 0, 1, 4, 2])
    np.testing.assert_array_equal(kept(law, seeds[order], lengths[order]), found[order])
    many = kept(law, np.repeat([3, 4], 50), np.tile(np.arange(50), 2)).reshape(2, 50)
    assert (many[0] != many[1]).any()


def test_no_more_are_kept_than_a_row_verifies():
    assert set(kept(Law.of(4, 3), np.zeros(9), np.arange(9), count=2).tolist()) == {2}


def test_a_draft_that_is_no_token_ends_what_is_kept():
    state = abstract_state(Model(TINY, xla()), build(TINY), StateShape(2, 2, 16, 1))
    drafts = np.array([[5, -1, 6], [5, 6, 7]], np.int32)
    assert _kept(Law.of(4, 3), zeroed(state.slots), drafts, np.full(2, 3)).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("asked", "depth", "message"),
    [
        (2.99, 0, "synthetic_acceptance = 2.99; expected drafts to keep, but num_speculative_tokens = 0"),
        (4.01, 3, "expected a length from 1, the model's own token, to 4, as num_speculative_tokens = 3"),
        (0.99, 3, "synthetic_acceptance = 0.99; expected a length from 1"),
        (float("nan"), 3, "expected a length from 1"),
        ((0.8, 1.2), 3, "synthetic_acceptance = 0.8,1.2; expected shares from 0 to 1"),
        ((-0.1,), 3, "expected shares from 0 to 1"),
        ((), 3, "expected shares from 0 to 1"),
        ((0.8, 0.6, 0.4), 2, "synthetic_acceptance = 0.8,0.6,0.4; expected 2 shares at most"),
        ((0.6, 0.8), 3, "expected shares that do not rise"),
        ("glm-9", 3, "synthetic_acceptance = glm-9; expected a number, or one of glm-5.2, v4-pro, "),
        ("kimi-k2.5", 6, "synthetic_acceptance = kimi-k2.5, which has lengths for up to 5 drafts"),
    ],
)
def test_what_is_no_law(asked, depth, message):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(synthetic_acceptance=asked, num_speculative_tokens=depth)
    assert message in str(caught.value)


def test_laws():
    assert Law.of(2.6, 3).shares == pytest.approx((1, 0.6, 0))
    assert Law.of(1, 2).shares == (0, 0)
    assert Law.of(3, 2).shares == (1, 1)
    assert Law.of([0.5], 2).shares == (0.5, 0)
    assert Law.of("glm-5.2", 3) == Law.of(2.99, 3)
    assert Law.of("v4-pro-0813", 6) == Law.of(3.77, 6)
    assert str(Law.of(2.99, 3)) == (
        "SYNTHETIC acceptance: length 2.99 (drafts kept in shares of 1, 0.99, 0 of the steps)"
    )
    assert EngineConfig(synthetic_acceptance=2.5).without_drafts().law is None
    for lengths in GOLDEN.values():
        for drafts, length in enumerate(lengths, start=1):
            assert Law.of(length, drafts).length == pytest.approx(length)
    with pytest.raises(ConfigError, match="synthetic_acceptance = 2 with suffix_drafts = True: a row"):
        EngineConfig(synthetic_acceptance=2, suffix_drafts=True)


def branches(law: Law | None) -> int:
    """Conditionals of a compiled verdict over sampled drafts: each draws, or takes the likeliest tokens."""
    model, drafter = Model(TINY, xla()), build(TINY)
    state, vocab = abstract_state(model, drafter, StateShape(2, 2, 16, 1)), TINY.vocab_size
    key = StepKey(2, DEPTH, 1, SamplingMode("sampled", "block"))

    def shape(*sizes: int, dtype=jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    some, probs = shape(2, dtype=jnp.int32), shape(2, DEPTH, vocab)
    drafts = Drafts(shape(2, DEPTH, dtype=jnp.int32), some, some, None, probs)
    hidden, logits = shape(2, DEPTH + 1, TINY.hidden_size), shape(2, DEPTH + 1, vocab)

    def judged(params: Params, state: State, hidden: Any, logits: Any, drafts: Drafts) -> Any:
        rows = rows_of(state, drafts, 1)
        return Windows(Decoding(model, drafter, law), key, rows, drafts, None, True).judged(
            params, hidden, logits
        )

    compiled = jax.jit(judged).lower(tiny_params(), state, hidden, logits, drafts).compile()
    return (compiled.as_text() or "").count(" conditional(")


@pytest.mark.rest
def test_the_verification_is_computed_though_nobody_reads_its_verdict():
    """One branch verifies, another draws the target's token."""
    assert branches(Law.of(LENGTH, DEPTH)) == 2


@pytest.mark.rest
def test_a_verification_that_is_not_computed_would_show(monkeypatch):
    assert branches(None) == 1
    monkeypatch.setattr(forced, "instead", lambda _, verdict: verdict)
    assert branches(Law.of(LENGTH, DEPTH)) == 1


def steps_of(request: Request) -> list[int]:
    return [int(n) for n in request.progress.speculation.accepted_per_step]


def told(requests: list[Request]) -> list[list[int]]:
    return [r.progress.output for r in requests]


def test_an_engine_emits_drafts_and_then_the_models_own_token():
    """Greedy, over rows of several lengths; the drafts are those that the drafter makes of the text."""
    reference = Reference(POOR, longest=128)
    jobs = [(p, replace(GREEDY, max_tokens=24, seed=i)) for i, p in enumerate(prompts(4))]
    assert sum(sum(reference.speculate(p, 24, DEPTH).accepted) for p, _ in jobs) < 20
    found = serve(make_engine(POOR, num_speculative_tokens=DEPTH, synthetic_acceptance=2.5), jobs)
    assert {n for r in found for n in steps_of(r)} == {1, 2}
    for request, (prompt, _) in zip(found, jobs, strict=True):
        ids, output = [*prompt], request.progress.output
        best = reference.logits([*prompt, *output]).argmax(-1)
        at = len(prompt)  # the first token is the prompt's own
        ids = [*prompt, *output]
        assert ids[at] == best[at - 1]
        for n in steps_of(request)[:-1]:
            assert ids[at + 1 : at + 1 + n] == reference.drafts(ids[: at + 1], DEPTH)[0][:n]
            at += n + 1
            assert ids[at] == best[at - 1]
    again = serve(make_engine(POOR, num_speculative_tokens=DEPTH, synthetic_acceptance=2.5), jobs[::-1])
    assert told(again)[::-1] == told(found)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, marks=pytest.mark.rest),
        pytest.param(
            SamplingParams(temperature=0.9, top_k=20, presence_penalty=0.5, max_tokens=12, ignore_eos=True),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_length_of_one_is_the_models_own_text(params):
    """Its tokens are drawn as a step without drafts draws them."""
    jobs = [(p, replace(params, seed=i)) for i, p in enumerate(prompts(3))]
    if params == GREEDY:
        plain = [Reference(POOR, longest=128).speculate(p, params.max_tokens).ids for p, _ in jobs]
    else:
        plain = told(serve(make_engine(POOR, num_speculative_tokens=0), jobs))
    found = serve(make_engine(POOR, num_speculative_tokens=DEPTH, synthetic_acceptance=1), jobs)
    assert told(found) == plain
    assert {n for r in found for n in steps_of(r)} == {0}
    assert sum(r.progress.speculation.drafted for r in found) > 0


@pytest.mark.rest
def test_cached_pages_of_forced_text_are_the_texts():
    """A prompt that goes on from a forced output finds its pages, and ends like one that is computed."""
    sizes = {"num_speculative_tokens": DEPTH, "synthetic_acceptance": 2.5}
    engine, params = make_engine(POOR, **sizes), replace(GREEDY, max_tokens=30, seed=5)
    (first,) = serve(engine, [(prompts(1)[0], params)])
    longer = [*first.prompt, *first.progress.output]
    job = longer, replace(GREEDY, max_tokens=12, seed=7)  # steps of this seed keep 1 and 2
    (hit,) = serve(engine, [job])
    (computed,) = serve(make_engine(POOR, prefix_cache=False, **sizes), [job])
    assert hit.progress.cached_tokens >= 32 > computed.progress.cached_tokens == 0
    assert hit.progress.output == computed.progress.output
    assert steps_of(hit) == steps_of(computed)
    assert set(steps_of(hit)) == {1, 2}


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"logprobs": 0}, "logprobs"),
        ({"structured": StructuredOutput(json_object=True)}, "structured output"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"max_thinking_tokens": 3}, "max_thinking_tokens"),
    ],
)
def test_what_means_nothing_under_a_law_is_refused_by_name(wrong, name):
    engine = make_engine(num_speculative_tokens=DEPTH, synthetic_acceptance=LENGTH)
    with pytest.raises(RequestError, match=f"{name} means nothing here: acceptance is SYNTHETIC"):
        engine.make_request([5, 6], SamplingParams(**wrong))
    assert engine.make_request([5, 6], SamplingParams(prompt_logprobs=1))


def test_the_documentation_has_every_golden_length():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name, lengths in GOLDEN.items():
        cells = " | ".join(f"{length:.2f}" for length in lengths)
        assert f"| `{name}` | {cells} |" in text
