"""Options in the words of the command line: flags in the place of names in Python."""

import logging
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

_OWN = __name__.partition(".")[0]
_SWITCHED = re.compile(r"\b([a-z_]+) ?= ?(True|False)\b")
# Not in a path, a quotation or code, nor with a value that no flag has.
_NAME = re.compile(
    r"(?<![\w/.'\"`-])([a-z]+(?:_[a-z]+)+)(?![\w/\"`(=-]|'(?!s\b)|\.\w| = (?:None|True|False)\b)( = )?"
)


def with_flags(
    message: str, flags: Mapping[str, str], switches: Mapping[tuple[str, str], str] = MappingProxyType({})
) -> str:
    """A message in the words of the command line: flags for ``page_size = 0`` and ``num_pages``.

    A name of one word stands for an option only where a value follows it. flags: flags of the options that
    have values, by name. switches: flags of the other options, by name and value.
    """

    def flag(match: re.Match[str]) -> str:
        known = flags.get(match[1])
        return match[0] if known is None or match[2] == "None" else f"{known} {match[2]}".rstrip()

    message = re.sub(r"\b([a-z_]+)=(\w*)", flag, message)
    told = re.sub(r"\b([a-z_]+) = (\S+)(?=; expected )", flag, message)
    told = told if told == message else told.replace(" or None", "")
    told = _SWITCHED.sub(lambda match: switches.get((match[1], match[2]), match[0]), told)
    return names_as_flags(told, flags)


def names_as_flags(text: str, flags: Mapping[str, str]) -> str:
    """A text with flags in the place of names of several words. flags: by name."""

    def named(match: re.Match[str]) -> str:
        known = flags.get(match[1])
        return match[0] if known is None else known + (" " if match[2] else "")

    return _NAME.sub(named, text)


def log_in_flags(flags: Callable[[], Mapping[str, str]]) -> None:
    """Have lines of the log name flags from now on. flags: returns them by name, once a line is written."""
    make = logging.getLogRecordFactory()

    def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith(_OWN):
            record.msg, record.args = names_as_flags(record.getMessage(), flags()), ()
        return record

    logging.setLogRecordFactory(made)
