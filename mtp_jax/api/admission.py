"""Admission: bounds on waiting requests and their prompt tokens, checked before any work is done."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mtp_jax.errors import Overloaded, RequestError
from mtp_jax.options import check, option

_FINISHES_REMEMBERED = 32
_LONGEST_RETRY_SECONDS = 60
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait. Raises RequestError."""

    max_queued_requests: int = option(
        256, "most requests that may wait for a slot, each of a prompt's n counted", low=1, metavar="N"
    )
    max_queued_tokens: int = option(2**20, "most prompt tokens that may wait", low=1, metavar="N")

    def __post_init__(self) -> None:
        check(self, RequestError)


@dataclass(eq=False)
class Reservation:
    """Room in the queue: ``requests`` requests (the n of one prompt) and ``tokens`` prompt tokens."""

    requests: int
    tokens: int


class Admission:
    """The queue's bounds. Thread-safe.

    Attributes:
        max_requests: most requests that may wait for a slot.
        max_tokens: most prompt tokens that may wait; a prompt alone in the queue is always taken.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        QueueLimits(max_requests, max_tokens)  # which checks them
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._reservations: set[Reservation] = set()
        self._requests = self._tokens = 0
        self._finishes: deque[float] = deque(maxlen=_FINISHES_REMEMBERED)
        self._lock = threading.Lock()

    @property
    def requests(self) -> int:
        """Requests that wait."""
        return self._requests

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait; tokens of a prompt not yet tokenised are an estimate."""
        return self._tokens

    def reserve(self, requests: int, tokens: int, most: int | None = None) -> Reservation:
        """Reserve room in the queue.

        most: most tokens that the reservation holds, as further tokens will not reach the engine; None: all.
        Raises Overloaded when the queue is full, RequestError when it is too small.
        """
        if requests > self.max_requests:
            raise RequestError(f"n = {requests}; the queue takes {self.max_requests} requests at most")
        with self._lock:
            if refusal := self._full(requests):
                raise refusal
            self._check_tokens(tokens)
            held = tokens if most is None else min(tokens, most)
            reservation = Reservation(requests, held)
            self._reservations.add(reservation)
            self._requests += requests
            self._tokens += held
            return reservation

    @contextmanager
    def reserved(self, requests: int, tokens: int, most: int | None = None) -> Iterator[None]:
        """Hold a reservation, as ``reserve`` makes it, for a block."""
        reservation = self.reserve(requests, tokens, most)
        try:
            yield
        finally:
            self.release(reservation)

    def correct(self, reservation: Reservation, tokens: int) -> None:
        """Replace an estimate by the prompt's number of tokens. Raises Overloaded when they do not fit."""
        with self._lock:
            self._tokens -= reservation.tokens
            reservation.tokens = 0
            self._check_tokens(tokens)
            reservation.tokens = tokens
            self._tokens += tokens

    def overloaded(self) -> Overloaded | None:
        """The error with which any request would be refused now; None while the queue has room."""
        with self._lock:
            return self._full(1)

    def release(self, reservation: Reservation, requests: int | None = None) -> None:
        """Release ``requests`` of a reservation (all if None) with their share of its tokens. Idempotent."""
        with self._lock:
            if reservation not in self._reservations:
                return
            leaving = reservation.requests if requests is None else min(requests, reservation.requests)
            tokens = reservation.tokens * leaving // reservation.requests
            reservation.requests -= leaving
            reservation.tokens -= tokens
            self._requests -= leaving
            self._tokens -= tokens
            if not reservation.requests:
                self._reservations.remove(reservation)

    def finished(self) -> None:
        """Record that a prompt has been answered: ``retry_after`` is estimated from its time."""
        self._finishes.append(time.monotonic())

    def _full(self, requests: int) -> Overloaded | None:
        if self._requests + requests <= self.max_requests:
            return None
        more = f" and {requests} more came at once" if requests > 1 else ""
        return self._overloaded(f"{self._requests} requests wait{more}; at most {self.max_requests} may")

    def _check_tokens(self, tokens: int) -> None:
        if self._tokens and self._tokens + tokens > self.max_tokens:
            raise self._overloaded(
                f"{self._tokens} prompt tokens wait and {tokens} more came; at most {self.max_tokens} may"
            )

    def _overloaded(self, why: str) -> Overloaded:
        """The error with the seconds until the queue has passed, at the rate of the last answers."""
        retry = 1.0
        if len(self._finishes) > 1:
            rate = (len(self._finishes) - 1) / max(self._finishes[-1] - self._finishes[0], 1e-3)
            retry = min(max(retry, len(self._reservations) / rate), _LONGEST_RETRY_SECONDS)
        return Overloaded(f"the queue is full: {why}; try again in {math.ceil(retry)} s", retry)


@dataclass(frozen=True)
class LazyPrompt:
    """A prompt that is made on a worker thread, once there is a reservation in the queue.

    Attributes:
        make: returns the prompt; called on a worker thread.
        characters: number of characters of its text, approximately; the queue estimates tokens from it until
            they are counted.
    """

    make: Callable[[], str | Sequence[int]]
    characters: int


def estimate(prompt: str | Sequence[int] | LazyPrompt) -> int:
    """An estimate of a prompt's tokens, for the time before it is tokenised."""
    if not isinstance(prompt, str | LazyPrompt):
        return len(prompt)
    characters = prompt.characters if isinstance(prompt, LazyPrompt) else len(prompt)
    return characters // _CHARACTERS_PER_TOKEN + 1
