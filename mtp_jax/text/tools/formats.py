"""The syntax in which each family of models writes calls of tools.

The grammar (``grammar.py``), the parser (``parser.py``) and the renderer (``conversation.py``) are derived
from it. A *gap* in a text of a format is a place where a model may write other white space, or none: a line
break with the white space around it, or ``GAP``, where the renderer writes nothing.
"""

import re
from dataclasses import dataclass
from functools import cache

from mtp_jax.errors import RequestError

GAP = "\0"
NAME, INDEX, STRING = "{name}", "{index}", "{string}"
"""Places in a text: a tool's name, a call's number, whether a value is text ("true" or "false")."""

NAMES = r"[A-Za-z0-9_.\-]+"
"""The regular expression of a tool's name."""

_GAP = rf"[ \t]*[\n{GAP}][ \t\n{GAP}]*"
_PARTS = re.compile(rf"({_GAP}|{'|'.join(map(re.escape, (NAME, INDEX, STRING)))})")


DSML = "\uff5cDSML\uff5c"
"""The mark in each tag of DeepSeek's markup language, with full-width bars: a special token in releases."""


def slips(text: str) -> tuple[str, ...]:
    """Both ways in which models write a closing tag, with the mark and without it, as they may forget it."""
    return (text, text.replace(DSML, "")) if DSML in text else (text,)


@dataclass(frozen=True)
class Parameter:
    """The syntax of one argument, in a format that writes each argument by itself.

    Attributes:
        before_key: text before the key.
        before_value: text between the key and the value, which is JSON, or text without quotes.
        end: text behind the value.
        between: text between two arguments.
    """

    before_key: str
    before_value: str
    end: str
    between: str = ""


@dataclass(frozen=True)
class Format:
    """One family's syntax.

    Attributes:
        call: opens one call, up to the part that differs between calls.
        head: text between ``call`` and the arguments, with ``NAME`` and perhaps ``INDEX``.
        end: ends a call.
        prefix: text before the name, which a model may leave out.
        between: text between two calls.
        blocks: tags that open a block of calls; the renderer writes the first. Empty: calls stand alone.
        after_block: text between the tag that opens the block and the first call.
        before_block_end: text between the last call and the tag that ends the block.
        block_ends: tags that end a block of calls; the renderer writes the first.
        slipped_blocks, slipped_block_ends: tags of a sister format, which models may write instead.
        parameter: syntax of one argument; None: the arguments of a call are one JSON object.
    """

    call: str
    head: str
    end: str
    prefix: str = ""
    between: str = ""
    blocks: tuple[str, ...] = ()
    after_block: str = GAP
    before_block_end: str = GAP
    block_ends: tuple[str, ...] = ()
    slipped_blocks: tuple[str, ...] = ()
    slipped_block_ends: tuple[str, ...] = ()
    parameter: Parameter | None = None

    @property
    def opens(self) -> tuple[str, ...]:
        """Tags at which text ends and calls begin: some models begin a call without the tag of a block."""
        return (*self.blocks, self.call)

    @property
    def head_is_name(self) -> bool:
        """Whether the head is a name alone, so that only the text behind the head shows where it ends."""
        return literals(self.head) == []

    @property
    def closes(self) -> tuple[str, ...]:
        """Tags that end a call, or a block of calls."""
        return (
            *self.all_block_ends,
            *(t for t in literals(self.end)[-1:] if t.startswith("<") for t in slips(t)),
        )

    @property
    def all_block_ends(self) -> tuple[str, ...]:
        """Tags that end a block of calls, also as models slip."""
        ends = (*self.block_ends, *self.slipped_block_ends)
        return tuple(tag for end in ends for tag in slips(end))

    @property
    def all_opens(self) -> tuple[str, ...]:
        """Tags at which calls begin, also as models slip."""
        return (*self.slipped_blocks, *self.opens)


@cache
def parts(text: str) -> tuple[str, ...]:
    """A text's literals, gaps and places (``NAME`` and others), in their order."""
    return tuple(part for part in _PARTS.split(text) if part)


def is_gap(part: str) -> bool:
    """Whether a part is a gap."""
    return GAP in part or "\n" in part


def literals(text: str) -> list[str]:
    """The parts of a text that a model always writes as they are."""
    return [part for part in parts(text) if not is_gap(part) and part not in (NAME, INDEX, STRING)]


