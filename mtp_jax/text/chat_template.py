"""The chat template of a checkpoint, rendered without transformers.

A template is code that came with the weights. It runs in a process of its own (``text/render.py``), which
the system ends at a limit of processor time; its memory is bounded, too. Such a process is kept for the next
prompts: a rendering costs little more than it would here, and only who asked for a bad one waits for it.
"""

import atexit
import signal
import socket
import subprocess

from mtp_jax.errors import CheckpointError, Overloaded, RequestError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.text import child

MAX_TEMPLATE_CHARS = 1_000_000

SECONDS = 1.0
"""Processor time for one prompt: a hundred times the time of a long one."""

MEMORY = 2**30
"""Bytes that the process may take beyond what it begins with."""

OWN_VARIABLES = frozenset(
    {
        "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "eos_token",
        "messages", "raise_exception", "self", "strftime_now", "tokenize", "tool_format", "tools",
    }
)  # fmt: skip
"""Names that a caller cannot give a template: variables set here, and arguments of transformers' function."""

# Seconds for the process to start and to answer, on a busy machine.
_PATIENCE_SECONDS = 60.0
_RENDERER = "mtp_jax.text.render"
_idle: list[tuple[subprocess.Popen[bytes], socket.socket]] = []  # one for each prompt rendered at a time


class ChatTemplate:
    """The template, or the named templates, of tokenizer_config.json's `chat_template`.

    Attributes:
        sources: template text by name; empty when the checkpoint has none.

    Raises:
        CheckpointError: `chat_template` is neither a string nor a list of objects with name and template.
    """

    def __init__(self, value: object):
        self.sources = _sources(value)
        self._reads: dict[str, frozenset[str]] = {}  # by source

    def render(self, variables: JsonMapping) -> str:
        """Render with `variables`, values as JSON has them; "tool_use" serves `tools`, "default" the rest.

        Raises:
            RequestError: the template is missing, broken, above the limits, or refuses the messages.
            Overloaded: the machine is too busy, or has ended the process that renders.
        """
        name, source = self._chosen(with_tools=variables.get("tools") is not None)
        answer = _rendered({"source": source, "variables": dict(variables), "seconds": SECONDS})
        if "refused" in answer:
            raise RequestError(
                f'the chat template "{name}" {answer["refused"]}; mend it, or use a raw completion'
            )
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer["text"]

    def variables(self, with_tools: bool) -> frozenset[str]:
        """The variables that the template reads, except names that are set here.

        Raises RequestError for a broken template, and Overloaded.
        """
        _, source = self._chosen(with_tools)
        if source not in self._reads:
            answer = _rendered({"source": source, "variables": None, "seconds": SECONDS})
            if "reads" not in answer:
                raise RequestError(answer.get("error", "the chat template cannot be read"))
            self._reads[source] = frozenset(answer["reads"]) - OWN_VARIABLES
        return self._reads[source]

    def source(self, with_tools: bool) -> str:
        """The template's text. Raises RequestError if there is none, or it is above the limits."""
        return self._chosen(with_tools)[1]

    def _chosen(self, with_tools: bool) -> tuple[str, str]:
        names = ("tool_use", "default") if with_tools else ("default",)
        name = next((name for name in names if name in self.sources), None)
        if name is None:
            raise RequestError(
                f"this model has no chat template (found: {', '.join(self.sources) or 'none'}); "
                "use a raw completion, or put a chat_template.jinja beside tokenizer.json"
            )
        source = self.sources[name]
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed; "
                "use a raw completion"
            )
        return name, source


def first_line(error: Exception) -> str:
    """First line of an error's message, at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _rendered(job: JsonObject) -> JsonObject:
    """The process's answer to a job."""
    for _ in range(2):  # the system may have ended an idle process; then try a new one
        try:
            process, control = _idle.pop()
        except IndexError:
            process, control = child.start(_RENDERER)
            control.settimeout(_PATIENCE_SECONDS)
        try:
            child.send(control, job)
            answer = child.receive(control)
        except (ConnectionError, EOFError):
            if child.end(process, control) == -signal.SIGPROF:
                return {"refused": f"takes more than {SECONDS:g} s of processor time to render"}
        except TimeoutError:
            child.end(process, control)
            raise Overloaded("the machine is too busy to render it; try again", SECONDS) from None
        except (TypeError, ValueError, RecursionError) as error:
            child.end(process, control)
            raise RequestError(
                f"the messages are not JSON: {first_line(error)}; give strings, numbers, lists and dicts"
            ) from error
        except BaseException:  # the process would give this job's answer to the next job
            child.end(process, control)
            raise
        else:
            _idle.append((process, control))
            return answer
    raise Overloaded("the process that renders chat templates has ended; try again", SECONDS)


@atexit.register
def _end_idle() -> None:
    while _idle:
        child.end(*_idle.pop())


def _sources(value: object) -> dict[str, str]:
    if value is None or isinstance(value, str):
        return {} if value is None else {"default": value}
    if not isinstance(value, list) or not all(
        isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
        for entry in value
    ):
        raise CheckpointError(
            "tokenizer_config.json: chat_template must be a string or a list of objects with the strings "
            f"name and template, got {type(value).__name__}; fix or remove it"
        )
    return {entry["name"]: entry["template"] for entry in value}
