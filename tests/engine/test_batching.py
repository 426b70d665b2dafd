"""A greedy request's tokens and its accepted drafts do not depend on depth, batch, slot, pages or chunks.

Both are compared with a loop that has no cache and no batch: a broken drafter still gives the right text,
only slower, and a wrong cache row may still give the right token, so the log-probabilities are compared too.
"""

import functools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from mtp_jax.decode.keys import StepKey
from mtp_jax.engine.request import Request
from tests.engine.plain import reference, scored_by, widest
from tests.models import (
    GREEDY,
    Reference,
    Told,
    accepted,
    finish,
    make_engine,
    prepare,
    prompts,
    serve,
    tiny_params,
    watch,
)

PROMPTS = prompts(8)
TOKENS = 24
assert GREEDY.max_tokens == TOKENS
rest, slow = pytest.mark.rest, pytest.mark.slow


@functools.cache
def told(prompt: tuple[int, ...], depth: int = 3) -> Told:
    result = reference().speculate(prompt, TOKENS, depth)
    assert result.margin > 1e-2, "almost a tie: rounding may decide; choose another prompt"
    return result


def check(requests: Iterable[Request]) -> None:
    """Tokens, acceptance and log-probabilities are the reference's; somebody accepts a draft."""
    total = 0
    for r in requests:
        expected = told(r.prompt, r.depth)
        assert r.progress.output == expected.ids[: len(r.progress.output)]
        assert r.progress.finish_reason == "length"
        assert len(r.progress.output) == r.max_tokens
        assert accepted(r) == expected.accepted[: r.progress.speculation.steps]
        scored_by(reference(), r)
        total += r.progress.speculation.accepted
    assert total > 0 or all(r.depth == 0 for r in requests)


def at(depth: int):
    return replace(GREEDY, num_speculative_tokens=depth)


@rest
@pytest.mark.parametrize("depth", [1, 3])
def test_an_executable_with_room_for_more_makes_as_many_drafts_as_a_launch_asks_for(depth, monkeypatch):
    """As one of that depth does, whatever the slots' own depths are."""
    engine = make_engine(num_speculative_tokens=5, adaptive_depth=True)
    engine.depth.choose = lambda keys, *rest: [k for k in keys if k.depth <= depth][-1]  # type: ignore[method-assign]
    launched: list[StepKey] = []
    watch(monkeypatch, engine.runner, lambda step: launched.append(step.key))
    prepare(engine, [engine.make_request(PROMPTS[0], at(5))])
    requests = serve(engine, [(p, GREEDY) for p in PROMPTS[:4]], compiled=True)
    for r in requests:
        expected = told(r.prompt, depth)
        assert r.progress.output == expected.ids
        # The last steps draft no more than a request has tokens left.
        assert accepted(r)[:-2] == expected.accepted[: r.progress.speculation.steps - 2]
    assert sum(r.progress.speculation.accepted for r in requests) > 20
    assert (depth, 5) in {(k.depth, k.room) for k in launched}


@rest
@pytest.mark.parametrize("depth", range(6))
def test_every_depth(depth):
    """In the programs of the deepest."""
    engine = make_engine(num_speculative_tokens=5)
    prepare(engine, [engine.make_request(PROMPTS[0], GREEDY)])
    requests = serve(engine, [(p, at(depth)) for p in PROMPTS[:4]], compiled=True)
    check(requests)
    assert all(set(r.progress.speculation.drafted_per_step) == {depth} for r in requests)


@pytest.mark.slow
@pytest.mark.parametrize("depth", range(5))
def test_every_depth_in_programs_of_its_own(depth):
    check(serve(make_engine(num_speculative_tokens=5), [(p, at(depth)) for p in PROMPTS[:4]]))


@rest
def test_rows_of_one_batch_have_their_own_depth():
    engine = make_engine(num_speculative_tokens=5)
    requests = serve(engine, [(p, at(d)) for p, d in zip(PROMPTS[:4], (5, 0, 3, 1), strict=True)])
    check(requests)
    assert [r.progress.speculation.drafted_per_step[0] for r in requests] == [5, 0, 3, 1]


@rest
@pytest.mark.parametrize("count", [*(pytest.param(n, marks=slow) for n in (1, 2)), 3])
def test_every_batch_size(count):
    check(serve(make_engine(num_speculative_tokens=5), [(p, at(5)) for p in PROMPTS[:count]], exactly=True))


