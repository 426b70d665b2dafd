"""The growing output of one prompt as an async iterator."""

import asyncio
from collections.abc import Callable

from mtp_jax.api.admission import Reservation
from mtp_jax.api.outputs import RequestOutput


class Stream:
    """Async iterator over the outputs of one prompt.

    If the consumer lags, intermediate states are dropped and deltas are merged.

    Attributes:
        request_id: the caller's name for the request, or a generated name.
        reservation: its room in the queue.
        prompt_tokens: number of tokens of the prompt, once they are known.
    """

    def __init__(self, request_id: str, reservation: Reservation, deltas: bool) -> None:
        self.request_id, self.reservation, self._deltas = request_id, reservation, deltas
        self.prompt_tokens = 0
        self._abort: Callable[[], None] | None = None
        self._aborted = False
        self._unread: list[tuple[int, RequestOutput]] = []  # with the number of deliveries in each
        self._error: Exception | None = None
        self._ended = False
        self._wake = asyncio.Event()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            await self._wake.wait()
            self._wake.clear()
        while len(self._unread) > 1:
            self._merge()
        _, output = self._unread.pop()
        self._ended = output.finished
        return output

    def begin(self, abort: Callable[[], None]) -> None:
        """Record that the engine has the prompt, and how to abort it; do so if ``abort`` came before."""
        self._abort = abort
        if self._aborted:
            abort()

    async def aclose(self) -> None:
        """End the stream; the prompt is aborted."""
        self.abort()

    def abort(self) -> None:
        """End the prompt now; the last output has the finish reason "abort"."""
        self._aborted = True
        if self._abort and not self._ended:
            self._abort()

    def deliver(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        """Take the newest output, or the error that ends the stream."""
        if error or not self._deltas:
            self._unread.clear()
        if output:
            self._unread.append((1, output))
        # Equal numbers are merged, so that a delta is copied as often as its number doubles.
        while len(self._unread) > 1 and self._unread[-2][0] == self._unread[-1][0]:
            self._merge()
        self._error = error
        self._wake.set()

    def _merge(self) -> None:
        """Make one output of the last two."""
        (few, early), (more, late) = self._unread[-2:]
        self._unread[-2:] = [(few + more, early + late)]
