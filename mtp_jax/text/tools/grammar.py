"""What an output with calls of tools may be, as a grammar in llguidance's Lark syntax."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtp_jax.errors import RequestError
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.text.tools.formats import Format

# Keywords of a tool's schema that a list of parameters, each with its own schema, can keep to.
_OF_PARAMETERS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "title")
) | {"description"}
# Keywords of a string's schema that say nothing about its text.
_OF_ANY_TEXT = frozenset(("type", "title", "description", "default", "examples"))
_TAG = re.compile(r"(<[^<>\s]+>)")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: letters, digits, "_", "-" and ".".
        parameters: the JSON Schema of its arguments, an object.
        strict: whether arguments must fit the schema; if not, they must be an object.
        description: for the model.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    description: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """Of its arguments."""
        return {"type": "object", **self.parameters} if self.strict else {"type": "object"}

    @property
    def strings(self) -> frozenset[str]:
        """Parameters that are any text, or one of some texts: formats with one tag per parameter write these
        as they are."""
        properties = self.parameters.get("properties")
        pairs = properties.items() if isinstance(properties, Mapping) else ()
        return frozenset(key for key, schema in pairs if _is_text(schema))


def call_grammar(
    form: Format,
    tools: Sequence[Tool],
    token: Callable[[str], int | None],
    embed: Callable[[Mapping[str, Any]], str],
    *,
    forced: bool,
    several: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of one output. A call begins as its format says and names a tool; then it is complete.

    token: the id of a tag that was added to the vocabulary as a token of its own. No other token may be given
    by its id: llguidance loses its place where a draft of such a one is not kept.
    embed: a schema as JSON text, checked.
    forced: the output is a call, or ``several``; otherwise it is any text, with calls in it.
    answer: an output that is no call is JSON that fits this schema, rather than text.

    Raises RequestError for a strict tool whose schema the format cannot keep to.
    """
    wrong = next(
        (t for t in tools if form.pair and t.strict and not t.parameters.keys() <= _OF_PARAMETERS), None
    )
    if wrong is not None:
        keyword = min(wrong.parameters.keys() - _OF_PARAMETERS)
        raise RequestError(
            f"the schema of the tool {wrong.name!r} has {keyword!r}: this model writes each parameter by "
            "itself, so a schema of all together cannot be kept to; leave it out, or do not force the call"
        )

    def literal(text: str) -> str:
        found = []
        for part in filter(None, _TAG.split(text)):
            own = token(part) if _TAG.fullmatch(part) else None
            found.append(_quoted(part) if own is None else f"<[{own}]>")
        return " ".join(found)

    tag = form.block or form.call
    again = literal(form.between + ("" if form.block else tag))
    more = f"({again} call)*" if several else ""
    calls = f"{literal(form.after_block)} call {more} {literal(form.block_end)}"
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        opening = form.opening.replace("{name}", tool.name).removeprefix("" if form.block else tag)
        before, numbered, after = opening.partition("{index}")
        number = f"/[0-9]+/ {literal(after)}" if numbered else ""
        arguments = _parameters(form, tool, literal, embed) if form.pair else f"%json {embed(tool.schema)}"
        rules.append(f"call_{i}: {literal(before)} {number} arguments_{i} {literal(form.ending)}")
        rules.append(f"arguments_{i}: {arguments}")
    texts = ["TEXT: /(.|\\n)*/"]
    if form.pair:
        texts.append(f"any_text{_up_to(form.pair[1], token)}")
    if forced:
        return "\n".join([f"start: {literal(tag)} {calls}", *rules, *texts])
    if answer is not None:
        return "\n".join(
            [f"start: {literal(tag)} {calls} | answer", f"answer: %json {embed(answer)}", *rules, *texts]
        )
    opens, closes = token(Tokenizer.OPEN_THOUGHT), token(Tokenizer.CLOSE_THOUGHT)
    thought = f"(<[{opens}]> TEXT <[{closes}]>)? " if opens is not None and closes is not None else ""
    start = f"start: {thought}(begin {calls}){'*' if several else '?'} tail"
    # The tag is taken as soon as it is there, so that no text can hold it.
    return "\n".join([start, f"begin{_up_to(tag, token)}", "tail: TEXT", *rules, *texts])


def _up_to(end: str, token: Callable[[str], int | None]) -> str:
    """A rule for any text up to and with ``end``, without its name."""
    tag = end.strip()
    if token(tag) is None:
        return f"[lazy]: TEXT {_quoted(end)}"
    space = end.removeprefix(tag)
    return f": TEXT <[{token(tag)}]>{' ' + _quoted(space) if space else ''}"


def _parameters(
    form: Format, tool: Tool, literal: Callable[[str], str], embed: Callable[[Mapping[str, Any]], str]
) -> str:
    """One after the other, in the schema's order; of a tool that is not strict, any that it names."""
    known, required = tool.parameters.get("properties"), tool.parameters.get("required", ())
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    found, strings = [], tool.strings
    for key, schema in known.items() if isinstance(known, Mapping) else ():
        is_text = key in strings
        head, end = (part.replace("{key}", key) for part in form.pair)
        head = head.replace("{string}", "true" if is_text else "false")
        if is_text and (choices := _choices(schema)):
            value = f"({' | '.join(map(literal, choices))}) {literal(end)}"
        elif is_text:
            value = "any_text"
        else:
            own = {**shared, **schema} if tool.strict and isinstance(schema, Mapping) else {}
            value = f"%json {embed(own)} {literal(end)}"
        must = tool.strict and key in required
        found.append(f"{literal(head)} {value}" if must else f"({literal(head)} {value})?")
    return " ".join(found) or '""'


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """The values that it lists; none if it lists none."""
    return list(schema.get("enum", [schema["const"]] if "const" in schema else ()))


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    if choices := _choices(schema):
        return all(isinstance(choice, str) and choice for choice in choices)
    return schema.get("type") == "string" and schema.keys() <= _OF_ANY_TEXT


def _quoted(text: str) -> str:
    return json.dumps(text)
