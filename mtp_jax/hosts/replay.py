"""A follower: repeats on its own devices what the leader launches. It decides nothing, and reads nothing.

No scheduler, tokenizer, grammar or clock: what the leader decided by text, time or measurement is in the log.
What the runner defers, and when it flushes, follows from the launches alone, so it is the same on every rank.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from mtp_jax.decode.keys import DraftKey, Key, StepKey
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.hosts.channel import Op
from mtp_jax.hosts.codec import (
    CHUNK_ARRAYS,
    ROW_ARRAYS,
    Body,
    LogError,
    chunk_of,
    row_of,
)
from mtp_jax.hosts.ending import Ending
from mtp_jax.hosts.follower_log import FollowerLog


def replay(runner: LocalRunner, log: FollowerLog, ending: Ending) -> int:
    """Follow until the leader ends. Returns how many operations there were. An error ends the process."""
    follower = _Follower(runner, log, ending)
    count = 0
    with ending.on_error("a launch of rank 0 could not be repeated"):
        while (message := log.receive()).op is not Op.END:
            follower.do(message.op, message.body)
            count += 1
    return count


class _Follower:
    def __init__(self, runner: LocalRunner, log: FollowerLog, ending: Ending) -> None:
        self._runner, self._log, self._ending = runner, log, ending
        self._jobs: queue.SimpleQueue[tuple[int, Key]] = queue.SimpleQueue()
        self._programs: dict[int, Future[Any]] = {}
        self._does: dict[Op, Callable[[Body], object]] = {
            Op.COMPILE: self._compile,
            Op.PUBLISH: self._publish,
            Op.ADMIT: self._admit,
            Op.MOVE: lambda b: runner.move(b.whole("source"), b.whole("target")),
            Op.UPDATE: lambda b: runner.update(*b.all(2)),
            Op.STEP: self._step,
            Op.DRAFT: self._draft,
            Op.READ_PAGES: lambda b: runner.read_pages(b.whole("shard"), _pages(b)),
            Op.WRITE_PAGES: lambda b: runner.write_pages(
                b.whole("shard"), _pages(b), tuple(b.all(len(b.arrays)))
            ),
            Op.RELEASE_CACHE: lambda _: runner.release_cache(),
            Op.ALLOCATE_CACHE: lambda _: runner.allocate_cache(),
            Op.READ_EXPERTS: lambda _: runner.read_experts(),
            Op.MOVE_EXPERT: lambda b: runner.move_expert(
                b.whole("layer"), b.whole("source"), b.whole("target"), *b.all(1)
            ),
        }
        # Beside the launches, which go on while the leader compiles in the background.
        threading.Thread(target=self._build, name="log-compile", daemon=True).start()

    def do(self, op: Op, body: Body) -> None:
        """One operation. Raises LogError for what must not come, and what the operation raises."""
        if op not in self._does:
            raise LogError(f"{op.name} is no launch")
        self._does[op](body)

    def _compile(self, body: Body) -> None:
        job = body.whole("job")
        self._programs[job] = Future()
        self._jobs.put((job, body.key))

    def _build(self) -> None:
        while True:
            job, key = self._jobs.get()
            with self._ending.on_error("a program did not compile"):
                self._programs[job].set_result(self._runner.programs.build(key))
                self._log.compiled(job)

    def _publish(self, body: Body) -> None:
        job = body.whole("job")
        if job not in self._programs:
            raise LogError(f"job {job} was never compiled")
        self._runner.programs.publish(body.key, self._programs.pop(job).result())

    def _admit(self, body: Body) -> None:
        page = None if body.fields.get("page") is None else body.whole("page")
        self._runner.admit(body.whole("slot"), row_of(body.all(ROW_ARRAYS)), page)

    def _step(self, body: Body) -> None:
        key = self._launchable(body.key)
        if not isinstance(key, StepKey):
            raise LogError(f"{key} is no step")
        chunk = chunk_of(body.all(CHUNK_ARRAYS if key.tokens else 0))
        self._runner.step(key, chunk, self._masks if key.mode.structured else None)

    def _masks(self, drafts: np.ndarray | None) -> np.ndarray:
        """The leader has made them, of the same drafts."""
        del drafts
        return self._log.receive(Op.MASKS).body.all(1)[0]

    def _draft(self, body: Body) -> None:
        key = self._launchable(body.key)
        if not isinstance(key, DraftKey):
            raise LogError(f"{key} is no draft")
        self._runner.draft(key, body.whole("slot"))

    def _launchable(self, key: Key) -> Key:
        if key not in self._runner.programs:
            raise LogError(f"{key} was never published")
        return key


def _pages(body: Body) -> list[int]:
    pages = body.fields.get("pages")
    if not isinstance(pages, list) or not all(type(p) is int and p >= 0 for p in pages):
        raise LogError(f"pages = {pages!r:.80}")
    return pages
