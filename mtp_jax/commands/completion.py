"""`mtp-jax completion SHELL`: a script that completes commands, options and their values."""

import argparse

from mtp_jax.commands import show
from mtp_jax.commands.parser import Parser, Subparsers
from mtp_jax.errors import ConfigError

_SHELLS = ("bash", "zsh", "tcsh")
_DESCRIPTION = """\
Print a script that completes commands, options and their values in a shell; shtab makes it (pip install
shtab). Bash reads it from ~/.local/share/bash-completion/completions/mtp-jax, zsh from _mtp-jax in a folder
of $fpath."""


def register(subparsers: Subparsers, root: Parser) -> None:
    """Declare the subcommand; ``root``: the parser of the whole command line."""
    parser = subparsers.add_parser("completion", help="complete in a shell", description=_DESCRIPTION)
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    parser.set_defaults(run=run, root=root)


def run(args: argparse.Namespace) -> int:
    """Print the script. Returns the exit status. Raises ConfigError without shtab."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("completion needs shtab: pip install shtab") from error
    show.write(shtab.complete(_completed(args.root), shell=args.shell) + "\n")
    return 0


def _completed(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, with options marked that take a file or a folder."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _completed(each)
        elif action.metavar in ("DIR", "MODEL", "OUT"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in ("FILE", "PNG", "IN"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
