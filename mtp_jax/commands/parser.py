"""argparse with one-line errors, and the types that options have."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from mtp_jax.api.demo import path_of
from mtp_jax.commands.configured import FLAG, configure, on_one_line
from mtp_jax.foreign import advice, value_meant
from mtp_jax.json_object import JsonObject

_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_CHOICE = re.compile(r"invalid choice: '?(.*?)'? \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser that takes unabbreviated options only, and whose error is one line with the likely meaning.

    Attributes:
        configurable: whether options may come from a file and from the environment, too.
        model_first: whether --model DIR may replace the first argument.
        siblings: the parsers of all commands by name, which may have options that this command has not.
    """

    def __init__(self, **options: Any) -> None:
        options["allow_abbrev"] = False
        super().__init__(**options)
        self.configurable = self.model_first = False
        self.siblings: Mapping[str, Parser] = {}

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """A subcommand itself refuses unknown options, as its own help lists its options."""
        arguments = list(sys.argv[1:] if args is None else args)
        if self.configurable:
            name = self.prog.split()[-1]
            commands = {name, *(n for n, other in self.siblings.items() if other.configurable)}
            configure(name, sorted(commands), self._actions, arguments, os.environ, self.error)
        if self.model_first:
            arguments = _with_model_first(arguments)
        known, others = super().parse_known_args(arguments, namespace)
        if others:
            hint = self._hint(next((word for word in others if word.startswith("-")), ""))
            self.error(f"unrecognized arguments: {' '.join(others)}{hint and f'; {hint}'}")
        return known, others

    def _hint(self, unknown: str) -> str:
        """A phrase with the option to write instead; "" where nothing is known."""
        flag = unknown.partition("=")[0]
        has = [name for name, other in self.siblings.items() if flag in other._option_string_actions]
        return advice(flag, self._option_string_actions, has) if flag else ""

    def add_config(self) -> None:
        """Declare --config, and read options from the environment, too."""
        self.configurable = True
        self.add_argument(
            FLAG,
            metavar="FILE",
            help="options from a TOML file, such as max-num-seqs = 4; MTP_JAX_MAX_NUM_SEQS=4 in the "
            "environment goes before it, and this command line before both",
        )

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        found = _CHOICE.search(message)
        if found and (close := value_meant(found[1], found[2].replace("'", "").split(", "))):
            message = f"{message[: found.start()]}there is no {found[1]!r}; do you mean {close}?"
        self.exit(2, f"error: {on_one_line(message)}; see `{self.prog} --help`\n")


def _with_model_first(arguments: list[str]) -> list[str]:
    for i, word in enumerate(arguments):
        if word == "--model" and arguments[i + 1 : i + 2]:
            return [arguments[i + 1], *arguments[:i], *arguments[i + 2 :]]
        if word.startswith("--model="):
            return [word.removeprefix("--model="), *arguments[:i], *arguments[i + 1 :]]
    return arguments


class Subparsers(Protocol):
    """A function that declares a subcommand."""

    @property
    def choices(self) -> Mapping[str, Parser]:
        """The parsers by name."""
        ...

    def add_parser(self, name: str, *, help: str, **options: Any) -> Parser:
        """The parser of a new subcommand; ``help`` is its line in the list of all."""
        ...


def add_model(
    parser: argparse.ArgumentParser, help: str, kind: Callable[[str], object] = path_of, default: Any = None
) -> None:
    """The model of a command: MODEL, or --model DIR. ``cli.py`` finds its folder."""
    add_revision(parser)
    either = parser.add_mutually_exclusive_group()
    # The first argument has no default, which would overwrite a value of --model. Textual defaults are
    # converted.
    left_out = argparse.SUPPRESS
    either.add_argument(
        "model",
        nargs="?",
        type=lambda text: text if text is left_out else kind(text),
        default=left_out,
        metavar="MODEL",
        help=help,
    )
    same = "the same; demo: the demo model"
    either.add_argument("--model", type=kind, default=default, metavar="DIR", help=same)


