"""/v1/chat/completions."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import (
    CallArguments,
    CallBegin,
    CompletionOutput,
    JsonObject,
    OutputText,
    RequestOutput,
)
from serve.answers.asking import Submitted, ask
from serve.answers.choices import ChoicesCall
from serve.answers.inputs import Inputs
from serve.answers.reasoning import ThoughtTokens, may_think
from serve.answers.shapes import chat_logprobs, prompt_scores, token_extras, usage
from serve.answers.turn import Piece, Thought, Turn, called
from serve.base.ids import new_id
from serve.base.state import Server
from serve.bodies.reading import read
from serve.bodies.schema import ChatBody


async def chat_completions(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, ChatBody)

    async def submitted() -> _Chat:
        asked = await ask(server, request, body, body.rid or f"chatcmpl-{new_id()}")
        return _Chat(server, request, body, asked)

    return await _Chat.respond_to(server, request, body.stream, submitted())


class _Chat(ChoicesCall):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, server: Server, request: Request, body: ChatBody, asked: Submitted) -> None:
        super().__init__(server, request, body, asked.streams, asked.name)
        self.body, self._asked, self._thinking = body, asked, asked.thinking
        self._tells_tokens |= body.logprobs is True
        self._may_think = may_think(server.tokenizer)
        self._turns: dict[int, tuple[Turn, Inputs]] = {}
        self._thoughts: dict[int, ThoughtTokens] = {}
        self._thought: set[int] = set()

    def take(self, output: RequestOutput) -> RequestOutput:
        """Record an output, and count the tokens of its thoughts."""
        if self._thinking or self._may_think:
            for c in output.outputs:
                counted = self._thoughts.setdefault(
                    c.index, ThoughtTokens(self.server.tokenizer, self._asked.use, self._thinking)
                )
                counted.push(c.token_ids)
        return super().take(output)

    def choice(self, index: int, output: RequestOutput, c: CompletionOutput, begun: bool) -> JsonObject:
        """A message, or the new part of it."""
        del output
        asked = self._asked
        if index not in self._turns:
            apart = self.body.thoughts != "inside"
            turn = Turn(self._thinking and apart, self._may_think and apart, asked.use)
            self._turns[index] = turn, Inputs(asked.custom)
        turn, inputs = self._turns[index]
        pieces = inputs.push(turn.push(c))
        if any(isinstance(piece, Thought) for piece in pieces):
            self._thought.add(index)
        if self.body.thoughts == "hidden":
            pieces = [piece for piece in pieces if not isinstance(piece, Thought)]
        message: JsonObject = {} if self.stream and begun else {"role": "assistant"}
        choice = {
            "index": index,
            "delta" if self.stream else "message": message
            | (_delta(pieces, inputs) if self.stream else _message(pieces, inputs)),
            "logprobs": None,
            "finish_reason": turn.finish_reason(c),
        }
        if c.logprobs is not None:
            top = self.body.top_logprobs or 0
            choice["logprobs"] = chat_logprobs(
                self.server.tokenizer, c.token_ids, c.logprobs, top, ids=self.body.names_ids
            )
        extras = token_extras(c, self.body.return_token_ids, self.body.return_token_origins)
        return choice | extras

    def answer(self) -> JsonObject:
        """The answer with the prompt's scores, if the request wants them."""
        if self.body.prompt_logprobs is None:
            return super().answer()
        scores = self.last[0].prompt_logprobs or []
        return super().answer() | {"prompt_logprobs": prompt_scores(self.server.tokenizer, scores)}

    def usage(self) -> JsonObject:
        """Usage with the tokens that went into thoughts, if there were any."""
        thoughts = [t.count for i, t in self._thoughts.items() if self._thinking or i in self._thought]
        return usage(self.last.values(), sum(thoughts) if thoughts else None)


def _texts(pieces: Sequence[Piece]) -> JsonObject:
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    text = "".join(piece.text for piece in pieces if isinstance(piece, OutputText))
    message: JsonObject = {"reasoning": thought, "reasoning_content": thought} if thought else {}
    return message | ({"content": text} if text else {})


def _message(pieces: Sequence[Piece], inputs: Inputs) -> JsonObject:
    """The message of a whole completion."""
    message = {"content": "", "refusal": None} | _texts(pieces)
    calls = called(pieces)
    if not calls:
        return message
    # White space around calls belongs to their format.
    content = message["content"] if message["content"].strip() else None
    return message | {
        "content": content,
        "tool_calls": [inputs.body(i, call) for i, call in enumerate(calls)],
    }


def _delta(pieces: Sequence[Piece], inputs: Inputs) -> JsonObject:
    """The delta of new pieces."""
    calls: list[JsonObject] = []
    for piece in pieces:
        if not isinstance(piece, CallBegin | CallArguments):
            continue
        kind, key = ("custom", "input") if inputs.is_text(piece.index) else ("function", "arguments")
        if isinstance(piece, CallBegin):
            about = {"name": piece.name, key: ""}
            calls.append({"index": piece.index, "id": piece.id, "type": kind, kind: about})
            continue
        if not calls or calls[-1]["index"] != piece.index:
            calls.append({"index": piece.index, kind: {key: ""}})
        calls[-1][kind][key] += piece.text
    return _texts(pieces) | ({"tool_calls": calls} if calls else {})
