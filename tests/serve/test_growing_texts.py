"""Texts that grow by pieces are joined once: no piece is added to all the text before it."""

import dataclasses
import json
from typing import Any

import pytest

from mtp_jax import (
    CallArguments,
    CallBegin,
    CallEnd,
    CompletionOutput,
    OutputText,
    RequestOutput,
    SamplingParams,
)
from mtp_jax.api.admission import Reservation
from mtp_jax.api.completions import CompletionState
from mtp_jax.api.outputs import Timing
from mtp_jax.api.stream import Stream
from mtp_jax.engine.request import Request
from mtp_jax.text.tools import values
from mtp_jax.text.tools.values import Value
from serve.answers.blocks import Blocks
from serve.answers.turn import Thought, called
from serve.bodies import responses
from serve.bodies.responses import ResponsesBody
from serve.routes.responses import _Responses
from tests.serve.helpers import completion


class Piece(str):
    """A text that can be joined, and not added to another text."""

    def _refuse(self, other: str) -> str:
        assert not other, "a text was copied to grow"
        return self

    __add__ = __radd__ = _refuse  # pyright: ignore[reportAssignmentType]


def test_items_of_an_assistants_turn_are_joined(monkeypatch):
    whole = responses._text
    monkeypatch.setattr(responses, "_text", lambda content: Piece(whole(content)))
    said = {"type": "message", "role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]}
    asked = {"type": "message", "role": "user", "content": "q"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "c"}
    body = ResponsesBody.model_validate(
        {"input": [said] * 100 + [thought] * 50 + [said, call, result, said, asked]}
    )
    first, told, last, question = body.conversation().messages
    assert (first.content, first.reasoning_content) == ("a" * 101, "b" * 50)
    assert (told.content, last.content, last.reasoning_content, question.content) == ("c", "a", None, "q")


def test_pieces_of_a_block_are_joined():
    blocks = Blocks(frozenset({"custom"}))
    blocks.push([Thought("t"), *[Thought(Piece("t"))] * 9, OutputText("a"), *[OutputText(Piece("a"))] * 9])
    arguments = [CallArguments(0, Piece("1"))] * 9
    blocks.push([CallBegin(0, "f", "x"), *arguments, CallEnd(0), CallBegin(1, "custom", "y"), *arguments])
    assert [block.text for block in blocks.all] == ["t" * 10, "a" * 10, "1" * 9, "1" * 9]
    assert called([CallBegin(0, "f", "x"), *arguments])[0].arguments == "1" * 9


@pytest.mark.parametrize(
    ("schema", "says", "first"),
    [
        ({"type": "array"}, None, "["),
        ({"type": ["array", "string"]}, None, " ["),
        ({"type": "object"}, "false", '{"a":'),
        ({}, "false", '"'),
        ({"type": "number"}, None, "1"),
    ],
)
def test_a_value_that_is_no_text_is_joined_at_its_end(monkeypatch, schema, says, first):
    value = Value(schema, {}, says)
    assert value.grow(first) == ""
    monkeypatch.setattr(values, "_is_text", lambda *args: pytest.fail("was looked through again"))
    assert [value.grow(Piece("1")) for _ in range(9)] == [""] * 9
    monkeypatch.undo()
    end = {"[": "]", "{": "}", '"': '"'}.get(first.strip()[:1], "")
    assert json.loads(value.end(end)) == json.loads(first + "1" * 9 + end)


def test_a_delta_of_a_block_does_not_take_the_text_so_far(monkeypatch):
    blocks = Blocks()
    begin, *grown = blocks.push([OutputText("a"), *[OutputText("b")] * 9])
    answer = object.__new__(_Responses)
    answer.blocks, answer._ids, answer._number = blocks, {}, 0
    assert [*answer.change(begin)]
    monkeypatch.setattr(type(begin.block), "text", property(lambda block: pytest.fail("was joined")))
    assert len([event for change in grown for event in answer.change(change)]) == len(grown)


class _Shown:
    """A decoder, and stop strings, that give pieces."""

    matched = None

    def push(self, given: Any, may_stop: bool = True) -> Any:
        return Piece("x") if isinstance(given, list) else (given, False)


@pytest.mark.parametrize(("kind", "texts"), [("delta", ["xx", "xxx"]), ("cumulative", ["xx", "xxxxx"])])
def test_the_text_of_a_completion_is_joined(kind, texts):
    request = Request(0, (5,), SamplingParams(output_kind=kind), 0, 9, 3, 10)
    state: Any = CompletionState(request, None)
    state._decoder = state._stops = _Shown()
    found = []
    for more in (2, 3):
        state.request.progress.output += [5] * more
        state.advance(None)
        found.append(state.output(0).text)
    assert found == texts


def output(*tokens: int, reason: str | None = None) -> RequestOutput:
    c: CompletionOutput = dataclasses.replace(
        completion("".join(map(chr, tokens)), reason), token_ids=[*tokens], num_tokens=len(tokens)
    )
    return RequestOutput(None, [], [c], None, Timing(None, None, None), 0, None)


def test_deltas_that_nobody_reads_are_merged_seldom(monkeypatch):
    """Each is copied as often as the number of deltas doubles, not once for each later one."""
    copied, add = [0], CompletionOutput.__add__

    def counted(self: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
        copied[0] += len(self.token_ids) + len(later.token_ids)
        return add(self, later)

    monkeypatch.setattr(CompletionOutput, "__add__", counted)
    count = 1000
    stream = Stream("a", Reservation(1, 1), deltas=True)
    for i in range(count):
        stream.deliver(output(65 + i, reason="stop" if i == count - 1 else None))
        assert len(stream._unread) <= count.bit_length()
    with pytest.raises(StopIteration) as read:
        stream.__anext__().send(None)
    assert read.value.value.outputs[0].token_ids == [*range(65, 65 + count)]
    assert read.value.value.finished
    assert copied[0] <= count * (count.bit_length() + 1)
