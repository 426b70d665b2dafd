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
        prompt_tokens: how long the prompt is.
    """

    def __init__(
        self,
        request_id: str,
        reservation: Reservation,
        prompt_tokens: int,
        deltas: bool,
        abort: Callable[[], None],
    ) -> None:
        self.request_id, self.reservation, self._deltas = request_id, reservation, deltas
        self.prompt_tokens = prompt_tokens
        self._abort = abort
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

    async def aclose(self) -> None:
        """Abort what is left of it."""
        self.abort()

    def abort(self) -> None:
        """End it now: the last output has the finish reason "abort"."""
        if not self._ended:
            self._abort()

    def deliver(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        """Take the newest state, or why there will be none."""
        if self._deltas and self._latest and output:
            output = self._latest + output
        self._latest, self._error = output, error
        self._wake.set()
