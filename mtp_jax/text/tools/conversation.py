"""Conversations with tools, in the form that a chat template takes, be it made for tools or not."""

import json
import re
from collections.abc import Sequence

from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.text.tools.formats import INDEX, NAME, STRING, Format, Parameter, as_written

_Message = JsonMapping
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # escapes of halves of characters, perhaps of both


class _Object(JsonObject):
    """Arguments of a call, for templates that take an object and for templates that take JSON text."""

    def __init__(self, text: str) -> None:
        value = _parsed(text)
        super().__init__(value if isinstance(value, dict) else {})
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text


def for_template(
    template: str, form: Format, messages: Sequence[_Message], tools: Sequence[_Message] | None
) -> list[_Message]:
    """Messages that a chat template can render, also a template that is not made for tools.

    template: source of the template. messages, tools: in the form of OpenAI's API, where the arguments of a
    call are JSON text.
    """
    found = list(messages)
    if "tool_calls" not in template:
        found = [_without_calls(form, message) for message in messages]
    if tools and "tools" not in template:
        found = _with_list(form, found, tools)
    return found


def with_objects(message: _Message) -> _Message:
    """A message whose calls have arguments that a template can take as an object, or as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    objects = [
        c | {"function": c["function"] | {"arguments": _Object(c["function"]["arguments"])}} for c in calls
    ]
    return {**message, "tool_calls": objects}


def written(form: Format, calls: Sequence[tuple[str, str]]) -> str:
    """The text of calls in this format. calls: the name of each, and its arguments as JSON text."""
    texts = []
    for index, (name, arguments) in enumerate(calls):
        head = form.head.replace(NAME, form.prefix + name).replace(INDEX, str(index))
        texts.append(form.call + head + _arguments(form.parameter, arguments) + form.end)
    text = form.between.join(texts)
    if form.blocks:
        text = form.blocks[0] + form.after_block + text + form.before_block_end + form.block_ends[0]
    return as_written(text)


def _arguments(parameter: Parameter | None, arguments: str) -> str:
    if parameter is None:
        return arguments
    texts = []
    for key, value in _Object(arguments).items():
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        before_value = parameter.before_value.replace(STRING, "true" if is_text else "false")
        texts.append(parameter.before_key + key + before_value + text + parameter.end)
    return parameter.between.join(texts)


def _calls(message: _Message) -> list[tuple[str, str]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


def _without_calls(form: Format, message: _Message) -> _Message:
    """A message in which calls are text of the assistant, and results are text of the user."""
    text = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = _calls(message)
    if not calls:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": text + written(form, calls)}


def _with_list(form: Format, messages: list[_Message], tools: Sequence[_Message]) -> list[_Message]:
    """Messages with a list of the tools in the system message, which is the first."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = written(form, [("NAME", '{"PARAMETER": "VALUE"}')])
    text = f"You may call these functions, given as JSON:\n{listed}\n\nTo call one, write:\n{example}"
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _parsed(text: str) -> object:
    """The value of JSON, in which U+FFFD stands for half of a character; None where it is none."""
    try:
        value = json.loads(text)
        if _HALVES.search(text):
            told = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(told.decode("utf-16", "replace"))
        return value
    except (ValueError, RecursionError):
        return None
