"""Programs: which covers a need, that nothing compiles while serving, that the state is donated."""

import signal
import threading
from dataclasses import replace

import jax
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.keys import DraftKey, SamplingMode, StepKey, buckets, cheapest, name_of
from mtp_jax.decode.programs import Programs
from mtp_jax.decode.state import State
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from tests.decode.helpers import compilations as compilations
from tests.models import GREEDY, finish, make_engine, prepare, prompts, serve

SAMPLED = SamplingParams(temperature=0.8, top_k=5, seed=3, max_tokens=9, ignore_eos=True)
PLAIN = SamplingMode()
BLOCK = SamplingMode("sampled", "block")


def test_every_program_of_an_engine_has_a_name_of_its_own():
    """By which profiles tell them apart."""
    widths, pages = (None, 0, 5), (1, 16)
    modes = [
        replace(mode, logprobs=width, structured=structured)
        for mode in (PLAIN, BLOCK)
        for width in widths
        for structured in (False, True)
    ]
    keys = [
        *(StepKey(b, k, p, mode) for b in (1, 8) for k in (0, 3) for p in pages for mode in modes),
        *(
            StepKey(b, b, p, mode, t, count, prompt)
            for b in (0, 8)
            for t in (16, 256)
            for p in pages
            for mode in modes
            for prompt in widths
            for count in (1, 4)
        ),
        *(DraftKey(k, p) for k in (1, 3) for p in pages),
    ]
    assert len({name_of(key) for key in keys}) == len(keys)


def chunk(
    tokens: int,
    pages: int,
    logprobs: int | None = None,
    scores: int | None = None,
    prompts: int = 1,
    slots: int = 0,
) -> StepKey:
    return StepKey(slots, 0, pages, replace(PLAIN, logprobs=logprobs), tokens, prompts, scores)


@pytest.mark.parametrize(
    ("own", "need", "able"),
    [
        (StepKey(4, 3, 8, PLAIN), StepKey(4, 3, 8, PLAIN), True),
        (StepKey(4, 3, 8, PLAIN), StepKey(1, 0, 1, PLAIN), True),
        (StepKey(4, 3, 8, PLAIN), StepKey(5, 3, 8, PLAIN), False),
        (StepKey(4, 3, 8, PLAIN), StepKey(4, 4, 8, PLAIN), False),
        (StepKey(4, 3, 8, PLAIN), StepKey(4, 3, 9, PLAIN), False),
        (StepKey(4, 3, 8, BLOCK), StepKey(4, 3, 8, PLAIN), True),
        (StepKey(4, 3, 8, PLAIN), StepKey(4, 3, 8, BLOCK), False),
        (StepKey(4, 3, 8, replace(BLOCK, verifier="rejection")), StepKey(4, 3, 8, BLOCK), False),
        (StepKey(4, 3, 8, replace(BLOCK, drafting="greedy")), StepKey(4, 3, 8, BLOCK), False),
        (StepKey(4, 3, 8, replace(PLAIN, logprobs=5)), StepKey(4, 3, 8, replace(PLAIN, logprobs=0)), True),
        (StepKey(4, 3, 8, PLAIN), StepKey(4, 3, 8, replace(PLAIN, logprobs=0)), False),
        (chunk(16, 4), chunk(16, 4), True),
        (chunk(16, 4), chunk(1, 1), True),
        (chunk(16, 4), chunk(17, 4), False),
        (chunk(16, 4), chunk(16, 5), False),
        (chunk(16, 4, prompts=4), chunk(16, 4, prompts=2), True),
        (chunk(16, 4), chunk(16, 4, prompts=2), False),
        (chunk(16, 4), chunk(16, 4, 0), False),
        (chunk(16, 4, 5), chunk(16, 4, 0), True),
        (chunk(16, 4, 5), chunk(16, 4, 0, 0), False),
        (chunk(16, 4, 5, 5), chunk(16, 4, None, 0), True),
        (chunk(16, 8, slots=4), StepKey(4, 0, 8, PLAIN), False),
        (StepKey(4, 0, 8, PLAIN), chunk(16, 8, slots=4), False),
        (chunk(16, 8, slots=4), chunk(16, 8), True),
        (chunk(16, 8), chunk(16, 8, slots=1), False),
    ],
)
def test_covers(own, need, able):
    assert own.covers(need) is able


def test_cost_prefers_fewer_rows_then_fewer_pages_then_less_sampling():
    ranked = [
        StepKey(1, 0, 8, BLOCK),
        StepKey(1, 3, 4, PLAIN),
        StepKey(1, 3, 4, BLOCK),
        StepKey(1, 3, 8, PLAIN),
        StepKey(4, 3, 1, PLAIN),
    ]
    shuffled = [ranked[i] for i in (3, 0, 4, 2, 1)]
    assert sorted(shuffled, key=lambda k: k.cost) == ranked


