"""The growing output of one prompt as an async iterator."""

import asyncio
from collections.abc import Callable

from mtp_jax.api.admission import Reservation
from mtp_jax.api.outputs import RequestOutput


class Stream:
    """Async iterator over the outputs of one prompt.

    If the consumer lags, intermediate states are dropped and deltas are merged.

    Attributes:
        request_id: as given, or made up.
        reservation: in the queue.
        prompt_tokens: how long the prompt is, once it is made.
    """

    def __init__(self, request_id: str, reservation: Reservation, deltas: bool) -> None:
        self.request_id, self.reservation, self._deltas = request_id, reservation, deltas
        self.prompt_tokens = 0
        self._abort: Callable[[], None] | None = None
        self._aborted = False
        self._latest: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = False
        self._wake = asyncio.Event()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> RequestOutput:
        while self._latest is None:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            await self._wake.wait()
            self._wake.clear()
        output, self._latest = self._latest, None
        self._ended = output.finished
        return output

    def begin(self, abort: Callable[[], None]) -> None:
        """The engine has the prompt; ``abort`` ends it, now if that was asked for before."""
        self._abort = abort
        if self._aborted:
            abort()

    async def aclose(self) -> None:
        """Abort the rest of the stream."""
        self.abort()

    def abort(self) -> None:
        """End it now: the last output has the finish reason "abort"."""
        self._aborted = True
        if self._abort and not self._ended:
            self._abort()

    def deliver(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        """Take the newest state, or why there will be none."""
        if self._deltas and self._latest and output:
            output = self._latest + output
        self._latest, self._error = output, error
        self._wake.set()
