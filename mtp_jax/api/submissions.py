"""Prompts from their submission to their last output: names, places in the queue, streams."""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mtp_jax.api.admission import Admission
from mtp_jax.api.completions import PromptState
from mtp_jax.api.stream import Stream
from mtp_jax.api.thread import PromptUpdate
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import RequestError


class Submissions:
    """Prompts that have not ended. The event loop owns them; other threads may use ``admitted`` and
    ``quiet``.

    Attributes:
        admission: the queue.
        idle: event that is set while there is no prompt; ``quiet`` is the same event for threads.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._streams: dict[str, Stream] = {}
        self._by_prompt: dict[PromptState, Stream] = {}
        self._numbers = itertools.count()
        self.idle, self.quiet = asyncio.Event(), threading.Event()
        self._look_idle()

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def enter(self, name: str | None, params: SamplingParams, tokens: int, longest: int) -> Iterator[Stream]:
        """Take a name, or make one, and a place in the queue. A block that raises gives both back.

        tokens: estimated number of the prompt's tokens. longest: most tokens that the engine takes; a longer
        prompt, which will be refused, keeps no more of the queue meanwhile. Raises RequestError, Overloaded.
        """
        name = self._free(name)
        reservation = self.admission.reserve(params.n, params.n * tokens, params.n * longest)
        stream = self._streams[name] = Stream(name, reservation, params.output_kind == "delta")
        self.idle.clear()
        self.quiet.clear()
        try:
            yield stream
        except BaseException:
            self._leave(stream)
            raise

    def made(self, stream: Stream, state: PromptState) -> None:
        """Record that a stream's prompt is made. Raises Overloaded where it is too long for the queue."""
        stream.prompt_tokens = len(state.completions[0].request.prompt)
        self.admission.correct(stream.reservation, len(state.completions) * stream.prompt_tokens)
        self._by_prompt[state] = stream

    def admitted(self, state: PromptState, requests: int) -> None:
        """Release the room of further requests of a prompt that have left the queue."""
        self.admission.release(self._by_prompt[state].reservation, requests)

    def deliver(self, updates: Sequence[PromptUpdate]) -> None:
        """Hand the outputs of a step to the streams."""
        for state, output in updates:
            self._by_prompt[state].deliver(output)
            if output.finished:
                self._end(state)

    def fail(self, failure: Exception) -> None:
        """End every stream with an error."""
        for state, stream in list(self._by_prompt.items()):
            stream.deliver(None, failure)
            self._end(state)

    def abort(self, name: str | None = None) -> None:
        """End the prompt of this name, if there is one, and the prompts of a batch of this name, whose own
        names are ``name``_0, ``name``_1 and so on; None: all."""
        for own, stream in list(self._streams.items()):
            if name is None or own == name or _in_batch(own, name):
                stream.abort()

    def _free(self, name: str | None) -> str:
        if name is None:
            return next(n for i in self._numbers if (n := f"request-{i}") not in self._streams)
        if not isinstance(name, str):
            raise RequestError(f"request_id = {name!r:.80}; expected a string, or None")
        if name in self._streams:
            raise RequestError(f"the request_id (rid) {name!r} is in use; give another, or none", "rid")
        return name

    def _end(self, state: PromptState) -> None:
        self.admission.finished()
        self._leave(self._by_prompt.pop(state))

    def _leave(self, stream: Stream) -> None:
        del self._streams[stream.request_id]
        self.admission.release(stream.reservation)
        self._look_idle()

    def _look_idle(self) -> None:
        if not self._streams:
            self.idle.set()
            self.quiet.set()


def _in_batch(own: str, name: str) -> bool:
    return own.startswith(f"{name}_") and own[len(name) + 1 :].isdecimal()
