"""What a leader launches, its followers launch in the same order, with the same arrays."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from mtp_jax.decode.arrays import Chunk, MaskMaker, SamplingState, SlotRow
from mtp_jax.decode.keys import DraftKey, Key, PageKey, SamplingMode, ScoreKey, StepKey
from mtp_jax.decode.launches import (
    Admit,
    AllocateCache,
    DraftLaunch,
    DropWeights,
    Flush,
    Launch,
    Move,
    MoveExpert,
    Pending,
    PutWeights,
    ReadExperts,
    ReadPages,
    ReadRouted,
    ReleaseCache,
    RestoreWeights,
    Runner,
    Score,
    StepLaunch,
    Update,
    WritePages,
)
from mtp_jax.errors import ConfigError
from mtp_jax.hosts.ending import Ending
from mtp_jax.hosts.leader import LeaderRunner
from mtp_jax.hosts.messages import Compile, End, Masks, Publish, Welcome
from mtp_jax.hosts.replay import replay
from tests.hosts.helpers import Meeting

# Of what would have ended a process: here the thread goes on, and may do so after its test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

PLAIN = StepKey(4, 3, 1, SamplingMode())
CHUNKED = StepKey(4, 3, 1, SamplingMode(), tokens=2, prompts=1)
STRUCTURED = StepKey(4, 3, 1, SamplingMode(structured=True))
RANKED = StepKey(4, 3, 1, SamplingMode(), kept=1)
SCORE = ScoreKey(1, 8, (2, -2))
DRAFTS = np.arange(12).reshape(4, 3)


class Programs:
    """Compiled when ``ready`` is set."""

    def __init__(self) -> None:
        self.published: list[Key] = []
        self.ready = threading.Event()
        self.ready.set()

    def __contains__(self, key: Key) -> bool:
        return key in self.published

    def build(self, key: Key) -> str:
        assert self.ready.wait(20)
        if key == PageKey(99):
            raise ConfigError("99 pages are too many")
        return f"program of {key}"

    def publish(self, key: Key, program: str) -> None:
        assert program == f"program of {key}"
        self.published.append(key)


class Device(Runner):
    """Keeps what it is asked to launch, numbers and arrays as text."""

    def __init__(self) -> None:
        super().__init__(shards=2)
        self.programs, self.log = Programs(), list[str]()

    @property
    def keys(self) -> list[Key]:
        return self.programs.published

    def compile(self, keys: Any, done: Any = None) -> None:
        raise AssertionError("ranks compile one by one")

    def find(self, need: StepKey) -> StepKey | None:
        return need

    def _do(self, launch: Launch[Any], masks: MaskMaker | None) -> Pending[Any]:
        self.log.append(f"{_plain(launch)}")
        if isinstance(launch, StepLaunch) and launch.key.mode.structured:
            assert masks
            self.log += [f"masks {_plain(masks(drafts))}" for drafts in (None, DRAFTS)]
        if isinstance(launch, StepLaunch) and launch.chunk is not None and launch.chunk.tokens[0, 0] == 13:
            raise RuntimeError("the device\nis gone")
        return Pending(1.0, lambda: len(self.log))


def _plain(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.dtype.name, x.tolist()
    if is_dataclass(x):
        return [type(x).__name__, *(_plain(getattr(x, f.name)) for f in fields(x))]
    return [_plain(y) for y in x] if isinstance(x, tuple) else x


class Pair:
    """A leader and a follower that replays on a thread; ``ends`` are the statuses that either ended with."""

    def __init__(self) -> None:
        self.meeting = Meeting()
        self.ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.follower = self.meeting.follower()
        self.meeting.joined()
        self.here, self.there = Device(), Device()
        self.ending = Ending("rank 0 of 2", lambda status: self.ends.put(("leader", status)))
        self.runner = LeaderRunner(cast(Any, self.here), self.meeting.leader, self.ending)
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        ending = Ending("rank 1 of 2", lambda status: self.ends.put(("follower", status)))
        with suppress(Exception):  # what ends a process
            replay(cast(Any, self.there), self.follower, ending)

    def finish(self) -> None:
        self.meeting.leader.send(End())
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.meeting.leader.close("the test is over")
    found.follower.finish()


def _row() -> SlotRow:
    numbers, kinds = iter(range(100)), {"Float": np.float32, "Bool": np.bool_, "UInt32": np.uint32}

    def filled(kind: type) -> dict[str, Any]:
        declared: list[tuple[str, Any]] = [
            (f.name, f.type) for f in fields(kind) if f.name not in ("sampling", "texts")
        ]
        axes = {name: len(str(of.dim_str).split()) for name, of in declared}
        return {
            name: np.full((1, 3)[: axes[name]], next(numbers), kinds.get(of.__name__.split("[")[0], np.int32))
            for name, of in declared
        }

    texts = np.array([[5, 6, -1]], np.int32)
    return SlotRow(**filled(SlotRow), sampling=SamplingState(**filled(SamplingState)), texts=texts)


def _chunk(token: int = 7) -> Chunk:
    one, two = np.array([3], np.int32), np.array([[token, 8]], np.int32)
    return Chunk(one, one + 1, one + 2, one > 2, two, two + 1, one - 4, np.ones((1, 2), np.uint32))


LAUNCHES: tuple[Launch[Any], ...] = (
    Admit(3, _row(), None),
    Admit(1, _row(), 5),
    Move(3, 0),
    Update(np.array([True, False]), np.arange(4, dtype=np.int32).reshape(2, 2)),
    StepLaunch(PLAIN),
    StepLaunch(CHUNKED, _chunk()),
    StepLaunch(STRUCTURED),
    StepLaunch(RANKED, estimate=np.arange(12, dtype=np.float32).reshape(2, 3, 2)),
    DraftLaunch(DraftKey(2, 1), 1),
    ReadPages(1, (3, 2)),
    WritePages(1, (3,), (np.ones((1, 2), np.float32), np.zeros((1, 4), np.uint16))),
    ReadExperts(),
    ReadRouted(1, (3, 2), 7),
    MoveExpert(1, 7, 2, np.arange(16, dtype=np.int32).reshape(8, 2)),
    ReleaseCache(),
    AllocateCache(),
    Score(SCORE, np.arange(8, dtype=np.int32).reshape(1, 8)),
    DropWeights("draft", True),
    RestoreWeights("draft"),
    PutWeights("weights", 3, np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)),
)


def test_every_operation_is_tried():
    assert {*map(type, LAUNCHES)} == {*Launch.__subclasses__()}


def test_every_operation_is_repeated_in_order(pair):
    runner, seen = pair.runner, list[Any]()
    assert runner.shards == 2

    def masks(drafts: np.ndarray | None, parents: np.ndarray | None = None) -> np.ndarray:
        assert parents is None
        seen.append(None if drafts is None else drafts.tolist())
        return np.full((4, 4, 600), 2**32 - 1 - len(seen), np.uint32)

    keys = [PLAIN, CHUNKED, STRUCTURED, RANKED, DraftKey(2, 1), SCORE]
    runner.compile(keys, lambda i, n: seen.append((i, n)))
    assert seen == [(i, 6) for i in range(1, 7)]
    seen.clear()
    pending = [runner.do(launch, masks) for launch in LAUNCHES]
    assert seen == [None, DRAFTS.tolist()]
    assert [p.read() for p in pending] == [len(pair.here.log)] * len(LAUNCHES)
    pair.finish()
    assert pair.there.log == pair.here.log
    assert len(pair.here.log) == len(LAUNCHES) + 2
    assert pair.there.keys == pair.here.keys == keys
    assert pair.ends.empty()


def test_a_key_is_found_only_once_every_rank_has_compiled_it(pair):
    """The launches in between go on, on the follower too."""
    pair.there.programs.ready.clear()
    thread = threading.Thread(target=pair.runner.compile, args=([PLAIN],))
    thread.start()
    pair.runner.do(Move(1, 0))
    end = time.monotonic() + 10
    while not pair.there.log and time.monotonic() < end:
        time.sleep(0.01)
    assert pair.there.log == ["['Move', 1, 0]"]
    assert thread.is_alive()
    assert pair.runner.keys == []
    pair.there.programs.ready.set()
    thread.join(10)
    assert pair.runner.keys == [PLAIN]
    pair.finish()
    assert pair.there.keys == [PLAIN]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (StepLaunch(PLAIN), "was never published"),
        (DraftLaunch(DraftKey(2, 1), 0), "was never published"),
        (Publish(9, PLAIN), "job 9 was never compiled"),
        (Welcome(), "Welcome is no launch"),
        (Masks(np.zeros((1, 1, 1), np.uint32)), "Masks is no launch"),
        (Compile(1, PageKey(99)), "99 pages are too many"),
    ],
)
def test_what_cannot_be_repeated_ends_the_follower(pair, caplog, message, words):
    pair.meeting.leader.send(message)
    assert pair.ends.get(timeout=10) == ("follower", 70)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "mtp_jax.hosts.ending"]
    assert line.startswith("rank 1 of 2 ends: ")
    assert words in line


def test_an_error_ends_every_rank_with_a_line_each(pair, caplog):
    told: list[str] = []
    pair.ending.told.append(lambda error: told.append(str(error)))
    pair.runner.compile([CHUNKED])
    with pytest.raises(RuntimeError, match="gone"):
        pair.runner.do(StepLaunch(CHUNKED, _chunk(token=13)))
    assert sorted(pair.ends.get(timeout=10) for _ in range(2)) == [("follower", 70), ("leader", 70)]
    lines = sorted(r.getMessage() for r in caplog.records if r.name == "mtp_jax.hosts.ending")
    assert lines[0] == "rank 0 of 2 ends: a launch failed: RuntimeError: the device is gone"
    assert lines[1].startswith("rank 1 of 2 ends: a launch of rank 0 could not be repeated: RuntimeError")
    assert told == ["the engine failed: a launch failed: RuntimeError: the device is gone"]


@pytest.mark.parametrize("awaited", [lambda p: p.read, lambda p: p.flush.wait])
def test_a_failed_result_ends_the_leader(pair, awaited):
    def gone() -> Any:
        raise RuntimeError("Gloo all-reduce failed")

    pair.here._do = lambda *_: Pending(0.0, gone, Flush(0.0, 1, gone))
    pair.runner.compile([PLAIN])
    pending = pair.runner.do(StepLaunch(PLAIN))
    with pytest.raises(RuntimeError):
        awaited(pending)()
    assert pair.ends.get(timeout=10) == ("leader", 70)
