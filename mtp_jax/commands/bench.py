"""`mtp-jax bench NAME`: measure, print a table, write JSON with the command and the machine, and a figure."""

import argparse
import itertools
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.commands import benchmarks, show
from mtp_jax.commands.options import forget_compile_cache
from mtp_jax.commands.parser import Parser, Subparsers
from mtp_jax.errors import ConfigError

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


def _place(path: Path, command: str) -> Path:
    """``path``, or the same with a number where that holds the figures of another command."""
    numbered = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if _made_by(p) in (None, command))


def _made_by(path: Path) -> str | None:
    """The command whose figures a file holds; None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["command"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return "unknown"


def _run(args: argparse.Namespace) -> int:
    """Measure, print, write, level by level. Returns the exit status."""
    try:
        return _measure(args)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this benchmark needs {error.name}; install it with: pip install 'mtp-jax[bench]'"
        ) from error


def _measure(args: argparse.Namespace) -> int:
    compile_cache = getattr(args, "compile_cache", None)
    if compile_cache == "none":
        forget_compile_cache()
    from mtp_jax.bench import plot
    from mtp_jax.bench.report import check, environment, table, write
    from mtp_jax.decode.compiled import use_compile_cache

    command = f"mtp-jax {shlex.join(_without_key(args.command))}"
    what = str(args.model or "server").rstrip("/").rpartition("/")[2]
    path = args.json or _place(Path(f"build/bench/{args.name}-{what}.json"), command)
    check(path)
    if args.plotted:
        png = args.png or path.with_suffix(".png")
        check(png)
        plot.check()
    hidden = ("run", "measure", "plotted", "command", "json", "png", "api_key")
    options = {k: v for k, v in vars(args).items() if k not in hidden}
    made_by = {"command": command, "options": options, "environment": environment()}
    if compile_cache not in (None, "none"):
        use_compile_cache(compile_cache)
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
