"""`python -m mtp_jax.bench NAME`: measure, print a table, write JSON with the command and the machine."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from mtp_jax.bench import acceptance, depth, host, startup, window
from mtp_jax.bench.report import Report, environment, write
from mtp_jax.bench.subject import DEMO, load
from mtp_jax.decode.compiled import use_compile_cache
from mtp_jax.errors import MtpJaxError

Arguments = argparse.Namespace


def _depth(a: Arguments) -> Report:
    return depth.run(load(a.model), a.depths, a.temperature, a.prompts, a.prompt_tokens, a.max_tokens)


def _acceptance(a: Arguments) -> Report:
    return acceptance.run(
        a.model, a.temperatures, a.depth, a.prompts, a.prompt_tokens, a.max_tokens, a.samples
    )


def _window(a: Arguments) -> Report:
    return window.run(load(a.model), a.windows, a.rounds, a.depth, a.prompts, a.max_tokens)


def _host(a: Arguments) -> Report:
    return host.run(load(a.model), a.batch, a.depth, a.steps, a.rounds)


def _startup(a: Arguments) -> Report:
    return startup.run(a.model, a.repeats, a.prompt, a.max_tokens)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mtp_jax.bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)

    def command(name: str, run: Callable[[Arguments], Report], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.add_argument("--model", default=DEMO, help="model directory, or demo")
        sub.add_argument("--json", metavar="FILE", help="default: build/bench/NAME-MODEL.json")
        sub.add_argument(
            "--compile-cache", default="~/.cache/mtp-jax/xla", help="folder of compiled programs, or none"
        )
        sub.set_defaults(run=run)
        return sub

    sub = command("depth", _depth, "decode speed against the number of drafts per step")
    sub.add_argument("--depths", type=_integers, default=[0, 1, 2, 3, 4, 5])
    sub.add_argument("--temperature", type=float, default=0.0, help="0: greedy, and tokens are compared")
    sub.add_argument("--prompts", type=int, default=64)
    sub.add_argument("--prompt-tokens", type=int, default=64)
    sub.add_argument("--max-tokens", type=int, default=128)

    sub = command("acceptance", _acceptance, "how many drafts come true on held-out text")
    sub.add_argument("--temperatures", type=_numbers, default=[0.0, 0.7, 1.0])
    sub.add_argument("--depth", type=int, default=3)
    sub.add_argument("--prompts", type=int, default=64)
    sub.add_argument("--prompt-tokens", type=int, default=64)
    sub.add_argument("--max-tokens", type=int, default=128)
    sub.add_argument("--samples", type=int, default=4, help="completions to quote")

    sub = command("window", _window, "what a wider window costs, in time and in bytes")
    sub.add_argument("--windows", type=_integers, default=[1, 2, 4, 8])
    sub.add_argument("--rounds", type=int, default=40, help="calls per window")
    sub.add_argument("--depth", type=int, default=3, help="of the end-to-end comparison")
    sub.add_argument("--prompts", type=int, default=8)
    sub.add_argument("--max-tokens", type=int, default=64)

    sub = command("host", _host, "host time per step that the device does not hide")
    sub.add_argument("--batch", type=int, default=8)
    sub.add_argument("--depth", type=int, default=3)
    sub.add_argument("--steps", type=int, default=24, help="steps per round")
    sub.add_argument("--rounds", type=int, default=6)

    sub = command("startup", _startup, "from starting the process to the first text")
    sub.add_argument("--repeats", type=int, default=3)
    sub.add_argument("--prompt", default="def fibonacci(n):")
    sub.add_argument("--max-tokens", type=int, default=32)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one measurement; 0 on success, 1 with a message on an error the user can fix."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(given)
    command = f"python -m mtp_jax.bench {shlex.join(given)}"
    options = {k: v for k, v in vars(args).items() if k not in ("run", "json")}
    made_by = {"command": command, "options": options, "environment": environment()}
    model = args.model.rstrip("/").rpartition("/")[2]
    try:
        if args.compile_cache != "none":
            use_compile_cache(args.compile_cache)
        report = args.run(args)
    except MtpJaxError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    path = args.json or f"build/bench/{args.name}-{model}.json"
    write(report, path, made_by)
    print(f"{report.text()}\n\n{command} -> {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
