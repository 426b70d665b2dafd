"""How families of models write calls of tools: each family's syntax, declared once.

The grammar (``grammar.py``), the parser (``parser.py``) and the renderer (``conversation.py``) are made of
it. Its texts say how a call is written. A *gap* in a text is a place where a model may write other white
space, or none: a line break with the white space around it, or ``GAP``, where nothing is written.
"""

import re
from dataclasses import dataclass
from functools import cache

from mtp_jax.errors import RequestError

GAP = "\0"
NAME, INDEX, STRING = "{name}", "{index}", "{string}"
"""Places in a text: a tool's name, a call's number, whether a value is text ("true" or "false")."""

NAMES = r"[A-Za-z0-9_.\-]+"
"""Names of tools, as an expression."""

_GAP = rf"[ \t]*[\n{GAP}][ \t\n{GAP}]*"
_PARTS = re.compile(rf"({_GAP}|{'|'.join(map(re.escape, (NAME, INDEX, STRING)))})")


@dataclass(frozen=True)
class Parameter:
    """How one argument is written, where each is written by itself: texts around its key and its value.

    Attributes:
        before_key, before_value, end: the value is text or JSON, as it stands between the last two.
        between: stands between two arguments.
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
        head: text behind it, up to the arguments, with ``NAME`` and perhaps ``INDEX``.
        end: ends a call.
        prefix: stands before the name, unless a model leaves it out.
        between: stands between two calls.
        blocks: open the calls; the first one is written. Empty where each call stands alone.
        after_block: text between the tag that opens the block and the first call.
        before_block_end: stands between the last call and the end of the block.
        block_ends: end the calls; the first one is written.
        parameter: None where the arguments are JSON.
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
    parameter: Parameter | None = None

    @property
    def opens(self) -> tuple[str, ...]:
        """Tags at which text ends and calls begin; some models leave out the one around the block."""
        return (*self.blocks, self.call)

    @property
    def head_is_name(self) -> bool:
        """Whether only the text behind a head tells its end."""
        return literals(self.head) == []

    @property
    def closes(self) -> tuple[str, ...]:
        """Tags that end a call or the calls."""
        return (*self.block_ends, *(tag for tag in literals(self.end)[-1:] if tag.startswith("<")))


@cache
def parts(text: str) -> tuple[str, ...]:
    """A text's literals, gaps and places (``NAME`` and others), in their order."""
    return tuple(part for part in _PARTS.split(text) if part)


def is_gap(part: str) -> bool:
    """Whether a part is a gap."""
    return GAP in part or "\n" in part


def literals(text: str) -> list[str]:
    """The parts of a text that are always written."""
    return [part for part in parts(text) if not is_gap(part) and part not in (NAME, INDEX, STRING)]


def as_written(text: str) -> str:
    """A text without the marks of gaps where nothing is written."""
    return text.replace(GAP, "")


_DSML = "\uff5cDSML\uff5c"  # full-width bars
_DS_CALL = "<\uff5ctool▁call▁begin\uff5c>"
_DS_SEP = "<\uff5ctool▁sep\uff5c>"
_DS_END = "<\uff5ctool▁call▁end\uff5c>"
_DS_BLOCK = ("<\uff5ctool▁calls▁begin\uff5c>",)
_DS_BLOCK_END = ("<\uff5ctool▁calls▁end\uff5c>",)

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
    "deepseek_v32": Format(
        f"<{_DSML}invoke",
        f' name="{NAME}">\n',
        f"\n</{_DSML}invoke>",
        between="\n",
        blocks=(f"<{_DSML}function_calls>",),
        after_block="\n",
        before_block_end="\n",
        block_ends=(f"</{_DSML}function_calls>",),
        parameter=Parameter(
            f'<{_DSML}parameter name="', f'" string="{STRING}">', f"</{_DSML}parameter>", between="\n"
        ),
    ),
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
    """The name of the format that a chat template writes calls in; JSON between tags where it shows none."""
    found = [name for name, form in FORMATS.items() if any(tag in template for tag in form.opens)]
    # Some families begin a call alike.
    return max(found, key=lambda name: _shown(FORMATS[name], template), default="json")


def _shown(form: Format, template: str) -> int:
    """How many characters of the texts of a format a template holds."""
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
    """Raises RequestError for a name that is none of them."""
    if name not in FORMATS:
        raise RequestError(f"tool parser {name!r} is unknown; use one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
