"""The access log: a line per request, as text or as JSON, without anything of prompts and answers."""

import json
import logging
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from starlette.types import Scope

from mtp_jax import JsonObject

if TYPE_CHECKING:
    from mtp_jax import RequestOutput, SamplingParams, Timing

AccessLog = Literal["text", "json", "off"]
LOGGER = logging.getLogger("serve.access")
_KEY = "access_record"
# Length limit of a client's own text, and of an error's message, which may quote the refused value.
_MOST_CHARACTERS = 256


@dataclass(frozen=True)
class Numbers:
    """Facts of a prompt and its newest output.

    Attributes:
        tokens: number of tokens of all its completions so far.
        reasons: finish reasons of completions that have ended.
        cached: number of tokens of the prompt that the prefix cache had.
        drafted, accepted: numbers of drafts verified and accepted so far.
    """

    prompt_tokens: int
    tokens: int
    reasons: list[str]
    cached: int
    timing: "Timing"
    drafted: int
    accepted: int


@dataclass
class Record:
    """The logged facts of a request.

    Attributes:
        error: message of the error in the answer.
        asked: options of its first prompt; None: nothing was submitted.
        prompts: facts by the number of the prompt.
    """

    error: str | None = None
    asked: "SamplingParams | None" = None
    prompts: dict[int, Numbers] = field(default_factory=dict)

    def saw(self, prompt: int, output: "RequestOutput") -> None:
        """Record the next output of a prompt, which has all of the output before, or continues it."""
        continues = self.asked is not None and self.asked.output_kind == "delta"
        done, before = output.speculation, self.prompts.get(prompt) if continues else None
        self.prompts[prompt] = Numbers(
            len(output.prompt_token_ids),
            sum(c.num_tokens for c in output.outputs),
            [c.finish_reason for c in output.outputs if c.finish_reason is not None],
            output.cached_tokens,
            output.timing,
            done.drafted + (before.drafted if before else 0),
            done.accepted + (before.accepted if before else 0),
        )

    def fields(self) -> JsonObject:
        """The facts as fields of a log line: token counts, finish reasons, the error."""
        found: JsonObject = {}
        if self.prompts:
            prompts = self.prompts.values()
            found = {
                "prompt_tokens": sum(p.prompt_tokens for p in prompts),
                "completion_tokens": sum(p.tokens for p in prompts),
                "finish_reasons": sorted({reason for p in prompts for reason in p.reasons}),
            }
        return found | ({"error": _printable(self.error)} if self.error else {})


def set_up(quiet: bool, access_log: AccessLog | None) -> None:
    """Set up the logs of a server, the access log among them. quiet: warnings and errors alone."""
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("uvicorn", "jax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if access_log == "off":
        LOGGER.setLevel(logging.CRITICAL)
    elif access_log is not None:
        LOGGER.setLevel(logging.INFO)
    if access_log == "json":
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(JsonLines())
        LOGGER.addHandler(handler)
        LOGGER.propagate = False


def record_of(scope: Scope) -> Record:
    """The record of the request that has this ASGI scope."""
    return scope.setdefault("state", {}).setdefault(_KEY, Record())


def log_request(
    scope: Scope, name: bytes, status: int, seconds: float, trace: str | None = None, *, quiet: bool = False
) -> None:
    """Log the line of a request; the client's text is escaped.

    trace: the request's place in the client's trace, W3C's ``traceparent``. quiet: log at the level DEBUG.
    """
    about = {
        "id": _printable(name.decode("latin-1")),
        "method": scope["method"],
        "path": _printable(scope["path"].encode().decode("latin-1")),
        "status": status,
        "seconds": round(seconds, 3),
        **({"traceparent": trace} if trace else {}),
    }
    _write(about | record_of(scope).fields(), logging.DEBUG if quiet else logging.INFO)


def log_connection(error: str) -> None:
    """Log bytes of a connection that are no HTTP request."""
    _write({"error": error})


def _write(about: JsonObject, level: int = logging.INFO) -> None:
    LOGGER.log(level, "%s", _text(about), extra={"about": about})


def _text(about: JsonObject) -> str:
    line = ""
    if "id" in about:
        line = "{id} {method} {path} {status} {seconds:.3f} s".format_map(about)
    if "prompt_tokens" in about:
        reasons = ", ".join(about["finish_reasons"]) or "unfinished"
        line += ", {prompt_tokens} prompt tokens, {completion_tokens} completion tokens, ".format_map(about)
        line += reasons
    if "traceparent" in about:
        line += ", trace {traceparent}".format_map(about)
    return ": ".join(filter(None, (line, about.get("error"))))


class JsonLines(logging.Formatter):
    """A JSON object per line: the time in UTC, and the facts."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": time, **getattr(record, "about", {"error": record.getMessage()})})


def _printable(text: str) -> str:
    """ASCII: line ends, terminal escapes and zeros become \\x.. codes; quotes stay as they are."""
    return "".join(c if c in "'\"" else ascii(c)[1:-1] for c in text[:_MOST_CHARACTERS])
