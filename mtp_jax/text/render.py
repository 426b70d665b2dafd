"""The process that renders chat templates, in the dialect of transformers' `apply_chat_template`.

A template is code that came with the weights. Jinja's immutable sandbox gives it none of Python's internals.
One operation on nested lists may take for ever, and holds Python's lock: only the system can end it, and with
it this process.
"""

import functools
import json
import signal
from collections.abc import Callable
from datetime import datetime

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.text import child
from mtp_jax.text.chat_template import MEMORY, first_line
from mtp_jax.text.tools.conversation import with_objects

MAX_PROMPT_CHARS = 16_000_000
"""Most characters of a rendering, beyond any context window: a longer one is a runaway template."""

MAX_TEMPLATES = 4
"""Most compiled templates that are kept."""


def main() -> None:
    """Render jobs until the other end is closed. SIGPROF ends the process at any point."""
    control = child.parent()
    child.limit_memory(MEMORY)
    environment = _environment()
    compiled = functools.lru_cache(MAX_TEMPLATES)(environment.from_string)
    try:
        while True:
            wanted = child.receive(control)
            signal.setitimer(signal.ITIMER_PROF, wanted["seconds"])
            source, variables = wanted["source"], wanted["variables"]
            answer = (
                _reads(environment, source) if variables is None else _answer(compiled, source, variables)
            )
            signal.setitimer(signal.ITIMER_PROF, 0)
            child.send(control, answer)
    except (ConnectionError, EOFError):
        pass


def _reads(environment: Environment, source: str) -> JsonObject:
    """The names of the variables that a template ``reads``, or the ``error`` of a broken one."""
    try:
        found = find_undeclared_variables(environment.parse(source))
        return {"reads": sorted(found - environment.globals.keys())}
    except (TemplateError, MemoryError, RecursionError) as error:
        return {"error": f"this model's chat template is broken: {first_line(error)}; use a raw completion"}


def _answer(compiled: Callable[[str], Template], source: str, variables: JsonObject) -> dict[str, str]:
    """The answer to a job: ``text``, ``refused`` by a limit, or the template's ``error``."""
    try:
        if "tool_calls" in source:
            variables["messages"] = [with_objects(message) for message in variables.get("messages", ())]
        return {"text": _generate(compiled(source), variables)}
    except MemoryError:
        return {"refused": f"takes more than {MEMORY >> 20} MiB to render"}
    except _TooLong:
        return {"refused": f"makes a prompt of more than {MAX_PROMPT_CHARS} characters"}
    except TemplateSyntaxError as error:
        return {
            "error": f"this model's chat template is broken at line {error.lineno}: {first_line(error)}; "
            "use a raw completion"
        }
    except TemplateError as error:
        return {"error": f"the chat template refused the messages: {first_line(error)}"}
    except Exception as error:  # template code can raise anything over unexpected messages
        return {
            "error": f"the chat template failed on the messages: {type(error).__name__}: {first_line(error)}"
        }


class _TooLong(Exception):
    """A prompt beyond its limit."""


def _generate(template: Template, variables: JsonMapping) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > MAX_PROMPT_CHARS:
            raise _TooLong
        pieces.append(piece)
    return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %}` marks training targets; here its body is simply printed."""

    tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter tojson. Jinja's own escapes for HTML, on which no model was trained."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main()