def as_written(text: str) -> str:
    """A text as the renderer writes it, without ``GAP``."""
    return text.replace(GAP, "")


_DS_CALL = "<\uff5ctool▁call▁begin\uff5c>"
_DS_SEP = "<\uff5ctool▁sep\uff5c>"
_DS_END = "<\uff5ctool▁call▁end\uff5c>"
_DS_BLOCK = ("<\uff5ctool▁calls▁begin\uff5c>",)
_DS_BLOCK_END = ("<\uff5ctool▁calls▁end\uff5c>",)


def _dsml(block: str, sister: str) -> Format:
    """The format with the tags of DeepSeek's markup language. block, sister: tags around calls."""
    return Format(
        f"<{DSML}invoke",
        f' name="{NAME}">\n',
        f"\n</{DSML}invoke>",
        between="\n",
        blocks=(f"<{DSML}{block}>",),
        after_block="\n",
        before_block_end="\n",
        block_ends=(f"</{DSML}{block}>",),
        slipped_blocks=(f"<{DSML}{sister}>",),
        slipped_block_ends=(f"</{DSML}{sister}>",),
        parameter=Parameter(
            f'<{DSML}parameter name="', f'" string="{STRING}">', f"</{DSML}parameter>", between="\n"
        ),
    )


FORMATS = {
    "deepseek_v3": Format(
        _DS_CALL,
        f"{GAP}function{_DS_SEP}{NAME}\n```json\n",
        f"\n```{GAP}{_DS_END}",
        between="\n",
        blocks=_DS_BLOCK,
        block_ends=_DS_BLOCK_END,
    ),
    "deepseek_v31": Format(
        _DS_CALL,
        f"{GAP}{NAME}{GAP}{_DS_SEP}{GAP}",
        f"{GAP}{_DS_END}",
        between=GAP,
        blocks=_DS_BLOCK,
        block_ends=_DS_BLOCK_END,
    ),
    "deepseek_v32": _dsml("function_calls", "tool_calls"),
    "deepseek_v4": _dsml("tool_calls", "function_calls"),
    "glm45": Format(
        "<tool_call>",
        f"{GAP}{NAME}\n",
        "</tool_call>",
        between="\n",
        parameter=Parameter("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "glm47": Format(
        "<tool_call>",
        f"{GAP}{NAME}{GAP}",
        "</tool_call>",
        between=GAP,
        parameter=Parameter("<arg_key>", f"</arg_key>{GAP}<arg_value>", f"</arg_value>{GAP}"),
    ),
    "gigachat3": Format(
        "<|function_call|>",
        f'{GAP}{{{GAP}"name": {GAP}"{NAME}",{GAP} {GAP}"arguments": {GAP}',
        f"{GAP}}}",
        between=GAP,
    ),
    "kimi_k2": Format(
        "<|tool_call_begin|>",
        f"{GAP}{NAME}:{INDEX}{GAP}<|tool_call_argument_begin|>{GAP}",
        f"{GAP}<|tool_call_end|>",
        prefix="functions.",
        between=GAP,
        blocks=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        block_ends=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    ),
    # The formats below serve models without a format of their own.
    "json": Format(
        "<tool_call>",
        f'\n{{{GAP}"name": {GAP}"{NAME}",{GAP} {GAP}"arguments": {GAP}',
        f"{GAP}}}\n</tool_call>",
        between="\n",
    ),
}


def format_of(template: str) -> str:
    """The name of the format in which a chat template writes calls; "json" where it shows no format."""
    found = [name for name, form in FORMATS.items() if any(tag in template for tag in form.opens)]
    # Some families begin a call alike.
    return max(found, key=lambda name: _shown(FORMATS[name], template), default="json")


def _shown(form: Format, template: str) -> int:
    """The number of characters of a format's texts that a template contains."""
    must = form.parameter.before_key if form.parameter else ""
    if form is FORMATS["deepseek_v3"]:  # its tags are V3.1's
        must = "```json"
    if must not in template:
        return 0
    texts = [*form.opens, *form.closes]
    if form.parameter is not None:
        texts += [must, *as_written(form.parameter.before_value).split(STRING)]
    elif '"arguments"' in form.head:
        texts.append('"arguments"')
    return sum(len(text) for text in texts if text in template)


def format_named(name: str) -> Format:
    """The format of this name. Raises RequestError for an unknown name."""
    if name not in FORMATS:
        raise RequestError(f"tool parser {name!r} is unknown; use one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
