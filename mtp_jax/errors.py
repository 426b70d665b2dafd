"""Errors a user can cause, and words for messages.

Messages say the fault, the value got, the allowed values, and the change.
"""

from collections.abc import Iterable, Sequence

_NAMES_SHOWN = 12  # names in a message: a few lines of a terminal, which show the pattern
_LONGEST_STEP = 40  # characters of a key in the path of a part of a schema
_LONGEST_SHOWN = 200  # characters of a name: releases have 100 at most


class MtpJaxError(Exception):
    """Base class: the command line prints its message without a traceback."""


class ConfigError(MtpJaxError, ValueError):
    """A model or engine configuration that cannot work."""


class CheckpointError(MtpJaxError, ValueError):
    """A checkpoint directory that is damaged, incomplete or of an unsupported kind."""


class RequestError(MtpJaxError, ValueError):
    """A prompt or sampling option that cannot be served."""


class SchemaError(RequestError):
    """A JSON schema with a part that no output can be held to.

    Attributes:
        place: the path of the part within the schema.
        keyword: the keyword of that part; empty: the whole part.
        why: text to follow the keyword.
        tool: the tool whose parameters the schema describes; None where it describes the output.
    """

    def __init__(self, place: Sequence[str], keyword: str, why: str, tool: str | None = None) -> None:
        self.place, self.keyword, self.why, self.tool = tuple(place), keyword, why, tool
        super().__init__(self.at("the schema" if tool is None else f"the tool {tool!r}: parameters"))

    def at(self, root: str) -> str:
        """The message where the schema stands at this path of a request."""
        fault = f"{self.keyword} {self.why}".lstrip()
        return f"{self.path(root)}: {fault}; leave it out, or give the schema without strict"

    def path(self, root: str) -> str:
        """The path of the part in a request that has the schema at this path."""
        return ".".join((root, *(step[:_LONGEST_STEP] for step in self.place)))


class PromptTooLong(RequestError):
    """A prompt that leaves no room for an answer.

    Agents know the error by its words, and then shorten their conversation: by Anthropic's "prompt is too
    long: ... tokens > ... maximum", from which Claude Code takes both numbers, and by OpenAI's and vLLM's
    "This model's maximum context length is".
    """

    def __init__(self, tokens: int | str, most: int, change: str) -> None:
        """tokens: number of the prompt's tokens. most: number that a prompt may have. change: advice."""
        super().__init__(
            f"prompt is too long: {tokens} tokens > {most} maximum. This model's maximum context length is "
            f"{most + 1} tokens, one of them for an answer; {change}"
        )


class Overloaded(MtpJaxError):
    """Nothing more can be taken now.

    Attributes:
        retry_after: seconds after which to try again.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStopped(MtpJaxError):
    """The engine has failed, is shutting down, or has not been started in this event loop: it takes no
    requests."""


def shown(name: str) -> str:
    """A name in a file as messages have it: not longer than any that a release has."""
    return name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..."


def amount(count: int, noun: str) -> str:
    """A count and its noun, given in the singular: "1 request", "2,000 requests"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shortlist(names: Iterable[str]) -> str:
    """Names for an error message: the first dozen, none too long, and the number of further names."""
    names = list(names)
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(shown, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
