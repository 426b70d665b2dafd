"""A follower: it repeats the leader's launches on its own devices, without decisions of its own.

It has no scheduler, tokenizer, grammar or clock: the log has all decisions by text, time or measurement. The
runner's deferred work, and its flushes, follow from the launches alone, so they are the same on every rank.
"""

import queue
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from mtp_jax.decode.keys import Key
from mtp_jax.decode.launches import Launch
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.hosts.ending import Ending
from mtp_jax.hosts.follower_log import FollowerLog
from mtp_jax.hosts.messages import Compile, End, LogError, Logged, Masks, Publish


def replay(runner: LocalRunner, log: FollowerLog, ending: Ending) -> int:
    """Follow until the leader ends. Returns the number of operations. An error ends the process."""
    follower = _Follower(runner, log, ending)
    count = 0
    with ending.on_error("a launch of rank 0 could not be repeated"):
        while not isinstance(message := log.receive(), End):
            follower.do(message)
            count += 1
    return count


class _Follower:
    def __init__(self, runner: LocalRunner, log: FollowerLog, ending: Ending) -> None:
        self._runner, self._log, self._ending = runner, log, ending
        self._jobs: queue.SimpleQueue[tuple[int, Key]] = queue.SimpleQueue()
        self._programs: dict[int, Future[Any]] = {}
        # Compile beside the launches, which go on while the leader compiles in the background.
        threading.Thread(target=self._build, name="log-compile", daemon=True).start()

    def do(self, message: Logged) -> None:
        """Do one operation. Raises LogError for an unexpected one, and the operation's own errors."""
        match message:
            case Launch():
                key = getattr(message, "key", None)
                if key is not None and key not in self._runner.programs:
                    raise LogError(f"{key} was never published")
                self._runner.do(message, self._masks)
            case Compile(job, key):
                self._programs[job] = Future()
                self._jobs.put((job, key))
            case Publish(job, key):
                if job not in self._programs:
                    raise LogError(f"job {job} was never compiled")
                self._runner.programs.publish(key, self._programs.pop(job).result())
            case _:
                raise LogError(f"{type(message).__name__} is no launch")

    def _build(self) -> None:
        while True:
            job, key = self._jobs.get()
            with self._ending.on_error("a program did not compile"):
                self._programs[job].set_result(self._runner.programs.build(key))
                self._log.compiled(job)

    def _masks(self, drafts: np.ndarray | None, parents: np.ndarray | None = None) -> np.ndarray:
        """The leader's masks, which it made from the same drafts."""
        del drafts, parents
        return self._log.expect(Masks).allowed
