"""Finds calls of tools in a text that grows: the result does not depend on how the text was cut."""

from collections.abc import Callable, Mapping

from mtp_jax.json_object import JsonMapping
from mtp_jax.text.tools.formats import GAP, INDEX, NAME, STRING, Format, Parameter, literals, slips
from mtp_jax.text.tools.parts import CallArguments, CallBegin, CallEnd, OutputText, Part
from mtp_jax.text.tools.scanner import LONGEST, Json, begun, first, is_markup, match, match_any
from mtp_jax.text.tools.values import Value, as_string

_LONGEST_KEY = 4096  # characters; a longer text is no key
_PIECE = 4096  # characters of a long text that are read at a time


class ToolParser:
    """Splits the text of one completion, which includes special tokens, into parts.

    A head that leaves its format is text. A call that leaves its format behind the head has no ``CallEnd``,
    and the text from there on is text. A head, a key or a tag that the end of the text cuts is in no part.
    """

    def __init__(
        self,
        form: Format,
        tools: Mapping[str, JsonMapping] | None = None,
        also: Mapping[str, str] | None = None,
    ) -> None:
        """tools: the JSON Schema of each tool's arguments, by name; it decides which values are text.

        also: further names that a model may write, and the tool of each.
        """
        self._form, self._tools, self._also = form, tools or {}, also or {}
        self._held, self._index, self._given, self._in_block = "", -1, 0, False
        self._schema: JsonMapping = {}  # of the call's arguments
        self._value = Value({}, {})
        self._json = Json(())
        self._cut = False
        self._step: Callable[[bool], bool] = self._outside
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """Take text; return the parts known now."""
        parts: list[Part] = []
        for i in range(0, len(text), _PIECE):  # the rest of a piece is copied, so pieces are short
            self._held += text[i : i + _PIECE]
            parts += self._run(final=False)
        return parts

    def flush(self, cut: bool = False) -> list[Part]:
        """End the text; return the parts that were held back.

        cut: whether a limit has ended it, so that signs with which a tag begins are no text.
        """
        self._cut = cut
        parts = self._run(final=True)
        if self._step == self._in_value and (text := self._value.cut()):
            parts.append(CallArguments(self._index, text))
        return parts

    @property
    def within(self) -> bool:
        """Whether the text so far ends within the tag or the head of a call."""
        return bool(self._held)

    def _is_markup(self, text: str) -> bool:
        return bool(text) and (self._cut or is_markup(text))

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

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self._index, text))

    def _text_again(self) -> bool:
        """The text from here on is no part of a call."""
        self._step, self._in_block = self._outside, False
        return True

    def _outside(self, final: bool) -> bool:
        form = self._form
        closes = form.closes if self._index >= 0 else ()  # ends of a call that left its format
        at, tag = first((*form.all_opens, *closes), self._held)
        self._text(len(self._held) if final and not tag and not self._is_markup(self._held[at:]) else at)
        if tag in closes:
            self._take(len(tag))
        elif tag:
            self._step = self._head
        return bool(tag)

    def _head(self, final: bool) -> bool:
        """Read the beginning of a block or a call."""
        form, start = self._form, 0
        for block in (*form.blocks, *form.slipped_blocks):
            if self._held.startswith(block):
                start = len(block) + match(GAP, self._held, len(block)).length
        found = match(form.call + form.head, self._held, start)
        # White space behind a head belongs to the text behind it, so that the place of a cut does not matter.
        length = len(self._held[: start + found.length].rstrip())
        if found and form.parameter and form.head_is_name:
            tags = (form.parameter.before_key, form.end, "{")
            ahead = max(match(GAP + tag, self._held, length).length for tag in tags)
            found.length = min(found.length, ahead)
        if found.length == 0:
            return False
        if not found:
            self._text(1)  # no head begins here
            return self._text_again()
        self._take(length)
        self._in_block = self._in_block or start > 0
        self._begin(found.groups[NAME], found.groups.get(INDEX))
        return True

    def _begin(self, name: str, number: str | None) -> None:
        """Begin a call of a tool. number: the call's number, where the head has it."""
        form = self._form
        bare = name.removeprefix(form.prefix) or name
        bare = self._also.get(bare, bare)
        self._index, self._given = self._index + 1, 0
        self._schema = self._tools.get(bare, {})
        ends = (tag for end in slips(form.end) for tag in literals(end))
        self._json = Json([tag for tag in (*ends, *form.all_block_ends) if tag != "}"])
        self._parts.append(CallBegin(self._index, bare, f"{name}:{number}" if number else None))
        self._step = self._arguments if form.parameter is None else self._parameters

    def _arguments(self, final: bool) -> bool:
        """Read arguments in JSON."""
        if not self._json.begun:
            self._held = self._held.lstrip()
        length, ended = self._json.scan(self._held)
        self._argue(self._take(length))
        if ended:
            self._step = self._ending
        elif final:
            self._held = ""
        return ended

    def _ending(self, final: bool) -> bool:
        """Read the end of a call."""
        found = match_any(slips(GAP + self._form.end), self._held)
        if found:
            self._take(found.length)
            self._parts.append(CallEnd(self._index))
            self._step = self._after
        return bool(found) or (found.length < 0 and self._text_again())

    def _parameters(self, final: bool) -> bool:
        """Read the key of an argument, or the end of a call."""
        form = self._form
        assert form.parameter is not None
        end = match_any(slips(GAP + form.end), self._held)
        if end:
            self._argue("}" if self._given else "{}")
            return self._ending(final)
        key = match(GAP + form.parameter.before_key, self._held)
        if key:
            return self._key(form.parameter, key.length)
        if not self._given and self._held.lstrip().startswith("{"):
            self._step = self._arguments
            return True
        return max(end.length, key.length) < 0 and self._text_again()

    def _key(self, parameter: Parameter, start: int) -> bool:
        at = self._held.find(literals(parameter.before_value)[0], start)
        if at < 0:
            return len(self._held) - start > _LONGEST_KEY and self._text_again()
        found, key = match(parameter.before_value, self._held, at), self._held[start:at]
        if not found:
            return found.length < 0 and self._text_again()
        self._take(at + found.length)
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        if schema is None:
            schema = self._schema.get("additionalProperties", {})
        self._value = Value(schema, self._schema, found.groups.get(STRING))
        self._argue((", " if self._given else "{") + as_string(key) + ": ")
        self._given += 1
        self._step = self._in_value
        return True

    def _in_value(self, final: bool) -> bool:
        assert self._form.parameter is not None
        stop, *slipped = slips(literals(self._form.parameter.end)[0])
        at, length = self._held.find(stop), len(stop)
        if slipped and (found := self._slip(slipped[0], at))[0] >= 0:
            at, length = found
        if at >= 0 and length:
            self._argue(self._value.end(self._take(at)))
            self._take(length)
            self._step = self._parameters
            return True
        keep = max(begun(tag, self._held) for tag in (stop, *slipped)) if at < 0 else len(self._held) - at
        self._argue(self._value.grow(self._take(len(self._held) - keep)))
        if final:
            self._argue(self._value.grow("" if self._is_markup(self._held) else self._held))
            self._held = ""
        return False

    def _slip(self, tag: str, before: int) -> tuple[int, int]:
        """The place and length of a tag without its mark that ends a value before a place; (-1, 0): none.

        It is text of the value unless a tag of the format follows. The length is 0 until that is known.
        """
        form, at = self._form, -1
        follow = [GAP + (form.parameter.before_key if form.parameter else ""), *slips(GAP + form.end)]
        while (at := self._held.find(tag, at + 1, before if before >= 0 else None)) >= 0:
            ahead = match_any(follow, self._held, at + len(tag))
            if ahead.length >= 0:
                return at, len(tag) if ahead else 0
        return -1, 0

    def _after(self, final: bool) -> bool:
        """Read the tag of a further call, or of the end of the block."""
        form, text = self._form, self._held.lstrip()
        if len(self._held) - len(text) > LONGEST:
            return self._text_again()
        tags = (*form.all_block_ends, *form.all_opens)
        tag = next((tag for tag in tags if text.startswith(tag)), None)
        if tag is None:
            if any(t.startswith(text) for t in tags) and (not final or self._in_block or is_markup(text)):
                return False
            return self._text_again()
        ended = tag in form.all_block_ends
        self._take(len(self._held) - len(text) + (len(tag) if ended else 0))
        self._step = self._head
        return not ended or self._text_again()
