"""Answers that consist of choices: OpenAI's Completions and Chat."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from starlette.requests import Request

from mtp_jax import CompletionOutput, JsonObject, RequestOutput, Speculation, Stream
from serve.answers.calls import Call
from serve.answers.shapes import speculation_metrics, time_metrics, usage
from serve.base.state import Server
from serve.bodies.schema import CallBody


class ChoicesCall(Call):
    """Turns outputs into choices; a route's subclass gives a choice its form.

    Attributes:
        kind: ``object`` of the answer; ``chunk_kind`` is a chunk's.
    """

    kind: str
    chunk_kind: str

    def __init__(
        self, server: Server, request: Request, body: CallBody, streams: Sequence[Stream], name: str
    ) -> None:
        """name: the answer's id, by which its prompts were submitted."""
        super().__init__(server, request, streams, body.stream)
        self._speculative, self._options = body.speculative, body.stream_options
        self._times = body.tells_times(server.settings.request_metrics)
        self._tells_tokens = bool(body.return_token_ids or body.return_token_origins)
        self._ended: dict[int, bool] = {}  # of choices that the client has received, whether they have ended
        self._speculation = Speculation()
        self._head: JsonObject = {"id": name, "created": int(time.time())}
        self._head |= server.fingerprint

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, c: CompletionOutput, begun: bool) -> JsonObject:
        """Render a completion, or its new part. begun: whether the client has received its beginning."""

    def usage(self) -> JsonObject:
        """Token counts."""
        return usage(self.last.values())

    def take(self, output: RequestOutput) -> RequestOutput:
        """Record an output, and add up the results of drafting."""
        self._speculation += output.speculation
        return output

    def answer(self) -> JsonObject:
        """Return the answer with all choices."""
        choices = [
            self._choice(prompt * len(o.outputs) + c.index, o, c, False)
            for prompt, o in sorted(self.last.items())
            for c in o.outputs
        ]
        return self._object(self.kind, choices) | self._totals()

    def grown(self, prompt: int, output: RequestOutput) -> Iterable[JsonObject]:
        """Return a chunk for each completion that has grown or ended."""
        counts = {"usage": self.usage() if self._asks("continuous_usage_stats") else None}
        counts = counts if self._asks("include_usage") else {}
        for c in output.outputs:
            index = prompt * len(output.outputs) + c.index
            if not self._ended.get(index) and self._is_news(c):
                choice = self._choice(index, output, c, index in self._ended)
                self._ended[index] = c.finish_reason is not None
                if choice.get("delta") == {} and c.finish_reason is None and not self._tells_tokens:
                    continue  # a part of a call's tags
                yield self._object(self.chunk_kind, [choice]) | counts

    def end(self) -> Iterable[JsonObject]:
        """Return the chunk with the usage, if the client requested it."""
        if self._asks("include_usage"):
            yield self._object(self.chunk_kind, []) | self._totals()

    def _asks(self, option: str) -> bool:
        return getattr(self._options, option, None) is True

    def _choice(self, index: int, output: RequestOutput, c: CompletionOutput, begun: bool) -> JsonObject:
        """Render a choice; its last part has the stop reason and the weight version."""
        last = {"stop_reason": c.stop_reason, "weight_version": output.weight_version}
        return self.choice(index, output, c, begun) | ({} if c.finish_reason is None else last)

    def _is_news(self, c: CompletionOutput) -> bool:
        """Whether a completion has grown or ended since its last chunk."""
        return c.finish_reason is not None or bool(c.text) or (self._tells_tokens and bool(c.token_ids))

    def _object(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        return self._head | {"object": kind, "model": self.request.state.model, "choices": choices}

    def _totals(self) -> JsonObject:
        """Token counts; times and the results of drafting, as requested: null for several completions."""
        level = (self._speculative and self._speculative.metrics) or self.server.settings.spec_metrics
        if level == "none" and not self._times:
            return {"usage": self.usage()}
        depth, outputs = self.server.allm.about.engine.num_speculative_tokens, [*self.last.values()]
        one = sum(len(o.outputs) for o in outputs) == 1
        metrics = time_metrics(outputs[0], self._speculation) if one and self._times else {}
        if level != "none":
            found = speculation_metrics(self._speculation, level, depth) if one and depth > 0 else None
            metrics["speculative_decoding"] = found
        return {"usage": self.usage(), "metrics": metrics or None}
