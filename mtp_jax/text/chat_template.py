"""The chat template of a checkpoint, rendered without transformers in Jinja's immutable sandbox.

A template is code that came with the weights, so it gets none of Python's internals, and there are limits to
what it prints and how long it takes. Time is looked at between operations, so values are measured before one
operation makes text of them: lists that hold one another many times are small in memory, endless in text.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sized
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mtp_jax.errors import CheckpointError, RequestError

MAX_TEMPLATE_CHARS = 1_000_000
MAX_PROMPT_CHARS = (
    16_000_000  # beyond any context window: a rendering above this is a template that runs away
)
MAX_RENDER_SECONDS = 10.0
MAX_NUMBER = 1e100
_DEADLINE = "_render_deadline"
_HOLDERS = (Mapping, list, tuple, set, frozenset)
# Jinja's filters that make text of what lists hold.
_MAKE_TEXT = (
    *(
        "e",
        "escape",
        "forceescape",
        "format",
        "indent",
        "join",
        "lower",
        "pprint",
        "replace",
        "safe",
        "string",
    ),
    *("striptags", "title", "trim", "truncate", "upper", "urlencode", "wordcount", "wordwrap", "xmlattr"),
)


class ChatTemplate:
    """The template, or the named templates, of tokenizer_config.json's `chat_template`.

    Attributes:
        sources: template text by name; empty when the checkpoint has none.

    Raises:
        CheckpointError: `chat_template` is neither a string nor a list of objects with name and template.
    """

    def __init__(self, value: Any):
        self.sources = _sources(value)
        self._compile = functools.lru_cache(maxsize=4)(_environment().from_string)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render with `variables`; "tool_use" serves requests with `tools`, "default" all others.

        Raises:
            RequestError: no template, a broken one, one above the limits, or one that refuses the messages.
        """
        source = self.source(with_tools=variables.get("tools") is not None)
        try:
            return _generate(self._compile(source), variables)
        except TemplateSyntaxError as error:
            raise RequestError(
                f"this model's chat template is broken at line {error.lineno}: {first_line(error)}; "
                "use a raw completion"
            ) from error
        except TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {first_line(error)}") from error
        except Exception as error:  # whatever template code can raise over unexpected messages
            raise RequestError(
                f"the chat template failed on the messages: {type(error).__name__}: {first_line(error)}"
            ) from error

    def source(self, with_tools: bool) -> str:
        """The template's text. Raises RequestError: none, or one above the limits."""
        names = ("tool_use", "default") if with_tools else ("default",)
        source = next((self.sources[name] for name in names if name in self.sources), None)
        if source is None:
            raise RequestError(
                f"this model has no chat template (found: {', '.join(self.sources) or 'none'}); "
                "use a raw completion, or put a chat_template.jinja beside tokenizer.json"
            )
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed; "
                "use a raw completion"
            )
        return source


def first_line(error: Exception) -> str:
    """First line of an error's message, at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class _Sandbox(ImmutableSandboxedEnvironment):
    """Checks the time at every call, and makes one in every round of a loop.

    Products and powers alone can take for ever in a single operation: of numbers they end at a float's range,
    and they repeat nothing beyond the longest prompt.
    """

    intercepted_binops = frozenset({"*", "**"})

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
        return super()._generate(source, *args, **kwargs)

    def tick(self) -> None:
        """Do nothing, by ``call``."""

    def finalize_text(self, value: Any) -> Any:
        """A value that is to be printed."""
        _check_size(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            sizes = [len(x) if isinstance(x, Sized) else x for x in (left, right)]
            if operator == "*" and math.prod(sizes) > MAX_PROMPT_CHARS:
                raise TemplateError(f"a product exceeds {MAX_PROMPT_CHARS} items")
            if operator == "*":
                count = next((x for x in (left, right) if isinstance(x, int)), 1)
                _check_size([x for x in (left, right) if isinstance(x, list | tuple)], max(count, 1))
        elif _size(operator, left, right) > MAX_NUMBER:
            raise TemplateError(f"a number exceeds {MAX_NUMBER:.0e}")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        _check_time(context.get(_DEADLINE))
        return super().call(context, obj, *args, **kwargs)


def _check_size(value: Any, times: int = 1) -> None:
    """Raises TemplateError where the text of a value, ``times`` over, would exceed the longest prompt.

    Every object is looked at once, however often it is held.
    """
    known: dict[int, int] = {}

    def size(x: Any) -> int:
        if isinstance(x, str):
            return len(x) + 1
        if not isinstance(x, _HOLDERS):
            return 1
        if id(x) not in known:
            parts = [part for pair in x.items() for part in pair] if isinstance(x, Mapping) else x
            known[id(x)] = 1 + sum(map(size, parts))
        return known[id(x)]

    if size(value) * times > MAX_PROMPT_CHARS:
        raise TemplateError(f"a value would take more than {MAX_PROMPT_CHARS} characters")


def _size(operator: str, left: float, right: float) -> float:
    try:
        return abs(float(left) ** right if operator == "**" else float(left) * right)
    except OverflowError:
        return math.inf


class _GenerationTag(Extension):
    """`{% generation %}` marks training targets; here its body is simply printed."""

    tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: the dialect of transformers' `apply_chat_template`."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.finalize = environment.finalize_text
    for name in _MAKE_TEXT:
        environment.filters[name] = _measured(environment.filters[name])
    environment.filters["tojson"] = _measured(_to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _measured(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, of values that are not too large."""

    @functools.wraps(filter_)  # with Jinja's marks of what else it is given
    def run(*args: Any, **kwargs: Any) -> Any:
        _check_size([a for a in (*args, *kwargs.values()) if isinstance(a, _HOLDERS)])
        return filter_(*args, **kwargs)

    return run


def _generate(template: Template, variables: Mapping[str, Any]) -> str:
    deadline = time.monotonic() + MAX_RENDER_SECONDS
    pieces: list[str] = []
    size = 0
    for piece in template.generate({**variables, _DEADLINE: deadline}):
        size += len(piece)
        if size > MAX_PROMPT_CHARS:
            raise TemplateError(f"the prompt exceeds {MAX_PROMPT_CHARS} characters")
        _check_time(deadline)
        pieces.append(piece)
    return "".join(pieces)


def _check_time(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise TemplateError(f"rendering took longer than {MAX_RENDER_SECONDS:.0f} s")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _sources(value: Any) -> dict[str, str]:
    if value is None or isinstance(value, str):
        return {} if value is None else {"default": value}
    named = isinstance(value, list) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
        for entry in value
    )
    if not named:
        raise CheckpointError(
            "tokenizer_config.json: chat_template must be a string or a list of objects with the strings "
            f"name and template, got {type(value).__name__}; fix or remove it"
        )
    return {entry["name"]: entry["template"] for entry in value}