@pytest.mark.parametrize("shift", [0, *(pytest.param(n, marks=rest) for n in (1, 2, 3))])
def test_every_slot(shift):
    engine = widest()
    requests = [engine.make_request(p, GREEDY) for p in (*PROMPTS[shift:4], *PROMPTS[:shift])]
    for r in requests:
        engine.submit(r)
    engine.step()
    assert [r.residence.slot for r in requests] == list(range(4))
    finish(engine)
    check(requests)


def test_a_row_moves_down_when_others_have_ended():
    engine = widest()
    jobs = [(p, replace(GREEDY, max_tokens=n)) for p, n in zip(PROMPTS, (2, 24, 4, 24), strict=False)]
    requests = serve(engine, jobs, compiled=True)
    assert requests[-1].residence.slot < 3
    check(requests)


@rest
def test_reversed_order():
    check(serve(widest(), [(p, GREEDY) for p in reversed(PROMPTS)], compiled=True))


def test_more_requests_than_slots():
    engine = widest()
    lengths = [24, 3, 1, 9, 24, 2, 5, 24]
    jobs = [(p, replace(GREEDY, max_tokens=n)) for p, n in zip(PROMPTS, lengths, strict=True)]
    requests = serve(engine, [*jobs, *reversed(jobs)], compiled=True)
    check(requests)
    assert {r.residence.slot for r in requests} == {0, 1, 2, 3}


def test_requests_join_and_leave_a_running_batch():
    engine = widest()
    requests = [engine.make_request(p, replace(GREEDY, max_tokens=24 - 3 * i)) for i, p in enumerate(PROMPTS)]
    waiting = list(requests)
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop(0))
        engine.step()
        engine.step()
    check(requests)


@pytest.mark.parametrize(
    ("page_size", "chunk"),
    [
        pytest.param(16, 7, marks=rest),
        pytest.param(1, 64, marks=slow),
        pytest.param(64, 1, marks=slow),
        pytest.param(16, 64, marks=slow),
        pytest.param(1, 3, marks=slow),
        pytest.param(7, 5, marks=slow),
    ],
)
def test_pages_and_chunks(page_size, chunk):
    engine = make_engine(page_size=page_size, prefill_chunk=chunk)
    check(serve(engine, [(p, GREEDY) for p in PROMPTS[4:]]))


@rest
def test_prompt_lengths_around_page_and_chunk_edges():
    long = prompts(1, shortest=40)[0]
    lengths = (1, 2, 3, 15, 16, 17, 18, 31, 32, 33, 40)  # the last one fills max_model_len
    check(serve(widest(), [(long[:n], GREEDY) for n in lengths], compiled=True))


@rest
def test_short_prompts_are_prefilled_together(monkeypatch):
    """Up to four at a time. What a prompt's own tokens score is its own."""
    engine = widest(prefill_chunk=64)
    launched: list[StepKey] = []
    watch(monkeypatch, engine.runner, lambda step: launched.append(step.key))
    (longest,) = prompts(1, shortest=6)
    asked = [longest[: 3 + i] for i in range(4)]
    requests = [engine.make_request(p, replace(GREEDY, prompt_logprobs=0)) for p in asked]
    for r in requests:
        engine.submit(r)
    finish(engine)
    check(requests)
    assert sorted((k.prompts, k.tokens) for k in launched if k.tokens) == [(4, 16)]
    assert all(r.progress.prompt_logprobs[0] is None for r in requests)


@pytest.mark.slow
def test_a_deeper_executable_than_needed_stays_inside_its_page_table():
    """Drafts that a shallow row does not verify must not be written over its own rows.

    The depth-0 request reaches the edge of a page-table bucket (256 rows) after the deep one has ended,
    when only the depth-3 executable exists.
    """
    engine = make_engine(max_model_len=300)
    long = prompts(1, shortest=254, seed=5)[0]
    requests = serve(engine, [(long, at(0)), (PROMPTS[0], replace(GREEDY, max_tokens=4))])
    plain = Reference(tiny_params(), longest=300)
    scored_by(plain, requests[0])
    rows = plain.logits([*long, *requests[0].progress.output])[len(long) - 1 : -1]
    assert requests[0].progress.output == rows.argmax(-1).tolist()
