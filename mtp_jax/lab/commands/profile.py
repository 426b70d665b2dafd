"""`mtp-jax profile`: the time of a step, by part."""

import argparse
from pathlib import Path

from mtp_jax.api.demo import DEMO
from mtp_jax.commands import show
from mtp_jax.commands.parser import Subparsers, add_model, positive
from mtp_jax.errors import ConfigError

_DESCRIPTION = """\
Keep an engine in one phase, time its steps, trace them, and write a folder: report.md with the time by named
scope, trace/ for xprof, perfetto.json.gz, hlo/ with every program, cost.json, memory.json, compiles.jsonl."""


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("profile", help="trace steps of one phase", description=_DESCRIPTION)
    add = parser.add_argument
    add("--phase", required=True, choices=("prefill", "decode", "verify", "mixed"), help="what the steps do")
    add_model(parser, "directory (default: the demo model)", str, DEMO)
    add("--batch", type=positive, metavar="N", help="slots (default: 8); prefill has one prompt at a time")
    add("--input-len", type=positive, default=128, metavar="N", help="tokens of every prompt (default: 128)")
    add("--steps", type=positive, default=10, metavar="N", help="steps to time, and to trace (default: 10)")
    add("--depth", type=int, metavar="K", help="drafts per step (default: 3); decode has none")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--out", type=Path, required=True, metavar="DIR", help="where to write")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Profile and print the report. Returns the exit status."""
    from mtp_jax.lab.bench.subject import load
    from mtp_jax.lab.profiling.run import Options, profile

    batch = _given(args, "batch", "prefill", among_others=8, there=1)
    depth = _given(args, "depth", "decode", among_others=3, there=0)
    options = Options(args.phase, batch, args.input_len, args.steps, depth, args.temperature)
    result = profile(load(args.model, drafts=depth > 0), options, args.out)
    show.write(f"{result.text()}\nwritten to {args.out}\n")
    return 0


def _given(args: argparse.Namespace, name: str, phase: str, among_others: int, there: int) -> int:
    """Raises ConfigError for an option that the chosen phase does not use."""
    value: int | None = getattr(args, name)
    if args.phase != phase:
        return among_others if value is None else value
    if value not in (None, there):
        raise ConfigError(f"--{name} {value} has no effect with --phase {phase}; leave it out")
    return there
