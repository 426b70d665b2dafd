"""argparse with one-line errors, and the types that options have."""

import argparse
import math
from typing import Any, NoReturn, Protocol


class Parser(argparse.ArgumentParser):
    """Options are written out in full, and an error is one line that says where they are listed."""

    def __init__(self, **options: Any) -> None:
        options["allow_abbrev"] = False
        super().__init__(**options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, Any]:
        """A subcommand refuses what it does not know itself: its own help says what there is."""
        known, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return known, others

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


class Subparsers(Protocol):
    """What declares a subcommand."""

    def add_parser(self, name: str, *, help: str, **options: Any) -> Parser:
        """The parser of a new subcommand; ``help`` is its line in the list of all."""
        ...


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model of a measurement: MODEL, or --model DIR."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="directory (default: the demo model)",
    )
    either.add_argument("--model", default="demo", metavar="DIR", help="the same; demo: the demo model")


def positive(text: str) -> int:
    """An integer of 1 or more: "3"."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def positive_number(text: str) -> float:
    """A number above 0: "0.5"."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def integers(text: str) -> list[int]:
    """Token ids: "1,2,3"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers; write 1,2,3") from None


def words(text: str) -> list[str]:
    """What stands between commas."""
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


def rates(text: str) -> tuple[float, ...]:
    """Probabilities by position: "0.86,0.7"."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(0 <= rate <= 1 for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 to 1; write 0.86,0.7")
    return found
