"""`mtp-jax compile`: all programs of a server, in a folder that `--programs` names."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.api.demo import demo_model
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Reporter
from mtp_jax.commands import show
from mtp_jax.commands.options import add_engine, engine_options, llm_options, reporter
from mtp_jax.commands.parser import Subparsers
from mtp_jax.errors import ConfigError, amount

if TYPE_CHECKING:
    from mtp_jax.decode.kept import KeptPrograms

DEVICES = ("h200", "v5e", "v6e")
"""Devices that need not be here: a GPU, and generations of TPUs."""

_DESCRIPTION = """\
Compile all programs that a server with these options needs, and put them into a folder. `mtp-jax serve
--programs DIR` loads them instead of compiling, as do generate, batch, chat and LLM(programs=...). They fit
this version of mtp-jax and jax, this kind of device and these options alone; anything else is refused by its
name. An interrupted call goes on where it was; programs of other options that lie there are deleted at the
end."""


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a server's programs into a folder",
        description=_DESCRIPTION,
        usage="%(prog)s [MODEL] --out DIR [options of serve]",
    )
    parser.add_argument(
        "--device",
        "--gpu",
        choices=DEVICES,
        help="compile for a GPU or a TPU that is not here, from config.json alone; needs the extra "
        "gpu-compile or tpu (default: for this computer's devices)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder")
    add_engine(parser, without=("programs",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile. Returns the exit status."""
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out {args.out} is a file; name a folder, which need not be there")
    from mtp_jax.commands.server_options import SLOTS  # of a package that another module may hide

    report = reporter(args)
    before = time.process_time()
    made = _absent(args, report, SLOTS) if args.device else _present(args, report, SLOTS)
    if not args.quiet:
        size = sum((args.out / name).stat().st_size for name in made.used)
        show.note(
            f"{amount(len(made.used), 'program')}, {size / 1e6:,.1f} MB; {made.compiled} compiled in "
            f"{time.process_time() - before:,.0f} CPU s, {made.loaded} found there"
        )
    show.write(f"{args.out}\n")
    return 0


def _present(args: argparse.Namespace, report: Reporter, slots: int) -> "KeptPrograms":
    options = llm_options(args, report, slots)
    from mtp_jax.api.build import build_programs

    return build_programs(LLMOptions(args.model, **options), args.out, report)


def _absent(args: argparse.Namespace, report: Reporter, slots: int) -> "KeptPrograms":
    found = engine_options(args, slots)
    with report.phase("import jax"):
        from mtp_jax.api.build_absent import build_absent, devices

    mesh = devices(args.device, *found.pop("mesh", (1, 1)))
    return build_absent(LLMOptions(args.model or demo_model(), **found), mesh, args.out, report)