def add_revision(parser: argparse.ArgumentParser) -> None:
    """Declare the option of a hub's model. The command reads weights unless it sets ``weights`` to False."""
    help = "branch, tag or commit of a model of a hub (default: main)"
    parser.add_argument("--revision", metavar="REV", default=argparse.SUPPRESS, help=help)
    parser.set_defaults(weights=True)


def integer(text: str) -> int:
    """An integer: "4096", "4k" for 4,000 and "4K" for 4,096, as vLLM reads them, or "1e5"."""
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        return int(number) * unit
    except ValueError:
        pass
    try:
        found = float(number) * unit
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or found != int(found):
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not an integer; write 4096, 4K, 4k for 4000, or 1e5"
        )
    return int(found)


def positive(text: str) -> int:
    """An integer of 1 or more: "3"."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def add_value(
    to: argparse._ActionsContainer,
    flag: str,
    default: float | str | Sequence[float | str] | None,
    help: str,
    kind: Callable[[str], object],
    metavar: str,
) -> None:
    """Declare an option; the help has its default, if there is one, as it is written on the command line."""
    if default is not None:
        values = default if isinstance(default, list | tuple) else [default]
        shown = ",".join(value if isinstance(value, str) else f"{value:g}" for value in values)
        help = f"{help} (default: {shown})"
    to.add_argument(flag, type=kind, default=default, metavar=metavar, help=help)


def number(fits: Callable[[float], bool], bounds: str = "") -> Callable[[str], float]:
    """The type of an option that is a number; bounds: in words, such as " above 0"."""

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not fits(found):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number{bounds}")
        return found

    return parse


def numbers(
    fits: Callable[[float], bool], bounds: str = "", example: str = "0.8,0.7"
) -> Callable[[str], tuple[float, ...]]:
    """The type of an option that is a list of numbers; see ``number``."""

    def parse(text: str) -> tuple[float, ...]:
        try:
            found = tuple(float(part) for part in text.split(","))
        except ValueError:
            found = (math.nan,)
        if not all(map(fits, found)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers{bounds}; write {example}")
        return found

    return parse


positive_number = number(lambda n: 0 < n < math.inf, " above 0")
share = number(lambda n: 0 <= n <= 1, " from 0 to 1")
rates = numbers(lambda n: 0 <= n <= 1, " from 0 to 1", "0.86,0.7")


def integers(text: str) -> list[int]:
    """Token ids: "1,2,3"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers; write 1,2,3") from None


def words(text: str) -> list[str]:
    """Parts between commas."""
    return text.split(",")


def counts(text: str) -> list[int]:
    """Integers of 1 or more: "1,2,4"."""
    return [positive(part) for part in text.split(",")]


def mesh_shape(text: str) -> tuple[int, int]:
    """A mesh of devices, data x model: "2x4"."""
    try:
        data, model = (int(part) for part in text.lower().split("x"))
    except ValueError:
        data = model = 0
    if data < 1 or model < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not DATAxMODEL; write 2x4 for eight devices")
    return data, model


def biases(text: str) -> dict[int, float]:
    """Logit biases by token id: "17:2.5,4:-100"."""
    try:
        return {int(token): float(bias) for token, bias in (part.split(":") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:BIAS,...; write 17:2.5,4:-100") from None


def variables(text: str) -> JsonObject:
    """Variables by name, as a JSON object: '{"enable_thinking": false}'."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a JSON object; write '{{\"enable_thinking\": false}}'"
        )
    return found


def acceptance(text: str) -> float | str | tuple[float, ...]:
    """A length "2.99", shares "0.8,0.6,0.4", or a golden length's name "glm-5.2"."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text
    return found if "," in text else found[0]


def draft_vocab(text: str) -> int | Path:
    """A number of tokens, or a file with a list of tokens."""
    try:
        return integer(text)
    except (ValueError, argparse.ArgumentTypeError):
        return Path(text)
