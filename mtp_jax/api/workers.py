"""The threads beside the event loop, apart by what may wait for what."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

Work = Literal["tokenise", "grammar", "beside"]
# Grammars have twice as many as trials run at a time: half may wait for one, or take a grammar that is known.
_THREADS: dict[Work, int] = {"tokenise": 2, "grammar": 8, "beside": 2}
_T = TypeVar("_T")


class Workers:
    """Prompts on their way to the engine wait neither for what goes nowhere near it nor for grammars.

    Threads "tokenise" make prompts, and answers of as much work; "grammar" do the same for requests with a
    grammar, which may take seconds to compile; "beside" do everything else.
    """

    def __init__(self) -> None:
        self._pools = {work: ThreadPoolExecutor(count, work) for work, count in _THREADS.items()}

    async def run(self, work: Work, function: Callable[[], _T]) -> _T:
        """Run a function on one of the threads for such work."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[work], function)

    def close(self) -> None:
        """End the threads; what runs is not waited for."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
