"""The runner: what a drafter deferred is done before anything could miss it, and pages travel whole."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.arrays import Chunk, SlotRow
from mtp_jax.decode.drafter.recursive import DEFERRED
from mtp_jax.decode.keys import DraftKey, PageKey, SamplingMode, StepKey
from mtp_jax.decode.launches import (
    Admit,
    AllocateCache,
    DraftLaunch,
    DropWeights,
    Launch,
    Move,
    MoveExpert,
    PutWeights,
    ReadExperts,
    ReadPages,
    ReadRouted,
    ReleaseCache,
    RestoreWeights,
    Score,
    StepLaunch,
    Update,
    WritePages,
)
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.errors import ConfigError
from mtp_jax.model.sharding import make_mesh
from tests.engine.device import Device
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    accepted,
    engine_config,
    make_engine,
    on_mesh,
    prompts,
    runner_of,
    serve,
    tiny_params,
)

PLAIN, DEEP = (StepKey(1, depth, 1, SamplingMode()) for depth in (0, 3))
STRUCTURED = replace(PLAIN, mode=SamplingMode(structured=True))


class Arriving:
    """An array on the device that says what becomes of it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def copy_to_host_async(self) -> None:
        self.log.append(f"copy {self.name}")

    def block_until_ready(self) -> "Arriving":
        self.log.append(f"wait {self.name}")
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.log.append(f"read {self.name}")
        return np.zeros((1, 5), np.int32)


class Stub:
    """Programs that compute nothing: which were launched, in order. Each takes and gives the newest state."""

    def __init__(self, runner: LocalRunner) -> None:
        self.log: list[str] = []
        self.keys = [PageKey(2)]
        self.newest = runner.state
        self.drafter = runner.decoding.drafter
        for name in ("admit", "move", "update", "write_pages"):
            setattr(self, name, self._of(name))
        for name in ("step", "flush", "draft_phase", "verify_phase"):
            setattr(self, name, self._of(name, lambda name=name: self._result(name)))
        counts = Arriving(self.log, "load"), Arriving(self.log, "over")
        self.read_experts = self._of("read_experts", lambda: counts)
        self.draft = self._of("draft", lambda: np.zeros((1, 3)), state=False)
        self.read_pages = self._of("read_pages", lambda: Arriving(self.log, "pages"), state=False)

    def _result(self, name: str) -> Any:
        if name == "flush":
            return Arriving(self.log, name)
        nothing: dict[str, Any] = {
            "logprobs": None,
            "prompt": None,
            "margins": None,
            "tokens": np.zeros((1, 0)),
            "parents": None,
        }
        return SimpleNamespace(packed=Arriving(self.log, name), **nothing)

    def _of(
        self, name: str, result: Callable[[], Any] | None = None, state: bool = True
    ) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            assert any(a is self.newest for a in args), "an old state"
            self.log.append(name)
            if not state:
                assert result
                return result(), result()
            self.newest = self.newest.replace()
            return (self.newest, result()) if result else self.newest

        return run


def stubbed() -> tuple[LocalRunner, list[str]]:
    runner = local_runner(make_engine())
    stub: Any = Stub(runner)
    runner.programs = stub
    return runner, stub.log


NOTHING: Any = np.zeros(1)


OPERATIONS: dict[str, Launch[Any]] = {
    "admit": Admit(0, SlotRow(*[NOTHING] * 6), None),
    "move": Move(1, 0),
    "update": Update(np.ones(4, bool), np.zeros((4, 4), np.int32)),
    "step": StepLaunch(DEEP),
    "draft": DraftLaunch(DraftKey(3, 1), 0),
    "read_experts": ReadExperts(),
    "read_pages": ReadPages(0, (1,)),
    "write_pages": WritePages(0, (1,), (np.zeros((1, 3)),)),
}


def test_every_operation_is_tried():
    others = {MoveExpert, ReleaseCache, AllocateCache, ReadRouted}  # of weights, memory, nothing deferred
    others |= {Score, DropWeights, PutWeights, RestoreWeights}
    assert {*map(type, OPERATIONS.values()), *others} == {*Launch.__subclasses__()}


def test_what_is_no_launch_is_refused():
    runner, _ = stubbed()
    with pytest.raises(TypeError, match="is no launch"):
        runner.do(Launch())


def test_what_leaves_is_read_before_every_launch_that_writes():
    runner, log = stubbed()
    runner.before_writing.append(lambda: runner.do(ReadPages(0, (1,))))
    for launch in OPERATIONS.values():
        log.clear()
        runner.do(launch)
        read = [e for e in log if " " not in e][:-1]
        assert read == (["read_pages"] if isinstance(launch, StepLaunch | WritePages) else [])


