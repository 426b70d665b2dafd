"""The commands that need the package ``serve``. They refuse to run if another module hides it.

With `python -m mtp_jax` Python looks for modules in the working folder first, else in PYTHONPATH first.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import mtp_jax
from mtp_jax.commands.parser import Subparsers
from mtp_jax.errors import ConfigError

_OWN = Path(mtp_jax.__file__).parents[1] / "serve" / "__init__.py"


class Command(Protocol):
    """A subcommand."""

    def register(self, subparsers: Subparsers) -> None:
        """Declare the subcommand."""
        ...


def commands() -> tuple[Command, Command]:
    """`batch` and `serve`. Does not execute another module of the name ``serve``."""
    other = hidden_by()
    if other is not None:
        return _Refused("batch", other), _Refused("serve", other)
    from mtp_jax.commands import batch, serve

    return batch, serve


def hidden_by() -> str | None:
    """The file that `import serve` would execute instead of ours; None: the file is ours, or absent."""
    spec = find_spec("serve")
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == _OWN.resolve():
        return None
    return spec.origin


class _Refused:
    def __init__(self, name: str, other: str) -> None:
        self._name, self._other = name, other

    def register(self, subparsers: Subparsers) -> None:
        # prefix_chars="\0": nothing parses as an option, so every command line reaches ``_refuse``.
        parser = subparsers.add_parser(
            self._name, help=f"not here: hidden by {self._other}", prefix_chars="\0", add_help=False
        )
        parser.add_argument("rest", nargs="*")
        parser.set_defaults(run=self._refuse)

    def _refuse(self, args: argparse.Namespace) -> int:
        """Raises ConfigError."""
        del args
        raise ConfigError(
            f"`import serve` finds {self._other} instead of mtp-jax's own package, {_OWN.parent}; rename "
            "that file, or run the command from another folder and without it in PYTHONPATH"
        )
