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
    ToolUse,
)
from mtp_jax.api.admission import Reservation
from mtp_jax.api.completions import CompletionState
from mtp_jax.api.outputs import Timing
from mtp_jax.api.stream import Stream
from mtp_jax.engine.request import Request
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tools import values
from mtp_jax.text.tools.formats import FORMATS
from mtp_jax.text.tools.parser import ToolParser
from mtp_jax.text.tools.values import Value
from serve.answers.blocks import Blocks
from serve.answers.inputs import _FirstString
from serve.answers.turn import Thought, Turn, called
from serve.bodies import responses
from serve.bodies.responses import ResponsesBody
from serve.routes.responses import _Responses
from tests.serve.helpers import completion

CALLS = ToolUse(FORMATS["json"], (), False, True)


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


@pytest.mark.parametrize("space", [" ", "\n", "\x0b"])
def test_white_space_that_waits_is_joined_once(space):
    """A model at a loss writes it for ever."""
    blocks, turn, splitter = Blocks(), Turn(False, True, CALLS), Thoughts(True).splitter(False)
    assert not blocks.push([OutputText(Piece(space))] * 9)
    shown = [change.text for change in blocks.push([OutputText("a")])]
    assert shown == ["", space * 9 + "a"]
    assert not [piece for _ in range(9) for piece in turn._said("", Piece(space))]
    assert turn._said("", "a") == [OutputText(space * 9 + "a")]
    assert not any(part for _ in range(9) for part in splitter.push(Piece(space)))
    assert splitter.push("<thi") == ("", "")
    assert splitter.push("s") == ("", space * 9 + "<this")
    splitter = Thoughts(True).splitter(False)
    splitter.push(space)
    assert splitter.push("<think>t") == ("t", "")
    splitter = Thoughts(True).splitter(False)
    splitter.push(space)
    assert splitter.flush() == ("", space)


@pytest.mark.parametrize(
    ("first", "more", "last", "says"),
    [
        ("", " ", "x", None),
        ("1", "2", "x", None),
        ("-", "1", " x", None),
        ("true", " ", "x", None),
        ("", "\x0b", "x", "false"),
        (" 1", " ", "2", None),
    ],
)
def test_what_decides_about_a_value_stays_short(first, more, last, says):
    value = Value({"type": ["string", "number", "boolean"]}, {}, says)
    assert [value.grow(text) for text in (first, *[more] * 999)] == [""] * 1000
    assert len(value._begun) <= len("false ")
    assert json.loads(value.grow(last) + value.end("")) == first + more * 999 + last


def test_white_space_behind_a_call_does_not_wait_for_ever():
    parser, spaces = ToolParser(FORMATS["json"]), 10_000
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parts, longest = parser.push(call), 0
    for _ in range(spaces):
        parts += parser.push(" ")
        longest = max(longest, len(parser._held))
    parts += parser.push(call + "x") + parser.flush()
    assert longest <= 256
    calls = [type(part) for part in parts if not isinstance(part, OutputText)]
    assert calls == [CallBegin, CallArguments, CallEnd] * 2
    assert "".join(part.text for part in parts if isinstance(part, OutputText)) == " " * spaces + "x"


def test_what_stands_around_a_custom_tools_text_is_not_kept():
    pushed = _FirstString()
    assert pushed.push('{"input": "ab') + pushed.push('c", "') == "abc"
    assert not any(pushed.push("more") for _ in range(999))
    assert pushed._held == ""
    for cut in (1, 7, 10_000):
        long = _FirstString()
        key = '{"' + "k" * 5000 + '": "text"}'
        assert not any(long.push(key[i : i + cut]) for i in range(0, len(key), cut))
        assert len(long._held) < 5000
