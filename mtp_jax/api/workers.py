"""The threads beside the event loop, in pools that do not wait for each other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

Work = Literal["tokenise", "grammar", "beside"]
# Twice the number of trials that run at a time: half of these threads may wait for a trial or use known
# grammars.
_THREADS: dict[Work, int] = {"tokenise": 2, "grammar": 8, "beside": 2}
_T = TypeVar("_T")


class Workers:
    """Thread pools in which prompts wait neither for work without the engine nor for grammars.

    The pool "tokenise" makes prompts; "grammar" makes prompts of requests with a grammar, which may take
    seconds to compile; "beside" does all other work.
    """

    def __init__(self) -> None:
        self._pools = {work: ThreadPoolExecutor(count, work) for work, count in _THREADS.items()}

    async def run(self, work: Work, function: Callable[[], _T]) -> _T:
        """Run a function on a thread of the pool for this kind of work."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[work], function)

    def close(self) -> None:
        """End the threads, without waiting for running functions."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