def test_a_cache_is_given_back_once_deferred_work_is_done():
    runner, log = stubbed()
    runner.do(StepLaunch(PLAIN))
    log.clear()
    runner.do(ReleaseCache())
    assert [e for e in log if " " not in e] == ["flush"]


def test_a_chunk_waits_for_deferred_work_and_defers_none():
    runner, log = stubbed()
    filling = replace(PLAIN, tokens=16, prompts=1)
    runner.do(StepLaunch(PLAIN))
    log.clear()
    for _ in range(2):
        runner.do(StepLaunch(filling, Chunk(*[NOTHING] * 8)))
    runner.do(StepLaunch(DEEP))
    assert [e for e in log if " " not in e] == ["flush", "step", "step", "step"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_deferred_work_is_done_before_anything_else_runs(name):
    runner, log = stubbed()
    runner.do(StepLaunch(PLAIN))
    runner.do(StepLaunch(PLAIN))
    log.clear()
    runner.do(OPERATIONS[name])
    assert [e for e in log if " " not in e] == ["flush", name]
    log.clear()
    runner.do(OPERATIONS[name])
    assert [e for e in log if " " not in e] == [name], "once"


def test_steps_without_drafts_leave_their_work_to_one_launch():
    runner, log = stubbed()
    for _ in range(3 * DEFERRED + 2):
        runner.do(StepLaunch(PLAIN))
    launched = [e for e in log if " " not in e]
    steps = [sum(e == "step" for e in launched[:i]) for i, e in enumerate(launched) if e == "flush"]
    assert steps == [DEFERRED, 2 * DEFERRED, 3 * DEFERRED]


def test_a_structured_step_defers_its_work_too():
    runner, log = stubbed()
    with pytest.raises(ValueError, match="masks"):
        runner.do(StepLaunch(STRUCTURED))
    runner.do(StepLaunch(STRUCTURED), lambda drafts, parents=None: np.zeros((1, 1, 2), np.uint32))
    runner.do(Move(1, 0))
    assert [e for e in log if " " not in e] == ["draft_phase", "verify_phase", "flush", "move"]


def test_a_result_is_copied_at_once_and_read_when_asked_for():
    runner, log = stubbed()
    pending = runner.do(StepLaunch(DEEP))
    assert log == ["step", "copy step"]
    assert pending.read().packed.shape == (1, 5)
    assert log[2:] == ["read step"]


def test_pages_are_copied_at_once_and_read_when_asked_for():
    runner, log = stubbed()
    pending = runner.do(ReadPages(0, (1,)))
    assert log == ["read_pages", "copy pages", "copy pages"]
    assert [a.shape for a in pending.read()] == [(1, 5), (1, 5)]
    assert log[3:] == ["read pages", "read pages"]


def test_a_flush_comes_with_the_launch_behind_it():
    """To be waited for, and timed, by itself."""
    runner, log = stubbed()
    assert runner.do(StepLaunch(PLAIN)).flush is None
    runner.do(StepLaunch(PLAIN))
    runner.do(Move(1, 0))
    pending = runner.do(StepLaunch(DEEP))
    assert pending.flush is not None
    assert pending.flush.steps == 2
    assert pending.flush.at <= pending.at
    pending.flush.wait()
    assert log[-1] == "wait flush"
    assert runner.do(StepLaunch(DEEP)).flush is None


def test_tools_need_the_runner_of_this_process():
    device = Device(engine_config())
    with pytest.raises(ConfigError, match="runs on a Device"):
        local_runner(Engine(TINY, engine_config(), device))


def test_pages_need_a_program():
    with pytest.raises(ConfigError, match="PageKey"):
        runner_of(TINY, tiny_params(), engine_config()).do(ReadPages(0, (0,)))  # no engine's programs


# Round trips

PROMPT = prompts(1, shortest=44)[0]


def cached(engine: Engine, request: Request) -> tuple[int, list[int]]:
    """The data shard and the numbers of the full pages that the prefix cache keeps of a prompt."""
    digests = request.residence.digests[: len(request.prompt) // engine.config.page_size]
    found = [pool.match(digests) for pool in engine.scheduler.pools]
    shard = max(range(len(found)), key=lambda i: len(found[i]))
    return shard, found[shard]


def adopt(engine: Engine, digests: list[bytes], shard: int, data: tuple[np.ndarray, ...]) -> list[int]:
    """Put pages into other numbers of an engine, where its prefix cache finds them."""
    pool = engine.scheduler.pools[shard]
    taken = pool.allocate(7)
    assert taken
    pages = taken[::-2][: len(digests)]  # neither in order nor side by side
    engine.runner.do(WritePages(shard, tuple(pages), data))
    for page, digest in zip(pages, digests, strict=True):
        pool.register(page, digest)
    pool.release(taken)
    return pages


def check_handed_over(source: Engine, target: Engine, shard: int) -> None:
    """A prompt goes on in ``target`` from the pages of ``source``: same tokens, same acceptance."""
    params = replace(GREEDY, max_tokens=12)
    (first,) = serve(source, [(PROMPT, params)])
    origin, pages = cached(source, first)
    assert len(pages) == 2
    for engine in (source, target):
        engine.runner.compile([PageKey(1), PageKey(4)])
    data = source.runner.do(ReadPages(origin, tuple(pages))).read()
    assert all(isinstance(a, np.ndarray) and len(a) == 2 for a in data)
    numbers = adopt(target, first.residence.digests[:2], shard, data)
    assert numbers != pages
    for a, b in zip(target.runner.do(ReadPages(shard, tuple(numbers))).read(), data, strict=True):
        np.testing.assert_array_equal(a, b)
    (second,) = serve(target, [(PROMPT, params)])
    assert second.progress.cached_tokens == 32
    assert target.scheduler.shard_of(second.residence.slot) == shard
    told = Reference(tiny_params(), longest=128).speculate(PROMPT, 12, 3)
    assert (second.progress.output, accepted(second)) == (told.ids, told.accepted)
    assert sum(told.accepted) > 0


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"kv_cache_dtype": "fp8"}, id="fp8", marks=pytest.mark.rest),
    ],
)
def test_pages_go_to_another_engine(sizes):
    source, target = (make_engine(max_num_seqs=4, **sizes) for _ in range(2))
    if not sizes:
        check_handed_over(source, target, 0)
        return
    # What FP8 rounds away is not in the reference: the engine itself is.
    params = replace(GREEDY, max_tokens=12)
    serve(source, [(PROMPT, params)], exactly=True)
    (want,) = serve(source, [(PROMPT, params)], exactly=True)
    assert want.progress.cached_tokens == 32
    shard, pages = cached(source, want)
    for engine in (source, target):
        engine.runner.compile([PageKey(2)])
    adopt(target, want.residence.digests[:2], shard, source.runner.do(ReadPages(shard, tuple(pages))).read())
    (got,) = serve(target, [(PROMPT, params)], exactly=True)
    assert got.progress.cached_tokens == 32
    assert (got.progress.output, accepted(got)) == (want.progress.output, accepted(want))
    assert sum(accepted(want)) > 0


