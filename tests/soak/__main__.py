"""``python -m tests.soak``, or ``make soak``: status 1 if the server shows a fault."""

import argparse
import shlex
import sys
from pathlib import Path

from mtp_jax.commands.parser import positive_number
from mtp_jax.lab.bench.report import environment, write
from tests.soak import run

_FEW_PAGES = ["--max-model-len", "252", "--page-size", "16", "--num-pages", "24"]


def main(argv: list[str]) -> int:
    """Soak a server, print the table, write the figures. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=run.__doc__)
    parser.add_argument("--model", default="demo", metavar="DIR", help="directory (default: the demo model)")
    parser.add_argument("--minutes", type=positive_number, default=10.0, metavar="M")
    parser.add_argument("--rate", type=positive_number, default=3.0, metavar="R", help="requests per second")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests")
    parser.add_argument("--json", type=Path, default=Path("build/soak.json"), metavar="FILE")
    options = f"of mtp-jax serve (default: {shlex.join(_FEW_PAGES)})"
    parser.add_argument("--serve-options", type=shlex.split, default=_FEW_PAGES, metavar="TEXT", help=options)
    args = parser.parse_args(argv)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    report = run.run(args.model, args.minutes, args.rate, args.seed, args.serve_options)
    write(report, args.json, {"command": shlex.join(argv), "environment": environment()})
    print(report.text())
    return 1 if report.figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
