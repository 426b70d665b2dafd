"""Answers that consist of blocks: OpenAI's Responses and Anthropic's Messages."""

from abc import abstractmethod
from collections.abc import Iterable

from starlette.requests import Request

from mtp_jax import CompletionOutput, JsonObject, RequestOutput
from serve.answers.asking import Submitted
from serve.answers.blocks import Blocks, Change
from serve.answers.calls import Call
from serve.answers.generation import interruption
from serve.answers.inputs import Inputs
from serve.answers.reasoning import ThoughtTokens, may_think
from serve.answers.turn import Turn
from serve.base.errors import ApiError
from serve.base.sse import event
from serve.base.state import Server


def named(data: JsonObject) -> bytes:
    """One event of a JSON object, named by its type."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


class AssistantCall(Call):
    """The answer to a conversation. A route's subclass gives blocks their form.

    Attributes:
        name: the answer's id.
    """

    write = staticmethod(named)
    done = b""

    def __init__(self, server: Server, request: Request, asked: Submitted, stream: bool | None) -> None:
        super().__init__(server, request, asked.streams, stream)
        self.name = asked.name
        self.blocks, self._inputs = Blocks(asked.custom), Inputs(asked.custom)
        self._turn = Turn(asked.thinking, may_think(server.tokenizer), asked.use)
        self._thought = ThoughtTokens(server.tokenizer, asked.use, asked.thinking)

    @abstractmethod
    def change(self, change: Change) -> Iterable[JsonObject]:
        """Return the events for a change of a block."""

    def take(self, output: RequestOutput) -> RequestOutput:
        """Take an output, and sort its new text into blocks."""
        (c,) = output.outputs
        self._thought.push(c.token_ids)
        self._changes = self.blocks.push(self._inputs.push(self._turn.push(c)))
        return output

    def grown(self, prompt: int, output: RequestOutput) -> Iterable[JsonObject]:
        """Return the events for the changes that the output makes to blocks."""
        del prompt, output
        return (e for change in self._changes for e in self.change(change))

    def end(self) -> Iterable[JsonObject]:
        """Return the events that end the last block."""
        return (e for change in self.blocks.finish() for e in self.change(change))

    @property
    def completion(self) -> CompletionOutput | None:
        """The newest output; None before the first."""
        return self.last[0].outputs[0] if self.last else None

    @property
    def failure(self) -> ApiError | None:
        """The error that has cut the answer; None: the answer is whole, or as long as it may be."""
        return self.completion and interruption(self.completion, self.server.allm.draining)

    @property
    def finish_reason(self) -> str | None:
        """The reason of the end, by OpenAI's names."""
        return self._turn.finish_reason(self.completion) if self.completion else None

    @property
    def weight_version(self) -> str | None:
        """Name of the weights that made the answer; None before the first output."""
        return self.last[0].weight_version if self.last else None

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of tokens: ``prompt``, the ``cached`` part of it, ``output``, the ``thought`` in it."""
        thinks = any(block.kind == "thought" for block in self.blocks.all)
        return {
            "prompt": self.streams[0].prompt_tokens,
            "cached": self.last[0].cached_tokens if self.last else 0,
            "output": self.completion.num_tokens if self.completion else 0,
            "thought": self._thought.count if thinks else 0,
        }
