"""Finds calls of tools in a text that grows: the result does not depend on how the text was cut."""

import json
from collections.abc import Callable, Collection, Mapping

from mtp_jax.text.tools.formats import Format
from mtp_jax.text.tools.parts import CallArguments, CallBegin, CallEnd, OutputText, Part

_LONGEST_HEAD = 512  # characters; what is no head by then is text


class ToolParser:
    """Takes text with its special tokens. One object per completion.

    A head that never completes is text. A call that breaks after its head has no end; what follows is text.
    """

    def __init__(self, form: Format, strings: Mapping[str, Collection[str]] | None = None) -> None:
        """strings: per tool the parameters that are text, where the format does not say."""
        self._form, self._strings = form, strings or {}
        self._held, self._name, self._index, self._given = "", "", -1, 0
        self._quote = ""  # of the string of JSON that the arguments so far end in
        self._step: Callable[[bool], bool] = self._outside
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """Take text; return what is known now."""
        self._held += text
        return self._run(final=False)

    def flush(self) -> list[Part]:
        """The end of the text: what was held back."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Part]:
        while self._held and self._step(final):
            pass
        parts, self._parts = self._parts, []
        return parts

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _text(self, length: int) -> None:
        if length:
            self._parts.append(OutputText(self._take(length)))

    def _outside(self, final: bool) -> bool:
        tag = self._form.block or self._form.call
        at = self._held.find(tag)
        if at < 0:
            self._text(len(self._held) if final else _shown(self._held, tag))
            return False
        self._text(at)
        self._step = self._head
        return True

    def _head(self, final: bool) -> bool:
        """At a block or a call."""
        window = self._held[:_LONGEST_HEAD]
        start = 0
        if self._form.block and window.startswith(self._form.block):
            start = len(self._form.block)
        start += len(window[start:]) - len(window[start:].lstrip())
        ends = [(window.find(e, start), e) for e in self._form.head_ends]
        at, end = min(((a, e) for a, e in ends if a >= 0), default=(-1, ""))
        if at < 0 and not final and len(window) < _LONGEST_HEAD:
            return False
        found = self._form.head.match(window[start : at + len(end)]) if at >= 0 else None
        if found is None:
            self._text(1)  # no head begins here
            self._step = self._outside
            return True
        self._take(start + found.end())
        self._index, self._name, self._given, self._quote = self._index + 1, found["name"], 0, ""
        self._parts.append(CallBegin(self._index, self._name, found.groupdict().get("id")))
        self._step = self._json if self._form.parameter is None else self._parameters
        return True

    def _json(self, final: bool) -> bool:
        at = self._held.find(self._form.end)
        while at >= 0 and _inside_string(self._held[:at], self._quote):  # there it is text like any other
            at = self._held.find(self._form.end, at + 1)
        length = at if at >= 0 else len(self._held) if final else _shown(self._held, self._form.end)
        if self._form.closing and (at >= 0 or not final):
            length = len(self._held[:length].rstrip().removesuffix(self._form.closing))
        if at >= 0:
            rest = at + len(self._form.end) - length
        if length:
            text = self._take(length)
            self._quote = _inside_string(text, self._quote)
            self._parts.append(CallArguments(self._index, text))
        if at >= 0:
            self._take(rest)
            self._end()
        return at >= 0

    def _parameters(self, final: bool) -> bool:
        """Between parameters."""
        form, text = self._form, self._held.lstrip()
        if text.startswith(form.end):
            self._take(len(self._held) - len(text) + len(form.end))
            self._parts.append(CallArguments(self._index, "}" if self._given else "{}"))
            self._end()
            return True
        if text.startswith("{") and not self._given:
            self._step = self._json
            return True
        at = text.find(form.parameter_end)
        if at < 0 and not final:
            return False
        stop = at + len(form.parameter_end)
        found = form.parameter.fullmatch(text[:stop]) if form.parameter and at >= 0 else None
        if found is None:
            self._step = self._outside
            return True
        self._take(len(self._held) - len(text) + stop)
        groups = found.groupdict()
        is_text = groups.get("string") == "true" or groups["key"] in self._strings.get(self._name, ())
        pair = f"{json.dumps(groups['key'])}: {_value(groups['value'], is_text)}"
        self._parts.append(CallArguments(self._index, (", " if self._given else "{") + pair))
        self._given += 1
        return True

    def _end(self) -> None:
        self._parts.append(CallEnd(self._index))
        self._step = self._between if self._form.block else self._outside

    def _between(self, final: bool) -> bool:
        """Behind a call of a block."""
        form, text = self._form, self._held.lstrip()
        space = len(self._held) - len(text)
        if text.startswith(form.block_end):
            self._take(space + len(form.block_end))
            self._step = self._outside
        elif text.startswith(form.call):
            self._take(space)
            self._step = self._head
        elif not final and (form.block_end.startswith(text) or form.call.startswith(text)):
            return False
        else:
            self._step = self._outside
        return True


def _value(text: str, is_text: bool) -> str:
    """As JSON; what is none is text."""
    if not is_text:
        try:
            return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _shown(text: str, tag: str) -> int:
    """Characters of ``text`` before an end that may grow to ``tag``."""
    keep = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    return len(text) - keep


def _inside_string(text: str, quote: str) -> str:
    """What JSON text ends in: a string ('"'), an escape in one ("\\\\"), or neither.

    quote: the same of what stands before it.
    """
    for character in text:
        if quote == "\\":
            quote = '"'
        elif quote:
            quote = {"\\": "\\", '"': ""}.get(character, quote)
        elif character == '"':
            quote = character
    return quote