def test_ctrl_c_waits_for_no_program_that_is_being_compiled(monkeypatch):
    go, ended, main = threading.Event(), threading.Event(), threading.get_ident()

    def compile_for_long(key):
        signal.pthread_kill(main, signal.SIGINT)
        go.wait(60)
        ended.set()

    made = local_runner(make_engine()).programs
    programs = Programs(made.lowering.decoding, made.lowering.params, made.lowering.state)  # a set of its own
    monkeypatch.setattr(programs, "_compile_bookkeeping", lambda: {})
    monkeypatch.setattr(programs, "_compile_one", compile_for_long)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            programs.compile([StepKey(1, 0, 1, PLAIN), StepKey(1, 0, 2, PLAIN)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert not ended.is_set()
    go.set()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 1, 2), (1, 2, 4, 8)),
        ((6, 1, 2), (1, 2, 4, 6)),
        ((1, 1, 2), (1,)),
        ((300, 16, 4), (16, 64, 256, 300)),
    ],
)
def test_buckets(arguments, expected):
    assert tuple(buckets(*arguments)) == expected


def test_an_uncovered_need_is_an_error_not_a_compilation():
    engine = make_engine(num_pages=23)  # a shape of its own, so that no other test has compiled for it
    with pytest.raises(ConfigError, match="no program covers"):
        engine.runner.cover(StepKey(1, 3, 1, PLAIN))
    engine.submit(engine.make_request([5, 6], GREEDY))
    with pytest.raises(ConfigError, match="compile it first"):
        engine.runner.cover(chunk(1, 1))
    assert len(engine.runner.keys) == 0
    assert DraftKey(1, 1) not in local_runner(engine).programs


@pytest.mark.parametrize("other", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.rest)])
def test_serving_compiles_nothing(compilations, other):
    """Mixed lengths, depths, modes, aborts and a full queue: all of it runs on what ``prepare`` compiled."""
    engine = make_engine()
    mix = [
        GREEDY,
        other,
        replace(GREEDY, num_speculative_tokens=0),
        replace(other, num_speculative_tokens=1),
    ]
    requests = [engine.make_request(p, mix[i % 4]) for i, p in enumerate(prompts(8))]
    prepare(engine, requests)
    compiled = len(engine.runner.keys)
    for r in requests:
        engine.submit(r)
    engine.step()
    compilations.clear()
    for _ in range(4):
        engine.step()
    engine.abort(requests[1])
    engine.abort(requests[7])
    finish(engine)
    assert compilations == []
    assert len(engine.runner.keys) == compiled
    assert sum(r.progress.speculation.accepted for r in requests) > 0
    assert [r.progress.finish_reason for r in requests] == ["length", "abort"] + ["length"] * 5 + ["abort"]
    # The listener does hear compilations.
    jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()
    assert compilations


def caches(state: State) -> list[jax.Array]:
    return jax.tree.leaves((state.trunk, state.drafter.pages.cache))


def test_the_state_is_donated():
    """Each program takes the cache over: the old buffers are gone, and the new ones are the same memory."""
    engine = make_engine()
    programs = local_runner(engine).programs
    request = engine.make_request(prompts(1)[0], GREEDY)
    serve(engine, [(prompts(1)[0], GREEDY)])
    gone = 0
    for name in ("admit", "step", "update"):
        run = getattr(programs, name)

        def donating(*args, run=run):
            nonlocal gone
            state = next(a for a in args if hasattr(a, "trunk"))
            before = {a.unsafe_buffer_pointer() for a in caches(state)}
            out = run(*args)
            new = out if hasattr(out, "trunk") else out[0]
            assert all(a.is_deleted() for a in jax.tree.leaves((state.trunk, state.drafter.pages)))
            assert {a.unsafe_buffer_pointer() for a in caches(new)} == before
            gone += 1
            return out

        setattr(programs, name, donating)
    try:
        engine.submit(request)
        for _ in range(3):
            engine.step()
        engine.abort(request)
        engine.step()
    finally:
        for name in ("admit", "step", "update"):
            delattr(programs, name)
    assert gone >= 5


def test_steps_allocate_no_second_cache():
    engine = make_engine()
    serve(engine, [(prompts(1)[0], GREEDY)])
    runner = local_runner(engine)
    cache = sum(a.nbytes for a in caches(runner.state))
    for key in runner.keys:
        if not isinstance(key, DraftKey):
            used = runner.programs.program(key).memory_analysis()
            assert used.alias_size_in_bytes >= cache, key


def test_a_deeper_executable_makes_as_many_drafts_as_are_needed():
    """Its windows have room for more: neither pages nor tokens are needed for those."""
    deep, need = StepKey(4, 3, 8, SamplingMode()), StepKey(2, 1, 4, SamplingMode())
    found = cheapest([deep], need)
    assert found is not None
    assert (found.program, found.depth, found.room) == (deep, 1, 3)
    assert found.bucket == deep.at(0).bucket == StepKey(4, 0, 8, SamplingMode())
    assert name_of(found) == name_of(deep)
    assert cheapest([deep], replace(need, depth=4)) is None