@pytest.mark.rest
def test_pages_go_to_another_shard_and_another_mesh():
    mesh = make_mesh(2, 2)
    spread = make_engine(on_mesh(tiny_params(), mesh), mesh=mesh, max_num_seqs=4)
    check_handed_over(make_engine(), spread, 1)
    text = local_runner(spread).programs._compiled[PageKey(4)].read.as_text()
    assert "all-gather" not in text, "no shard sees the whole cache of another"
    spread.flush_prefix_cache()
    check_handed_over(spread, make_engine(), 0)


def test_more_pages_than_a_program_takes_and_fewer(rng):
    engine = make_engine()
    engine.runner.compile([PageKey(1), PageKey(4)])
    runner = local_runner(engine)
    pages = (9, 2, 5, 0, 7, 3, 8)
    data = tuple(
        rng.random((7, *a.shape[1:])).astype(a.dtype) for a in engine.runner.do(ReadPages(0, (0,))).read()
    )

    def kept() -> list[np.ndarray]:
        state = runner.state
        return [np.asarray(a) for a in jax.tree.leaves((state.trunk, state.drafter.pages))]

    before = kept()
    engine.runner.do(WritePages(0, pages, data))
    for a, b in zip(engine.runner.do(ReadPages(0, pages)).read(), data, strict=True):
        np.testing.assert_array_equal(a, b)
    others = [i for i in range(engine.pages) if i not in pages]
    for a, b in zip(kept(), before, strict=True):
        np.testing.assert_array_equal(a[others], b[others])
    with pytest.raises(ValueError, match="7 pages for 2"):
        WritePages(0, (1, 2), data)
