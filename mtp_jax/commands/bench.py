"""`mtp-jax bench NAME`: measure, print a table, write JSON with the command and the machine, and a figure."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.commands import benchmarks, show
from mtp_jax.commands.parser import Parser, Subparsers

if TYPE_CHECKING:
    from mtp_jax.commands.benchmarks import Measurement

_DESCRIPTION = """\
Measure something, print a table, and write JSON with the exact command, versions, machine and load. Variants
are compared in alternating runs. Nothing else should run meanwhile (docs/benchmarks.md)."""


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand and its own ones."""
    parser = subparsers.add_parser("bench", help="measure speed and acceptance", description=_DESCRIPTION)
    names: Subparsers = parser.add_subparsers(metavar="NAME", required=True)

    def command(
        name: str, measure: "Measurement", help: str, *, on_model: bool = False, plotted: bool = False
    ) -> Parser:
        sub = names.add_parser(name, help=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.add_argument("--json", type=Path, metavar="FILE", help="instead of build/bench/NAME-WHAT.json")
        if plotted:
            sub.add_argument("--png", type=Path, metavar="FILE", help="instead of the name of the JSON file")
        if on_model:
            sub.add_argument("--model", default="demo", metavar="DIR", help="model directory, or demo")
            sub.add_argument(
                "--compile-cache", default="~/.cache/mtp-jax/xla", help="folder of compiled programs, or none"
            )
        sub.set_defaults(run=_run, measure=measure, name=name, plotted=plotted)
        return sub

    benchmarks.declare(command)


def _without_key(words: Sequence[str]) -> list[str]:
    """The command line as it may be shown and kept: without the value of --api-key."""
    shown: list[str] = []
    for word in words:
        secret = shown[-1:] == ["--api-key"]
        shown.append("***" if secret else re.sub("^--api-key=.*", "--api-key=***", word, flags=re.DOTALL))
    return shown


def _run(args: argparse.Namespace) -> int:
    """Measure, print, write, level by level. Returns the exit status."""
    from mtp_jax.bench import plot
    from mtp_jax.bench.report import check, environment, table, write
    from mtp_jax.decode.compiled import use_compile_cache

    what = str(args.model or "server").rstrip("/").rpartition("/")[2]
    path = args.json or Path(f"build/bench/{args.name}-{what}.json")
    check(path)
    if args.plotted:
        png = args.png or path.with_suffix(".png")
        check(png)
        plot.check()
    command = f"mtp-jax {shlex.join(_without_key(args.command))}"
    hidden = ("run", "measure", "plotted", "command", "json", "png", "api_key")
    options = {k: v for k, v in vars(args).items() if k not in hidden}
    made_by = {"command": command, "options": options, "environment": environment()}
    if getattr(args, "compile_cache", "none") != "none":
        use_compile_cache(args.compile_cache)
    shown = 0
    for report in args.measure(args):
        write(report, path, made_by)
        if args.plotted:
            plot.draw(report, png)
        if report.pending:
            show.note(table(report.headers, report.rows[shown:]))
            shown = len(report.rows)
    written = [path, *([png] if args.plotted else [])]
    show.write(f"{report.text()}\n\n{command} -> {', '.join(map(str, written))}\n")
    return 1 if report.figures.get("faults") else 0
