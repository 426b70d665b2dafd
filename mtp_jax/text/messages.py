"""The messages of a conversation as a caller gives them: their check, and their texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonMapping

_EXPECTED = "a list of objects with role and content"


def conversations(messages: object) -> Sequence[Any]:
    """A list of conversations, made of one or many; ``with_texts`` takes or refuses each."""
    if not isinstance(messages, list | tuple) or isinstance(next(iter(messages), ()), Mapping):
        return [messages]
    return messages


def with_texts(messages: object) -> list[JsonMapping]:
    """The messages, with one text in the place of text parts, and of a content that an answer may lack.

    messages: in the form of OpenAI's API. Raises RequestError for an object that is not of it.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(f"messages = {messages!r:.80}; expected {_EXPECTED}")
    return [_with_text(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _with_text(message: object, name: str) -> JsonMapping:
    if not isinstance(message, Mapping):
        raise RequestError(f"{name} = {message!r:.80}; messages are {_EXPECTED}")
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if not isinstance(role, str):
        raise RequestError(f"{name}: role = {role!r:.80}; expected a string, such as 'user'")
    if content is None and role not in ("assistant", "tool"):
        raise RequestError(f"{name}: content: a message needs text")
    if calls:
        _check_calls(calls, f"{name}: tool_calls")
    if isinstance(content, str):
        return message
    # Some templates recognise a message of calls by its missing text.
    text = _joined(content, f"{name}: content") if content is not None else ""
    return {**message, "content": text or (None if calls else "")}


def _joined(parts: object, name: str) -> str:
    """The text of a content's parts."""
    if not isinstance(parts, list | tuple):
        raise RequestError(f"{name} = {parts!r:.80}; expected a string, or a list of text parts")
    for i, part in enumerate(parts):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{name}[{i}] = {part!r:.80}; only text is read: expected {{"type": "text", "text": "..."}}'
            )
    return "".join(part["text"] for part in parts)


def _check_calls(calls: object, name: str) -> None:
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        texts = [function.get(k) for k in ("name", "arguments")] if isinstance(function, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(
                f"{name} holds {call!r:.160}; expected objects with a function, whose name is a string and "
                "whose arguments are JSON text"
            )
