"""What a leader launches, its followers launch in the same order, with the same arrays."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mtp_jax.decode.host import Chunk, Result, Runner, SamplingState, SlotRow
from mtp_jax.decode.keys import DraftKey, Key, PageKey, SamplingMode, StepKey
from mtp_jax.errors import ConfigError
from mtp_jax.hosts.channel import Op
from mtp_jax.hosts.codec import encode_key
from mtp_jax.hosts.ending import Ending
from mtp_jax.hosts.leader import LeaderRunner
from mtp_jax.hosts.replay import replay
from tests.hosts.test_log import Meeting

# Of what would have ended a process: here the thread goes on, and may do so after its test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

PLAIN = StepKey(4, 3, 1, SamplingMode())
CHUNKED = StepKey(4, 3, 1, SamplingMode(), tokens=2, prompts=1)
STRUCTURED = StepKey(4, 3, 1, SamplingMode(structured=True))
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


class Device:
    """Keeps what it is asked to launch, numbers and arrays as text."""

    shards = 2
    layout = None

    def __init__(self) -> None:
        self.programs, self.log = Programs(), list[str]()
        kept = "admit", "move", "update", "write_pages", "release_cache", "allocate_cache", "move_expert"
        for name in kept:
            setattr(self, name, lambda *given, name=name: self._note(name, *given))

    def _note(self, name: str, *given: Any) -> None:
        self.log.append(f"{name} {[_plain(g) for g in given]}")

    @property
    def keys(self) -> list[Key]:
        return self.programs.published

    def step(self, key: StepKey, chunk: Chunk | None = None, masks: Any = None) -> Any:
        self._note("step", key, chunk)
        if masks:
            self._note("masks", masks(None))
            self._note("masks", masks(DRAFTS))
        if chunk is not None and chunk.tokens[0, 0] == 13:
            raise RuntimeError("the device\nis gone")
        return SimpleNamespace(at=1.0, flush=None, read=lambda: Result(np.ones((4, 8))))

    def draft(self, key: DraftKey, slot: int) -> Any:
        self._note("draft", key, slot)
        return np.arange(2), np.zeros((2, 5))

    def read_pages(self, shard: int, pages: Any) -> Any:
        self._note("read_pages", shard, list(pages))
        return SimpleNamespace(read=lambda: (np.zeros((len(pages), 3)),))

    def read_experts(self) -> Any:
        self._note("read_experts")
        return SimpleNamespace(read=lambda: (np.ones((2, 8)), np.zeros(2)))


def _plain(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.dtype.name, x.tolist()
    if isinstance(x, SlotRow | SamplingState | Chunk):
        return [_plain(getattr(x, f.name)) for f in fields(x)]
    return [_plain(y) for y in x] if isinstance(x, tuple | list) else x


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
        self.meeting.leader.send(Op.END)
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.meeting.leader.close("the test is over")
    found.follower.finish()


def _row() -> SlotRow:
    numbers = iter(range(100))
    sampler = SamplingState(*(np.full((1, 3), next(numbers), np.int32) for _ in fields(SamplingState)))
    own = {f.name: np.full(1, next(numbers)) for f in fields(SlotRow) if f.name != "sampling"}
    return SlotRow(**own, sampling=sampler)


def _chunk(token: int = 7) -> Chunk:
    numbers = {f.name: np.array([i], np.int32) for i, f in enumerate(fields(Chunk))}
    return Chunk(**{**numbers, "tokens": np.array([[token, 8]], np.int32)})


def test_a_leader_is_a_runner(pair):
    assert isinstance(pair.runner, Runner)
    assert pair.runner.shards == 2


def test_every_operation_is_repeated_in_order(pair):
    runner, seen = pair.runner, list[Any]()

    def masks(drafts: np.ndarray | None) -> np.ndarray:
        seen.append(None if drafts is None else drafts.tolist())
        return np.full((4, 4, 600), 2**32 - 1 - len(seen), np.uint32)

    runner.compile([PLAIN, CHUNKED, STRUCTURED, DraftKey(2, 1)], lambda i, n: seen.append((i, n)))
    assert seen == [(i, 4) for i in range(1, 5)]
    seen.clear()
    runner.admit(3, _row(), None)
    runner.admit(1, _row(), 5)
    runner.move(3, 0)
    runner.update(np.array([True, False]), np.arange(4, dtype=np.int32).reshape(2, 2))
    assert runner.step(PLAIN).read().packed.shape == (4, 8)
    runner.step(CHUNKED, _chunk())
    runner.step(STRUCTURED, None, masks)
    assert seen == [None, DRAFTS.tolist()]
    assert runner.draft(DraftKey(2, 1), 1)[0].tolist() == [0, 1]
    assert runner.read_pages(1, [3, 2]).read()[0].shape == (2, 3)
    runner.write_pages(1, [3], (np.ones((1, 2), np.float32), np.zeros((1, 4), np.uint16)))
    assert runner.read_experts().read()[0].shape == (2, 8)
    runner.move_expert(1, 7, 2, np.arange(16, dtype=np.int32).reshape(8, 2))
    runner.release_cache()
    runner.allocate_cache()
    pair.finish()
    assert pair.there.log == pair.here.log
    assert len(pair.here.log) == 16
    assert pair.there.keys == pair.here.keys == [PLAIN, CHUNKED, STRUCTURED, DraftKey(2, 1)]
    assert pair.ends.empty()


def test_wrong_pages_are_refused_before_anybody_is_told(pair):
    with pytest.raises(ValueError, match="data of 2 pages for 1 pages"):
        pair.runner.write_pages(0, [3], (np.ones((2, 2), np.float32),))
    pair.finish()
    assert pair.there.log == []


def test_a_key_is_found_only_once_every_rank_has_compiled_it(pair):
    """The launches in between go on, on the follower too."""
    pair.there.programs.ready.clear()
    thread = threading.Thread(target=pair.runner.compile, args=([PLAIN],))
    thread.start()
    pair.runner.move(1, 0)
    end = time.monotonic() + 10
    while not pair.there.log and time.monotonic() < end:
        time.sleep(0.01)
    assert pair.there.log == ["move [1, 0]"]
    assert thread.is_alive()
    assert pair.runner.keys == []
    pair.there.programs.ready.set()
    thread.join(10)
    assert pair.runner.keys == [PLAIN]
    pair.finish()
    assert pair.there.keys == [PLAIN]


@pytest.mark.parametrize(
    ("op", "body", "words"),
    [
        (Op.STEP, {"key": encode_key(PLAIN)}, "was never published"),
        (Op.STEP, {"key": {"kind": "StepKey", "slots": 1}}, "unknown key"),
        (Op.PUBLISH, {"job": 9, "key": encode_key(PLAIN)}, "job 9 was never compiled"),
        (Op.WELCOME, {}, "WELCOME is no launch"),
        (Op.ADMIT, {"slot": 1, "page": None}, "0 arrays; expected"),
        (Op.MOVE, {"source": "1", "target": 0}, "expected an integer"),
        (Op.READ_PAGES, {"shard": 0, "pages": [-1]}, "pages = [-1]"),
        (Op.COMPILE, {"job": 1, "key": encode_key(PageKey(99))}, "99 pages are too many"),
    ],
)
def test_what_cannot_be_repeated_ends_the_follower(pair, caplog, op, body, words):
    pair.meeting.leader.send(op, body)
    assert pair.ends.get(timeout=10) == ("follower", 70)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "mtp_jax.hosts.ending"]
    assert line.startswith("rank 1 of 2 ends: ")
    assert words in line


def test_an_error_ends_every_rank_with_a_line_each(pair, caplog):
    told: list[str] = []
    pair.ending.told.append(lambda error: told.append(str(error)))
    pair.runner.compile([CHUNKED])
    with pytest.raises(RuntimeError, match="gone"):
        pair.runner.step(CHUNKED, _chunk(token=13))
    assert sorted(pair.ends.get(timeout=10) for _ in range(2)) == [("follower", 70), ("leader", 70)]
    lines = sorted(r.getMessage() for r in caplog.records if r.name == "mtp_jax.hosts.ending")
    assert lines[0] == "rank 0 of 2 ends: a launch failed: RuntimeError: the device is gone"
    assert lines[1].startswith("rank 1 of 2 ends: a launch of rank 0 could not be repeated: RuntimeError")
    assert told == ["the engine failed: a launch failed: RuntimeError: the device is gone"]


def test_a_failed_result_ends_the_leader(pair):
    def gone() -> Result:
        raise RuntimeError("Gloo all-reduce failed")

    pair.here.step = lambda *_: SimpleNamespace(at=0.0, flush=None, read=gone)
    pair.runner.compile([PLAIN])
    pending = pair.runner.step(PLAIN)
    with pytest.raises(RuntimeError):
        pending.read()
    assert pair.ends.get(timeout=10) == ("leader", 70)
