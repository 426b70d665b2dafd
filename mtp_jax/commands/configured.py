"""Options from a file and from the environment, which replace defaults.

Allowed are the declared options (``mtp_jax/options.py``) without a default of the command line's own, --model
and --quiet. A value of the command line precedes the environment's, which precedes the file's.
"""

import argparse
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mtp_jax.foreign import advice, nearest, value_meant
from mtp_jax.json_object import JsonObject

FLAG = "--config"
_PREFIX = "MTP_JAX_"
# Variables with another meaning: keys add to the keys of the command line, a secret has no flag.
_OTHERS = ("--api-key", "--admin-key", "--secret")
_CLOSE = 0.9
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_ALSO = ("model", "quiet")
_LONGEST = 160  # characters of a text in a message: two lines of a terminal

Refuse = Callable[[str], NoReturn]


def variable(flag: str) -> str:
    """The environment variable of an option: MTP_JAX_MAX_NUM_SEQS for --max-num-seqs."""
    return _PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def configure(
    command: str,
    commands: Collection[str],
    actions: Iterable[argparse.Action],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    refuse: Refuse,
) -> None:
    """Set the defaults of a command's options.

    commands: all that take options from a file. refuse: ends the process with a message.
    """
    options = {flag: a for a in actions if _may(a) for flag in a.option_strings if flag.startswith("--")}
    _warn(environment, [variable(flag) for flag in (*options, *_OTHERS, FLAG)])
    path = _file(arguments) or environment.get(variable(FLAG))
    of_file = _read(path, command, commands, options, refuse) if path else {}
    told = {flag: (f"{flag.removeprefix('--')} in {path}", value) for flag, value in of_file.items()}
    told = _with_variables(told, options, environment)
    words = {word.partition("=")[0] for word in arguments}
    given = {action.dest for flag, action in options.items() if words.intersection(action.option_strings)}
    for flag, (where, value) in told.items():
        if options[flag].dest not in given:
            options[flag].default = _value(options[flag], value, where, refuse)


def _with_variables(
    told: dict[str, tuple[str, Any]], options: Mapping[str, argparse.Action], environment: Mapping[str, str]
) -> dict[str, tuple[str, Any]]:
    """The values that a file tells by flag, and their origins, with the environment's over them."""
    for flag, action in options.items():
        value = environment.get(variable(flag))
        # Kubernetes sets MTP_JAX_PORT for a service of the name mtp-jax.
        if value is not None and flag not in _OTHERS and not value.startswith("tcp://"):
            # A value that the file gives by another flag of the option is overridden.
            told = {f: v for f, v in told.items() if options[f].dest != action.dest}
            told[flag] = f"{variable(flag)} of the environment", value
    return told


def _may(action: argparse.Action) -> bool:
    declared = action.default is argparse.SUPPRESS and action.dest != "help"
    return declared or action.dest in _ALSO


def _warn(environment: Mapping[str, str], known: Sequence[str]) -> None:
    """Warn of environment variables whose names resemble an option's variable."""
    for name in environment:
        if name.startswith(_PREFIX) and name not in known and (close := nearest(name, known, _CLOSE)):
            print(f"warning: {name} is no option's variable; do you mean {close}?", file=sys.stderr)


def _file(arguments: Sequence[str]) -> str | None:
    """The file that the command line names."""
    for i, word in enumerate(arguments):
        if word == FLAG:
            return next(iter(arguments[i + 1 : i + 2]), None)
        if word.startswith(f"{FLAG}="):
            return word.removeprefix(f"{FLAG}=")
    return None


def _read(
    path: str,
    command: str,
    commands: Collection[str],
    options: Mapping[str, argparse.Action],
    refuse: Refuse,
) -> JsonObject:
    """Read values by flag: keys before all tables, and keys in the command's table."""
    try:
        # Where a user has no home folder, ~ stays in the name.
        whole = tomllib.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except OSError as error:
        refuse(f"{FLAG} {path}: {error.strerror}")
    except RecursionError:
        refuse(f"{FLAG} {path} nests too deeply; an option has a value, or a list of values")
    except ValueError as error:  # also of a number with thousands of digits
        refuse(f"{FLAG} {path} is not TOML: {_short(str(error))}")
    for name in (name for name, value in whole.items() if isinstance(value, dict) and name not in commands):
        close = nearest(_short(name), commands)
        hint = f"do you mean [{close}]?" if close else f"there are {', '.join(commands)}"
        refuse(f"{FLAG} {path}: [{_short(name)}] is no command that takes options from a file; {hint}")
    own = whole.get(command, {})
    if not isinstance(own, dict):
        refuse(f"{FLAG} {path}: options of {command} stand in a table, [{command}]; got {type(own).__name__}")
    found: JsonObject = {}
    for key, value in {**{k: v for k, v in whole.items() if not isinstance(v, dict)}, **own}.items():
        flag = f"--{_short(key).replace('_', '-')}"
        if flag not in options:
            hint = advice(flag, options).replace("--", "")
            refuse(f"{FLAG} {path}: {_short(key)} is no option of {command} for a file{hint and f'; {hint}'}")
        if wrong := _unwritable(value):
            refuse(f"{key} in {path}: {wrong}")
        found[flag] = value
    return found


def _unwritable(value: object) -> str | None:
    """The reason why a value cannot be written as a word of the command line, if there is one."""
    try:
        str(value)
    except (ValueError, RecursionError):
        return "got a number of thousands of digits, or lists that nest too deeply"
    items = value if isinstance(value, list) else [value]
    return "got text with a NUL" if any(isinstance(i, str) and "\0" in i for i in items) else None


def _short(text: str) -> str:
    """A text for a message: on one line, without its middle if it is long."""
    text = on_one_line(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


def on_one_line(text: str) -> str:
    """A text with its line ends, and all else that is not printable, escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _value(action: argparse.Action, value: object, where: str, refuse: Refuse) -> object:
    """The value in the form of the command line; the default for a switch that is off."""
    if action.nargs == 0:  # a switch
        text = str(value).lower()
        if text not in _YES + _NO:
            refuse(f"{where} is a switch: expected true or false, got {value!r:.60}")
        return action.const if text in _YES else action.default
    if isinstance(action, argparse._AppendAction):
        items = value if isinstance(value, list) else str(value).split(",")
        return [_one(action, item, where, refuse) for item in items]
    return _one(action, ",".join(map(str, value)) if isinstance(value, list) else value, where, refuse)


def _one(action: argparse.Action, value: object, where: str, refuse: Refuse) -> object:
    if isinstance(value, bool | dict):
        refuse(f"{where}: got {value!r:.60}; write it as on the command line, as text or a number")
    convert: Any = action.type or str
    try:
        found = convert(str(value))
    except argparse.ArgumentTypeError as error:
        refuse(f"{where}: {_short(str(error))}")
    except (TypeError, ValueError):
        refuse(f"{where}: {value!r:.60} is not a number")
    if action.choices is not None and found not in action.choices:
        close = value_meant(str(found), list(action.choices))
        hint = f"do you mean {close}?" if close else f"choose from {', '.join(map(str, action.choices))}"
        refuse(f"{where} is {value!r:.60}; {hint}")
    return found
