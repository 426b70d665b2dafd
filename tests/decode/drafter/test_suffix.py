"""The longest match against plain string search, and suffix drafts in the engine."""

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.api.local import local_runner
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.drafter.suffix import REACH, SHORTEST, Suffix, continuation, longest_match
from mtp_jax.decode.keys import Origin
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.heads.build import build
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import make_mesh
from tests.decode.helpers import poison
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    finish,
    make_engine,
    on_mesh,
    prepare,
    prompts,
    rigged,
    serve,
    tiny_params,
)
from tests.rounding import near, of_model

WIDTH = 48
NO_NEXTN = TINY.with_nextn(())


def brute(text: list[int], reach: int) -> tuple[int, int]:
    """The end and the length of the latest occurrence of the longest suffix that occurs earlier."""
    for length in range(min(reach, len(text) - 1), 0, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[-length:]:
                return end, length
    return 0, 0


def goes_on(text: list[int], end: int, count: int) -> list[int]:
    """``count`` tokens after the text if it goes on as it did after ``end``."""
    longer = [*text]
    for i in range(count):
        longer.append(longer[end + 1 + i])
    return longer[len(text) :]


@functools.cache
def matcher(reach: int) -> Any:
    return jax.jit(functools.partial(longest_match, reach=reach))


texts = st.integers(2, 4).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), min_size=1, max_size=WIDTH)
)


@settings(deadline=None)
@given(text=texts, garbage=st.integers(0, 3), reach=st.sampled_from([1, 3, REACH]))
def test_the_match_is_that_of_a_string_search(text, garbage, reach):
    row = np.full((1, WIDTH), garbage, np.int32)
    row[0, : len(text)] = text
    end, length = (int(a[0]) for a in matcher(reach)(row, np.array([len(text) - 1])))
    told = brute(text, reach)
    assert length == told[1]
    if length:
        assert end == told[0]


@settings(deadline=None)
@given(row=st.lists(texts.map(lambda t: t[:16]), min_size=2, max_size=3), reach=st.sampled_from([1, REACH]))
def test_a_match_in_other_texts_lies_in_one_of_them_and_goes_on_in_it(row, reach):
    """Further texts stand before the last, a gap behind each; nothing follows the last token of a text."""
    flat = [t for text in row for t in (*text, -1)][:-1]
    padded = np.full((1, WIDTH + 3), 7, np.int32)
    padded[0, : len(flat)] = flat
    end, length = (int(a[0]) for a in matcher(reach)(padded, np.array([len(flat) - 1])))
    own, told = row[-1], (0, 0)
    for size in range(1, min(reach, len(own)) + 1):
        ends = range(size - 1, len(flat) - 1)
        found = [e for e in ends if flat[e - size + 1 : e + 1] == own[-size:] and flat[e + 1] >= 0]
        told = (found[-1], size) if found else told
    assert length == told[1]
    if length:
        assert end == told[0]


_continuation = jax.jit(continuation, static_argnums=3)


@settings(deadline=None)
@given(text=texts, count=st.integers(1, 9))
def test_what_follows_goes_on_past_the_end(text, count):
    end, length = brute(text, REACH)
    if not length:
        return
    row = np.zeros((1, WIDTH), np.int32)
    row[0, : len(text)] = text
    last, at = np.array([len(text) - 1]), np.array([end])
    found = _continuation(row, last, at, count)
    assert found[0].tolist() == goes_on(text, end, count)


def test_rows_are_apart_and_a_long_run_matches_up_to_the_reach():
    rows = np.stack([np.full(80, 5), np.arange(80), np.arange(80) % 7]).astype(np.int32)
    end, length = matcher(REACH)(rows, np.array([79, 79, 50]))
    assert length.tolist() == [REACH, 0, REACH]
    assert [int(end[0]), int(end[2])] == [78, 43]


# In the engine


# More tokens than any request here emits, by the deepest window and more: what its last drafts are held
# against.
TOLD = 48


@functools.cache
def copier() -> Params:
    """A model that runs into cycles, as the next token is mostly a permutation of the current one.

    Its blocks see to it that it leaves a cycle now and then, and its NextN layer is wrong more often
    than right.
    """
    return rigged(noise=2.0, loud=1.0)


def engine_with(params: Params | None = None, **options: Any) -> Engine:
    sizes = {"suffix_drafts": True, "num_speculative_tokens": 7, "max_model_len": 128} | options
    return make_engine(copier() if params is None else params, **sizes)


@functools.cache
def reference() -> Reference:
    return Reference(copier(), longest=128)


