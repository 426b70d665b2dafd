"""How families of models write calls of tools."""

import re
from dataclasses import dataclass

from mtp_jax.errors import RequestError

_NAME = r"(?P<name>[A-Za-z0-9_.\-]+)"


@dataclass(frozen=True)
class Format:
    """One family's syntax.

    Attributes:
        block: opens the calls; empty where each call stands alone.
        call: opens one call, as far as its text is the same for all.
        head_ends: the first of them ends a call's head.
        head: matches a head with its end: groups ``name`` and perhaps ``id``.
        end: ends a call's arguments.
        block_end: ends the calls; empty where each call stands alone.
        parameter: matches one parameter: groups ``key``, ``value`` and perhaps ``string`` ("true": the value
            is text, "false": it is JSON). None where the arguments are JSON.
        parameter_end: the end of such a parameter.
        closing: one character between JSON arguments and ``end``, with white space around it.
        after_block: stands between ``block`` and the first call.
        opening: how a call begins when it is written, for a ``{name}`` and its number ``{index}``.
        ending: how it ends.
        between: what stands between two calls.
        pair: how one parameter is written, split where its value stands, for a ``{key}`` and, as the format
            says it, ``{string}``; empty where the arguments are JSON.
    """

    block: str
    call: str
    head_ends: tuple[str, ...]
    head: re.Pattern[str]
    end: str
    block_end: str
    parameter: re.Pattern[str] | None = None
    parameter_end: str = ""
    closing: str = ""
    after_block: str = ""
    opening: str = ""
    ending: str = ""
    between: str = ""
    pair: tuple[str, str] | tuple[()] = ()


_DSML = "\uff5cDSML\uff5c"  # full-width bars
_DS_CALL = "<\uff5ctool▁call▁begin\uff5c>"
_DS_SEP = "<\uff5ctool▁sep\uff5c>"
_DS = ("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>", "<\uff5ctool▁calls▁end\uff5c>")
_KIMI_CALL, _KIMI_SEP = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"

FORMATS = {
    "deepseek_v3": Format(
        _DS[0],
        _DS_CALL,
        ("```json\n",),
        re.compile(rf"{_DS_CALL}function{_DS_SEP}{_NAME}\n```json\n"),
        "\n```" + _DS[1],
        _DS[2],
        opening=f"{_DS_CALL}function{_DS_SEP}{{name}}\n```json\n",
        ending="\n```" + _DS[1],
        between="\n",
    ),
    "deepseek_v31": Format(
        _DS[0],
        _DS_CALL,
        (_DS_SEP,),
        re.compile(rf"{_DS_CALL}{_NAME}{_DS_SEP}"),
        _DS[1],
        _DS[2],
        opening=f"{_DS_CALL}{{name}}{_DS_SEP}",
        ending=_DS[1],
    ),
    "deepseek_v32": Format(
        "<\uff5cDSML\uff5cfunction_calls>",
        "<\uff5cDSML\uff5cinvoke",
        (">",),
        re.compile(rf'<{_DSML}invoke name="{_NAME}">'),
        "</\uff5cDSML\uff5cinvoke>",
        "</\uff5cDSML\uff5cfunction_calls>",
        re.compile(
            rf'<{_DSML}parameter name="(?P<key>[^"]*)" string="(?P<string>true|false)">'
            rf"(?P<value>.*)</{_DSML}parameter>",
            re.DOTALL,
        ),
        "</\uff5cDSML\uff5cparameter>",
        after_block="\n",
        opening=f'<{_DSML}invoke name="{{name}}">\n',
        ending=f"</{_DSML}invoke>\n",
        pair=(f'<{_DSML}parameter name="{{key}}" string="{{string}}">', f"</{_DSML}parameter>\n"),
    ),
    "glm47": Format(
        "",
        "<tool_call>",
        ("<arg_key>", "</tool_call>"),
        re.compile(rf"<tool_call>\s*{_NAME}\s*(?=<)"),
        "</tool_call>",
        "",
        re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*)</arg_value>", re.DOTALL),
        "</arg_value>",
        opening="<tool_call>{name}",
        ending="</tool_call>",
        pair=("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
    ),
    "kimi_k2": Format(
        "<|tool_calls_section_begin|>",
        _KIMI_CALL,
        (_KIMI_SEP,),
        re.compile(
            rf"{re.escape(_KIMI_CALL)}\s*(?P<id>(?:functions\.)?{_NAME}:\d+)\s*{re.escape(_KIMI_SEP)}"
        ),
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        opening=f"{_KIMI_CALL}functions.{{name}}:{{index}}{_KIMI_SEP}",
        ending="<|tool_call_end|>",
    ),
    # For models without a format of their own.
    "json": Format(
        "",
        "<tool_call>",
        ('"arguments":',),
        re.compile(rf'<tool_call>\s*\{{\s*"name":\s*"{_NAME}",\s*"arguments":'),
        "</tool_call>",
        "",
        closing="}",
        opening='<tool_call>\n{"name": "{name}", "arguments": ',
        ending="}\n</tool_call>",
        between="\n",
    ),
}


def format_of(template: str) -> str:
    """The name of the format that a chat template writes calls in; JSON between tags where it shows none."""
    found = [name for name, form in FORMATS.items() if (form.block or form.call) in template]
    # Some families begin a call alike.
    return max(found, key=lambda name: _shown(FORMATS[name], template), default="json")


def _shown(form: Format, template: str) -> int:
    """How many characters of the texts of a format a template holds."""
    if form is FORMATS["deepseek_v3"] and "```json" not in template:
        return 0
    texts = (form.block, form.call, form.parameter_end, form.closing and '"arguments"')
    return sum(len(text) for text in texts if text in template)


def format_named(name: str) -> Format:
    """Raises RequestError for a name that is none of them."""
    if name not in FORMATS:
        raise RequestError(f"tool parser {name!r} is unknown; use one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
