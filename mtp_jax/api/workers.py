"""The threads beside the event loop, in pools that do not wait for each other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal, TypeVar

Pool = Literal["grammar", "beside"]
# Twice the number of trials that run at a time: half of these threads may wait for a trial or use known
# grammars.
_THREADS: dict[Pool, int] = {"grammar": 8, "beside": 2}
SHORT_TOKENS = 2**16
"""Most tokens of a prompt that is short: 256 K characters take an eighth of a second."""
_T = TypeVar("_T")


class Workers:
    """Thread pools in which prompts wait neither for work without the engine nor for grammars.

    The pool "grammar" makes requests with a grammar, which may take seconds to compile, once their prompts
    are tokenised; "beside" does all other work but ``tokenise``.
    """

    def __init__(self) -> None:
        self._pools = {work: ThreadPoolExecutor(count, work) for work, count in _THREADS.items()}
        self._tokenise = Tokenise()

    async def run(self, work: Pool, function: Callable[[], _T]) -> _T:
        """Run a function on a thread of the pool for this kind of work."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[work], function)

    async def tokenise(self, tokens: int, function: Callable[[], _T]) -> _T:
        """Run a function that takes about as long as tokenising a prompt of this number of tokens."""
        return await asyncio.wrap_future(self._tokenise.submit(tokens, function))

    def close(self) -> None:
        """End the threads, without waiting for running functions."""
        for pool in (*self._pools.values(), *self._tokenise.pools):
            pool.shutdown(wait=False)


@dataclass(eq=False)
class _Job:
    """A function that waits. size: the number of tokens that it works on."""

    size: int
    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)


class Tokenise:
    """Two threads on which long prompts hold up neither short prompts nor each other without end.

    One thread takes short prompts alone, the shortest first. The other takes any prompt: the oldest and the
    shortest in turn, so that a prompt waits for two longer ones at most, and no prompt for ever.
    """

    def __init__(self) -> None:
        self.pools = [ThreadPoolExecutor(1, "tokenise"), ThreadPoolExecutor(1, "tokenise-short")]
        self._waiting: list[_Job] = []  # the oldest first
        self._lock, self._oldest = Lock(), False

    def submit(self, size: int, function: Callable[[], _T]) -> Future[_T]:
        """Have a function run. size: number of tokens that it works on."""
        job = _Job(size, function)
        with self._lock:
            self._waiting.append(job)
        for pool, take in zip(self.pools, (self._any, self._short), strict=True):
            pool.submit(self._run, take)  # the thread that comes first takes the job
        return job.future

    def _run(self, take: Callable[[], _Job | None]) -> None:
        with self._lock:
            job = take()
            if job is None:
                return
            self._waiting.remove(job)
        job.run()

    def _any(self) -> _Job | None:
        self._oldest = not self._oldest
        if self._oldest:
            return next(iter(self._waiting), None)
        return min(self._waiting, key=lambda job: job.size, default=None)

    def _short(self) -> _Job | None:
        job = min(self._waiting, key=lambda job: job.size, default=None)
        return job if job and job.size <= SHORT_TOKENS else None