@functools.cache
def copying() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of the model's own text, which goes on by repeating itself: in cycles of 3, 27 and 7 tokens."""
    begun = [(p, reference().speculate(p, 28).ids) for p in prompts(3, shortest=8, seed=8)]
    return [([*prompt, *output], replace(GREEDY, max_tokens=32)) for prompt, output in begun]


@functools.cache
def told() -> list[list[int]]:
    """What follows the prompts, further than they are asked to go on."""
    return [reference().speculate(prompt, TOLD).ids for prompt, _ in copying()]


def plain() -> list[list[int]]:
    return [output[: params.max_tokens] for output, (_, params) in zip(told(), copying(), strict=True)]


def whole(requests: list[Request]) -> Speculation:
    return sum((r.progress.speculation for r in requests), Speculation())


def agreement(a: list[int], b: list[int]) -> int:
    """How many tokens they begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_steps(request: Request, output: list[int]) -> None:
    """Every step of a greedy request drafted a match if and only if a string search finds one, and kept of it
    what the text, which goes on as ``output`` says, has in common with it."""
    text, known = [*request.prompt, *output], len(request.prompt) + 1
    spec = request.progress.speculation
    for accepted, drafted, source in zip(
        spec.accepted_per_step, spec.drafted_per_step, spec.source_per_step, strict=True
    ):
        end, length = brute(text[:known], REACH)
        matched = drafted > 0 and request.suffix_drafts and length >= SHORTEST
        assert source is (Origin.SUFFIX if matched else Origin.NEXTN)
        if matched:
            assert accepted == agreement(goes_on(text[:known], end, drafted), text[known:])
        known += accepted + 1


def check(requests: list[Request]) -> None:
    """The text is that without drafts, and the steps are as they must be.

    Each text ends in a cycle that was there before, so each request verifies matches that are right to
    the end of the window.
    """
    assert [r.progress.output for r in requests] == plain()
    for request, output in zip(requests, told(), strict=True):
        check_steps(request, output)
        suffix = request.progress.speculation.of(Origin.SUFFIX)
        assert suffix.drafted_per_step[-1] in suffix.accepted_per_step


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"adaptive_depth": True}, marks=pytest.mark.slow)],
    ids=["fixed", "adaptive"],
)
def test_the_text_is_that_without_drafts(options):
    engine = engine_with(**options)
    requests = serve(engine, copying())
    check(requests)
    suffix, nextn = (whole(requests).of(s) for s in (Origin.SUFFIX, Origin.NEXTN))
    assert nextn.accepted > 0
    stats = engine.stats()
    assert stats.drafted_by_source == Counter(nextn=nextn.drafted, suffix=suffix.drafted)
    assert stats.accepted_by_source == Counter(nextn=nextn.accepted, suffix=suffix.accepted)
    assert stats.draft_tokens == nextn.drafted + suffix.drafted


@pytest.mark.rest
def test_more_is_accepted_than_of_nextn_alone():
    """In each request; and of matches more than twice the share: a cycle is wrong only where it is left."""
    alone, requests = serve(engine_with(suffix_drafts=False), copying()), serve(engine_with(), copying())
    assert [r.progress.output for r in alone] == [r.progress.output for r in requests] == plain()
    for a, r in zip(alone, requests, strict=True):
        assert set(a.progress.speculation.source_per_step) == {Origin.NEXTN}
        assert rate(r.progress.speculation) > rate(a.progress.speculation) > 0
    assert rate(whole(requests).of(Origin.SUFFIX)) > 2 * rate(whole(alone))


def rate(spec: Speculation) -> float:
    return spec.accepted / spec.drafted


@pytest.mark.rest
def test_a_copying_task():
    """A prompt whose continuation repeats it, and NextN layers that hardly ever know the next token."""
    params = rigged(noise=6.0, loud=0.3)
    undrafted, prompt = Reference(params, longest=128), prompts(1)[0]
    job = ([*prompt, *undrafted.speculate(prompt, 24).ids], replace(GREEDY, max_tokens=64))
    other = undrafted.speculate(job[0], 64).ids
    (alone,) = serve(engine_with(params, suffix_drafts=False), [job])
    (request,) = serve(engine_with(params), [job])
    assert request.progress.output == other == alone.progress.output
    assert len(set(other)) >= 3
    assert alone.progress.speculation.acceptance_length < 2
    assert request.progress.speculation.acceptance_length >= 4


def test_each_request_has_its_own_depth_and_may_refuse():
    """Two drafts at most, none of a match, and everything, side by side."""
    (a, _), (b, _), (c, deep) = copying()
    jobs = [(a, replace(deep, num_speculative_tokens=2)), (b, replace(deep, suffix_drafts=False)), (c, deep)]
    requests = serve(engine_with(), jobs)
    assert [r.progress.output for r in requests] == plain()
    for request, output in zip(requests, told(), strict=True):
        check_steps(request, output)
    two, refused, free = (r.progress.speculation for r in requests)
    assert set(two.drafted_per_step) == {2}
    assert two.of(Origin.SUFFIX).accepted > 0
    assert set(refused.source_per_step) == {Origin.NEXTN}
    assert refused.accepted > 0
    assert free.of(Origin.SUFFIX).accepted > 0


def run_one(engine: Engine, prompt: list[int], salt: str, tokens: int) -> Request:
    request = engine.make_request(prompt, replace(GREEDY, max_tokens=tokens), cache_salt=salt)
    prepare(engine, [request])
    engine.submit(request)
    finish(engine)
    return request


def test_texts_of_the_same_salt_are_drafted_from():
    """An output is drafted again up to its end, where the salt is the same; texts are as without drafts."""
    engine = engine_with(replace(copier(), nextn=()), cfg=NO_NEXTN, suffix_store=64)
    (prompt, _), *others = [(p[:8], params) for p, params in copying()]
    output = reference().speculate(prompt, 32).ids
    first = run_one(engine, prompt, "a", 24)
    stranger = run_one(engine, prompt, "b", 24)
    again = run_one(engine, prompt, "a", 32)
    assert first.progress.output == stranger.progress.output == output[:24]
    assert again.progress.output == output
    alone, foreign, stored = (r.progress.speculation for r in (first, stranger, again))
    assert drafting(stranger) == drafting(first)
    assert alone.of(Origin.STORE).drafted == foreign.of(Origin.STORE).drafted == 0
    # Four tokens find the text; from there on every draft is right, and the last of them are its last tokens.
    store = stored.of(Origin.STORE)
    assert store.accepted == store.drafted == 24 - SHORTEST - store.steps + 1
    assert store.drafted_per_step[-1] < 7
    assert engine.stats().accepted_by_source["store"] == store.accepted
    for other, _ in others:  # another prompt's text is seen as well, and changes no token
        request = run_one(engine, other, "a", 24)
        assert request.progress.output == reference().speculate(other, 24).ids
    engine.texts.forget()
    assert drafting(run_one(engine, prompt, "a", 24)) == drafting(first)


@pytest.mark.parametrize(
    "depth", [pytest.param(7, marks=pytest.mark.rest), pytest.param(31, marks=pytest.mark.slow)]
)
def test_without_nextn_layers_only_matches_are_drafts(depth):
    params = replace(copier(), nextn=())
    engine = engine_with(params, cfg=NO_NEXTN, num_speculative_tokens=depth)
    requests = serve(engine, copying())
    check(requests)
    spec = whole(requests)
    assert spec.drafted == spec.of(Origin.SUFFIX).drafted
    assert set(spec.drafted_per_step) == {0, depth}


@pytest.mark.rest
def test_the_nextn_cache_is_right_whatever_was_drafted():
    """After steps that verified a match, NextN drafts as a cache-free pass over the whole text does."""
    engine = engine_with()
    prompt, params = copying()[2]
    # 40 tokens take 5 steps at least, and a match is there before half of them are through.
    request = engine.make_request(prompt, replace(params, max_tokens=40))
    prepare(engine, [request])
    engine.submit(request)
    text, checked = [*prompt, *told()[2]], 0
    while not request.finished:
        engine.step()
        runner = local_runner(engine)
        runner.flushed()
        state = runner.state
        if not state.slots.active[0] or Origin.SUFFIX not in request.progress.speculation.source_per_step:
            continue
        known = int(state.slots.length[0]) + 1
        got = next_drafts(engine, state)
        near(got, reference().drafts(text[:known], 3)[1], of_model(TINY, known + 3))
        checked += 1
    assert checked >= 3


def next_drafts(engine: Engine, state: Any) -> np.ndarray:
    """NextN logits [K, V] of slot 0."""
    own = state.drafter.replace(pages=state.drafter.pages.other)
    return np.asarray(_propose(local_runner(engine).params, own, state.slots))[0]


@jax.jit
def _propose(params: Params, own: Any, slots: Any) -> jax.Array:
    on = xla_cpu(experts="dense")
    drafts, _ = build(TINY).propose(params, own, slots, DraftRules(3, 3, logits=True), on)
    assert drafts.logits is not None
    return drafts.logits


def drafting(request: Request) -> list[tuple[int, Origin]]:
    spec = request.progress.speculation
    return [*zip(spec.accepted_per_step, spec.source_per_step, strict=True)]


@pytest.mark.rest
def test_cached_pages_hold_their_tokens():
    """A prompt that begins in the prefix cache is matched from its first token on."""
    engine = engine_with()
    first = [serve(engine, [job])[0] for job in copying()]
    again = [serve(engine, [job])[0] for job in copying()]
    assert all(r.progress.cached_tokens >= 32 for r in again)
    assert [drafting(r) for r in again] == [drafting(r) for r in first]
    check(again)


@pytest.mark.rest
def test_committed_length():
    """Whatever lies past the committed tokens is harmless: the same steps with garbage there."""
    engine = engine_with()
    clean = serve(engine, copying())
    engine.flush_prefix_cache()
    requests = [engine.make_request(*job) for job in copying()]
    poison(engine)
    for r in requests:
        engine.submit(r)
    while engine.busy:
        engine.step()
        poison(engine)
    check(requests)
    assert [drafting(r) for r in requests] == [drafting(r) for r in clean]


@pytest.mark.rest
def test_preempted_requests_find_their_text_again():
    engine = engine_with(num_pages=12)
    requests = serve(engine, copying())
    assert engine.stats().preemptions > 0
    check(requests)


@pytest.mark.slow
def test_a_request_that_moves_takes_its_text_along():
    engine = engine_with()
    (a, short), (b, _), (c, long) = copying()
    brief = replace(short, max_tokens=3)
    requests = [engine.make_request(*job) for job in ((a, brief), (b, brief), (c, long))]
    engine.prepare(requests, every_size=True)
    for r in requests:
        engine.submit(r)
    assert requests[2].residence.slot in (-1, 2)
    finish(engine)
    assert requests[2].residence.slot < 2
    assert requests[2].progress.output == plain()[2]
    check_steps(requests[2], told()[2])
    assert requests[2].progress.speculation.of(Origin.SUFFIX).accepted > 0


@pytest.mark.slow
def test_on_a_mesh():
    mesh = make_mesh(2, 2)
    check(serve(engine_with(on_mesh(copier(), mesh), mesh=mesh), copying()))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["block", "coupled"])
def test_sampled_text_depends_on_its_seed_alone(verifier):
    """Whatever shares the batch; under coupled verification whatever was drafted, too."""
    sampled: Any = {"temperature": 0.5, "max_tokens": 32, "ignore_eos": True, "suffix_drafts": True}
    jobs = [(prompt, SamplingParams(**sampled, seed=i)) for i, (prompt, _) in enumerate(copying())]
    engine = engine_with(verifier=verifier, num_speculative_tokens=3)
    together = serve(engine, jobs)
    apart = [serve(engine, [job])[0] for job in jobs]
    assert [r.progress.output for r in together] == [r.progress.output for r in apart]
    assert whole(together).of(Origin.SUFFIX).accepted > 0
    if verifier == "coupled":
        none = [(p, replace(s, num_speculative_tokens=0)) for p, s in jobs]
        assert [r.progress.output for r in serve(engine, none, compiled=True)] == [
            r.progress.output for r in together
        ]


def test_requests_that_sample_ask_for_it():
    """A match is kept as often as sampling would have drawn it, drafts that are drawn themselves more often.

    Where nothing else drafts nothing is lost.
    """
    sampled = SamplingParams(temperature=0.5, max_tokens=4)
    engine = engine_with()
    assert engine.make_request([3, 4], GREEDY).suffix_drafts
    assert not engine.make_request([3, 4], sampled).suffix_drafts
    assert engine.make_request([3, 4], replace(sampled, suffix_drafts=True)).suffix_drafts
    alone = engine_with(replace(copier(), nextn=()), cfg=NO_NEXTN)
    assert alone.make_request([3, 4], sampled).suffix_drafts
    assert not alone.make_request([3, 4], replace(sampled, suffix_drafts=False)).suffix_drafts


def test_what_cannot_be_had_is_refused():
    with pytest.raises(ConfigError, match="num_speculative_tokens = 0: a step without drafts verifies none"):
        engine_with(num_speculative_tokens=0)
    with pytest.raises(RequestError, match="built without them"):
        make_engine().make_request([3, 4], replace(GREEDY, suffix_drafts=True))
    with pytest.raises(RequestError, match="suffix_drafts = 1; expected True or False or None"):
        replace(GREEDY, suffix_drafts=1)
    with pytest.raises(ConfigError, match="suffix_drafts=True"):
        make_engine(replace(tiny_params(), nextn=()), cfg=NO_NEXTN)


def test_the_default_drafter_needs_four_tokens():
    assert local_runner(engine_with()).decoding.drafter == Suffix(build(TINY))
    assert SHORTEST == 4
