"""The command line: `mtp-jax generate`, `chat`, `info`, ... Errors are one line on standard error.

Exit status: 0 success, 1 a comparison that failed, 2 an error the user can mend, 130 after Ctrl-C, 141 when
the reader of the output has closed it.
"""

import argparse
import io
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from mtp_jax.api.model_folder import head_folder, model_folder
from mtp_jax.commands import chat, checkpoints, compile, completion, generate, server
from mtp_jax.commands.flags import log_in_flags
from mtp_jax.commands.options import in_flags, random_weights, reporter
from mtp_jax.commands.parser import Parser, Subparsers
from mtp_jax.errors import ConfigError, MtpJaxError
from mtp_jax.hub import is_name
from mtp_jax.model.hf_config import is_gguf

_BATCH, _SERVE = server.commands()
_COMMANDS = (generate, _BATCH, chat, _SERVE, compile, checkpoints)
_GROUP = "mtp_jax.commands"
"""Entry points of installed packages: modules that ``register`` commands, or options of commands."""
INTERRUPTED = 130
_OUT_OF_MEMORY = (
    "out of device memory; lower --max-num-seqs, --max-model-len or --num-pages, or give --mesh more devices"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    argv: arguments without the program's name; None: the arguments of the process.
    """
    _fill_in_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model's text need not fit the terminal's encoding
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are refused as such
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        if sys.stderr.isatty():  # where ^C is on the line
            print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The unwritten buffer must not fail again when Python closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (MtpJaxError, OSError) as error:
        print(f"error: {in_flags(error, _actions())}", file=sys.stderr)
        return 2
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # jax has no narrower class for it
            raise
        print(f"error: {_OUT_OF_MEMORY}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2


def entry() -> NoReturn:
    """The process `mtp-jax`: it ends with the status of ``main``."""
    log_in_flags(_flags)
    status = main()
    if status == INTERRUPTED:
        os._exit(status)  # Python would first wait for threads that compile, which cannot be interrupted
    sys.exit(status)


def _fill_in_streams() -> None:
    """Open an empty stream for each standard stream that is closed, so that no other file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as the process lives


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = make_parser().parse_args(argv)
    except SystemExit as stop:  # help has been printed, or an error
        return int(stop.code or 0)
    args.command = list(sys.argv[1:] if argv is None else argv)
    if "weights" in args:
        find_folders(args)
    return args.run(args)


def find_folders(args: argparse.Namespace) -> None:
    """Replace the names of models, as on a hub or of GGUF files, by their folders."""
    revision, report = vars(args).pop("revision", None), reporter(args)
    if args.model is not None and is_name(args.model):
        args.hub_name = str(args.model)
    elif revision is not None:
        raise ConfigError("--revision is of a model of a hub, named as org/name; leave it out")
    weights = args.weights and "simulate" not in args and not random_weights(args)
    model, head = args.model, getattr(args, "draft_model", None)  # paths, or their texts
    if model is not None and (is_name(model) or is_gguf(Path(model))):
        args.model = type(model)(model_folder(Path(model), report, revision, weights=weights))
    if head is not None and is_name(head):
        # The headers of its files say its sizes.
        args.draft_model = type(head)(head_folder(Path(head), report))


def make_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="mtp-jax", description="DeepSeek-V3 models that draft with their own MTP layer, in JAX."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands: Subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (*_COMMANDS, *_others()):
        command.register(commands)
    version = commands.add_parser("version", help="print versions")
    version.set_defaults(run=_print_version)
    completion.register(commands, parser)
    for command in commands.choices.values():
        command.siblings = commands.choices
    return parser


def _others() -> Iterator[server.Command]:
    """Commands of other rooms and packages. A package that cannot be imported costs its commands alone."""
    for entry in sorted(metadata.entry_points(group=_GROUP), key=lambda entry: entry.name):
        try:
            yield entry.load()
        except (ImportError, AttributeError) as error:
            print(f"warning: {entry.name} ({entry.value}) is no command here: {error}", file=sys.stderr)


def _actions() -> list[argparse.Action]:
    """The arguments of all commands."""
    commands: Any = next(a.choices for a in make_parser()._actions if isinstance(a.choices, dict))
    return [a for parser in commands.values() for a in parser._actions]


@cache
def _flags() -> Mapping[str, str]:
    """Flags of all commands by the names of their options."""
    commands: Any = next(a.choices for a in make_parser()._actions if isinstance(a.choices, dict))
    return {name: flag for parser in commands.values() for name, flag in parser.flags.items()}


def _print_version(args: object) -> int:
    del args
    print(_version())
    return 0


def _version() -> str:
    def of(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "(not installed)"

    return f"mtp-jax {of('mtp-jax')}, jax {of('jax')}, Python {platform.python_version()}"


if __name__ == "__main__":
    entry()
