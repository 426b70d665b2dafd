"""One call of a generating route: its outputs as one answer, or as events while they grow."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import CompletionOutput, RequestOutput, Speculation, Stream
from serve.answers.generation import check, finals, outputs
from serve.answers.shapes import speculation_metrics, usage
from serve.base.ids import new_id
from serve.base.sse import EventStream, event
from serve.base.state import Server
from serve.bodies.reading import warning
from serve.bodies.schema import CallBody

# Tokens and scores of an answer from which on it is written beside the event loop: some milliseconds' worth.
_MANY = 1024


def _is_long(outputs: Sequence[RequestOutput]) -> bool:
    """Whether writing the answer would hold up the event loop."""
    completions = [c for o in outputs for c in o.outputs]
    scored = [*(c.logprobs for c in completions), *(o.prompt_logprobs for o in outputs)]
    scores = sum(len(row or ()) for rows in scored for row in rows or ())
    return scores + sum(len(c.token_ids) for c in completions) > _MANY


@dataclass
class Shown:
    """What of a completion the client has: whether anything, how many characters, its end."""

    begun: bool = False
    text: int = 0
    ended: bool = False

    def add(self, c: CompletionOutput) -> None:
        """The client has this, too."""
        self.begun, self.ended = True, c.finish_reason is not None
        self.text += len(c.text)


class Call(ABC):
    """Outputs to choices; a route says what a choice looks like.

    Attributes:
        kind: of the answer's object; that of a chunk is ``chunk_kind``.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, server: Server, request: Request, body: CallBody, streams: Sequence[Stream]) -> None:
        self.server, self.request, self.streams = server, request, streams
        self._stream, self._speculative = body.stream, body.speculative
        self._options = body.stream_options
        self._tells_tokens = bool(body.return_token_ids or body.return_token_origins)
        self._shown: dict[int, Shown] = {}
        self._speculation = Speculation()
        self._head: dict[str, Any] = {"id": self.prefix + new_id(), "created": int(time.time())}
        if server.allm.llm.simulated:
            self._head["system_fingerprint"] = "SIMULATED"

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, c: CompletionOutput, shown: Shown) -> dict[str, Any]:
        """A completion, or what is new of it since ``shown``."""

    def extras(self, done: Sequence[RequestOutput]) -> dict[str, Any]:
        """What else an answer that is not streamed says."""
        del done
        return {}

    def usage(self, done: Sequence[RequestOutput]) -> dict[str, Any]:
        """Token counts."""
        return usage(done)

    def take(self, output: RequestOutput) -> RequestOutput:
        """An output as it comes, without what the client did not ask for."""
        self._speculation += output.speculation
        return output

    async def respond(self) -> Response:
        """The response."""
        if self._stream:
            return EventStream(self._events(), warning(self.request))
        done = [self.take(o) for o in await finals(self.server, self.request, self.streams)]
        if _is_long(done):
            return await self.server.allm.off_loop(lambda: self._answer(done))
        return self._answer(done)

    def _answer(self, done: Sequence[RequestOutput]) -> Response:
        each = [(i * len(o.outputs) + c.index, o, c) for i, o in enumerate(done) for c in o.outputs]
        choices = [self._choice(index, o, c, Shown()) for index, o, c in each]
        answer = self._object(self.kind, choices) | {"usage": self.usage(done)} | self._metrics(done)
        answer |= self.extras(done)
        return Response(to_json(answer), headers=warning(self.request), media_type="application/json")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        include = self._options is not None and self._options.include_usage is True
        continuous = self._options is not None and self._options.continuous_usage_stats is True
        came: dict[int, RequestOutput] = {}
        last: dict[int, RequestOutput] = {}
        async with aclosing(outputs(self.server, self.request, self.streams)) as growing:
            async for i, output in growing:
                came[i] = output
                check(came.values(), len(self.streams))
                last[i] = output = self.take(output)
                counts = {"usage": self.usage([*last.values()]) if continuous else None} if include else {}
                make = partial(self._chunks, i, output, counts)
                chunks = await self.server.allm.off_loop(make) if _is_long([output]) else make()
                if chunks:
                    yield chunks
        if include:
            done = [*last.values()]
            yield event(self._object(self.chunk_kind, []) | {"usage": self.usage(done)} | self._metrics(done))

    def _chunks(self, prompt: int, output: RequestOutput, counts: dict[str, Any]) -> bytes:
        """Events of what is new of a prompt's completions; ``counts`` goes into each."""
        chunks = b""
        for c in output.outputs:
            index = prompt * len(output.outputs) + c.index
            shown = self._shown.setdefault(index, Shown())
            if self._is_news(c, shown):
                chunk = self._object(self.chunk_kind, [self._choice(index, output, c, shown)])
                shown.add(c)
                chunks += event(chunk | counts)
        return chunks

    def _choice(self, index: int, output: RequestOutput, c: CompletionOutput, shown: Shown) -> dict[str, Any]:
        """A choice; its last part says what stopped it, and which weights made it."""
        last = {"stop_reason": c.stop_reason, "weight_version": output.weight_version}
        return self.choice(index, output, c, shown) | ({} if c.finish_reason is None else last)

    def _is_news(self, c: CompletionOutput, shown: Shown) -> bool:
        """Whether there is something to tell of a completion."""
        if shown.ended or c.finish_reason is not None:
            return not shown.ended
        return bool(c.text) or (bool(c.token_ids) and self._tells_tokens)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": kind, "model": self.request.state.model, "choices": choices}

    def _metrics(self, done: Sequence[RequestOutput]) -> dict[str, Any]:
        """Of one completion, null for several; none at level "none"."""
        level = (self._speculative and self._speculative.metrics) or self.server.settings.spec_metrics
        if level == "none":
            return {}
        depth = self.server.allm.llm.engine.config.num_speculative_tokens
        one = sum(len(o.outputs) for o in done) == 1 and depth > 0
        found = speculation_metrics(self._speculation, level, depth) if one else None
        return {"metrics": {"speculative_decoding": found}}
