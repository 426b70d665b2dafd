"""A pause of generation: running requests leave their slots, and all requests wait until it ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, get_args

from mtp_jax.api.submissions import Submissions
from mtp_jax.api.thread import EngineThread
from mtp_jax.errors import RequestError

PauseMode = Literal["abort", "retract", "in_place"]
"""Whether a pause ends the submitted requests, or keeps them with their tokens, under two names of SGLang's.

Pages of kept requests stay in the prefix cache until their room is needed, or the weights change."""


class Pause:
    """Begins and ends pauses. Requests that are submitted meanwhile wait, too.

    Attributes:
        begun: event that is set while generation is paused.
    """

    def __init__(
        self,
        thread: EngineThread,
        submissions: Submissions,
        on_engine: Callable[[Callable[[], None]], Awaitable[Any]],
        check_awake: Callable[[], None],
    ) -> None:
        """on_engine: runs a function of ``thread`` on it. check_awake: raises while memory is released."""
        self.begun = asyncio.Event()
        self._thread, self._submissions = thread, submissions
        self._on_engine, self._check_awake = on_engine, check_awake

    async def begin(self, mode: PauseMode = "abort") -> None:
        """Return once no request runs. A pause may begin again, in another mode.

        Weights that are updated meanwhile go on with the kept requests; their cache is computed anew.

        Raises RequestError for another mode, and EngineStopped.
        """
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode = {mode!r:.80}; expected {', '.join(map(repr, get_args(PauseMode)))}")
        await self._on_engine(self._thread.pause)
        self.begun.set()
        if mode == "abort":
            self._submissions.abort()
            await self._on_engine(lambda: None)  # the engine has ended them before this

    async def end(self) -> None:
        """Serve the kept requests and the new requests. Raises EngineStopped, as while memory is released."""
        self._check_awake()
        await self._on_engine(self._thread.unpause)
        self.begun.clear()

    async def at_rest(self) -> None:
        """Wait until all requests have ended, or are kept by a pause."""
        waiting = [asyncio.ensure_future(e.wait()) for e in (self._submissions.idle, self.begun)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
