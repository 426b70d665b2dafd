"""`mtp-jax bench NAME`: measure, print a table, write JSON with the command and the machine, and a figure."""

import argparse
import itertools
import json
import math
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.api.demo import DEMO
from mtp_jax.api.options import LLMOptions
from mtp_jax.commands import show
from mtp_jax.commands.options import add_options, forget_compile_cache
from mtp_jax.commands.parser import (
    Parser,
    Subparsers,
    acceptance,
    add_model,
    add_value,
    counts,
    integers,
    numbers,
    positive,
    positive_number,
    rates,
    share,
)
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.options import declared

if TYPE_CHECKING:
    from mtp_jax.lab.bench.report import Report

Arguments = argparse.Namespace
# A measurement: yields the report so far after every level; the last report is complete.
Reports = Iterator["Report"]

_DESCRIPTION = """\
Measure something, print a table, and write JSON with the exact command, versions, machine and load. Variants
are compared in alternating runs. Nothing else should run meanwhile (docs/benchmarks.md)."""
_CONCURRENCY = [1, 2, 4, 8, 16, 32, 64]
_RATES = [1.0, 2.0, 4.0]
_LONGEST_NAME = 100  # characters of a subject in a file's name; file systems allow 255 bytes in all
_numbers = numbers(math.isfinite)
_rates = numbers(lambda rate: rate > 0, " above 0", "0.5,2,inf")


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand and its own subcommands."""
    parser = subparsers.add_parser("bench", help="measure speed and acceptance", description=_DESCRIPTION)
    names: Subparsers = parser.add_subparsers(metavar="NAME", required=True)

    def command(
        name: str, measure: Callable[[Arguments], Reports], help: str, *, plotted: bool = False
    ) -> Parser:
        sub = names.add_parser(name, help=help, description=help)
        sub.add_argument(
            "--json", type=Path, metavar="FILE", help="where to write (default: build/bench/NAME-MODEL.json)"
        )
        if plotted:
            sub.add_argument("--png", type=Path, metavar="FILE", help="default: the JSON file's name")
        if name not in ("serve", "gpu"):  # a server has its own model, and a GPU is measured without any
            add_model(sub, "directory (default: the demo model)", str, DEMO)
        sub.set_defaults(run=_run, measure=measure, name=name, plotted=plotted)
        return sub

    sub = command("depth", _depth, "decode speed against the number of drafts per step", plotted=True)
    add_value(sub, "--depths", [0, 1, 2, 3, 4, 5], "drafts per step to compare", integers, "K,...")
    add_value(
        sub, "--temperature", [0.0, 1.0], "to measure; 0: greedy, and tokens are compared", _numbers, "T,..."
    )
    _add_prompts(sub, 64)
    _add_acceptance(sub)
    _add_load_format(sub)
    _add_draft_vocab(sub)
    _add_compile_cache(sub)

    sub = command("sweep", _sweep, "throughput and latency at 1 to 64 requests at a time", plotted=True)
    add_value(sub, "--concurrency", _CONCURRENCY, "requests at a time", integers, "N,...")
    modes = "of MTP; control: off once more, which shows the noise"
    add_value(sub, "--modes", ["off", "fixed", "adaptive"], modes, lambda text: text.split(","), "MODE,...")
    add_value(sub, "--depth", 3, "drafts per step; adaptive: at most", int, "K")
    sub.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="per run (default: 4 per concurrent one, at least 16)",
    )
    _add_lengths(sub)
    add_value(sub, "--temperature", 0.0, "0: greedy, and tokens are compared", float, "T")
    add_value(sub, "--rounds", 3, "measured runs of every mode", positive, "N")
    _add_acceptance(sub).add_argument(
        "--simulate-acceptance",
        type=rates,
        metavar="P,...",
        help="the same by the probability of each draft, given that those before it are kept; the last one "
        "holds for all further drafts",
    )
    _add_load_format(sub)
    _add_compile_cache(sub)

    sub = command("acceptance", _acceptance, "how many drafts are accepted on held-out text")
    add_value(sub, "--temperatures", [0.0, 0.7, 1.0], "to sample at, 0 is greedy", _numbers, "T,...")
    add_value(sub, "--depth", 3, "drafts per step", int, "K")
    _add_prompts(sub, 64)
    add_value(sub, "--samples", 4, "completions to quote", int, "N")
    add_value(sub, "--pieces", 64, "pieces of held-out text to measure bits per byte on", positive, "N")
    _add_draft_vocab(sub)
    _add_compile_cache(sub)

    sub = command("questions", _questions, "how many drafts are accepted in answers, by kind of question")
    add_value(sub, "--temperatures", [0.0, 0.7], "to sample at, 0 is greedy", _numbers, "T,...")
    add_value(sub, "--depth", 3, "drafts per step", int, "K")
    add_value(sub, "--max-tokens", 128, "tokens to generate for each", positive, "N")
    sub.add_argument("--draft-model", type=Path, metavar="DIR", help="a head (default: the model's own)")
    _add_compile_cache(sub)

    sub = command("window", _window, "what a wider window costs, in time and in bytes")
    add_value(sub, "--windows", [1, 2, 4, 8], "tokens of a row that are verified at once", counts, "N,...")
    add_value(sub, "--rounds", 40, "calls per window", positive, "N")
    add_value(sub, "--depth", 3, "drafts per step of the end-to-end comparison", int, "K")
    add_value(sub, "--prompts", 8, "prompts of that", positive, "N")
    add_value(sub, "--max-tokens", 64, "tokens to generate for each", positive, "N")
    _add_load_format(sub)
    _add_compile_cache(sub)

    sub = command("vocabulary", _vocabulary, "how much of a text the commonest tokens are")
    help = "texts in UTF-8, such as the model's own answers (default: of the demo model, its training text)"
    sub.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help=help)
    help = "tokens to list (default: a quarter of the vocabulary)"
    sub.add_argument("--count", type=positive, metavar="N", help=help)
    help = "write the list of the commonest: MODEL/draft_vocab.json makes drafts choose among them"
    sub.add_argument("--list", type=Path, metavar="FILE", help=help)

    _register_gpu(command("gpu", _gpu, "whole steps on one GPU, with random weights of a large model"))
    _register_serve(command("serve", _serve, "load on a server that runs, with OpenAI's API", plotted=True))


def _register_gpu(sub: Parser) -> None:
    from mtp_jax.lab.bench.shapes import NAMED

    shapes = f"a directory with config.json, or the file, or one of {', '.join(NAMED)}"
    add_model(sub, shapes)
    add_value(sub, "--depths", [0, 1, 2, 3], "drafts per step, a level each", integers, "K,...")
    add_value(sub, "--slots", [1], "slots, each number with every depth", counts, "N,...")
    help = "cached rows of each slot (default: 4096, or the most that the model has positions for)"
    sub.add_argument("--rows", type=positive, metavar="N", help=help)
    help = "layers of the trunk to keep (default: the shape's)"
    sub.add_argument("--layers", type=positive, metavar="N", help=help)
    add_value(sub, "--steps", 200, "steps to time at each level", positive, "N")
    can = "run the program that can sample, as a server does"
    sub.add_argument("--sampled", action="store_true", help=can)
    spent = "print the kernels of each level, and the launches of a layer in order"
    sub.add_argument("--trace", action="store_true", help=spent)
    _add_acceptance(sub)
    among = "tokens that drafts choose among (default: the whole vocabulary)"
    sub.add_argument("--draft-vocab", type=positive, metavar="N", help=among)
    dry = "without a GPU: count bytes, and lower every program for CUDA; nothing runs"
    sub.add_argument("--dry-run", action="store_true", help=dry)
    _add_compile_cache(sub)


def _register_serve(sub: Parser) -> None:
    """The server's key comes from the environment, as the command stands in the written file."""
    sub.add_argument("url", metavar="URL", help="of the server; its key: OPENAI_API_KEY of the environment")
    sub.add_argument("--model", metavar="NAME", help="as the server names it (default: its first)")
    api = "route to ask (default: chat for prompts of a file, completions for random ones)"
    sub.add_argument("--api", choices=("completions", "chat"), help=api)
    loop = sub.add_mutually_exclusive_group()
    rates = "open loop: requests per second, one after the other; inf: at once (default: 1,2,4)"
    loop.add_argument("--rates", type=_rates, metavar="R,...", help=rates)
    closed = "closed loop: requests at a time; each is sent when another is answered"
    loop.add_argument("--concurrency", type=counts, metavar="N,...", help=closed)
    sub.add_argument(
        "--arrivals",
        choices=("poisson", "fixed"),
        help="gaps between requests of an open loop: random, or equal (default: poisson)",
    )
    add_value(sub, "--requests", 100, "per rate, or per number of requests at a time", positive, "N")
    add_value(sub, "--seed", 0, "of arrivals and prompts", int, "N")
    prompts = sub.add_mutually_exclusive_group()
    prompts.add_argument(
        "--sharegpt", type=Path, metavar="FILE", help="prompts from a JSON file like ShareGPT's"
    )
    prompts.add_argument(
        "--speed-bench", type=Path, metavar="FILE", help="prompts from a JSONL file like SPEED-Bench's"
    )
    prompts.add_argument(
        "--vocabulary",
        type=positive,
        metavar="V",
        help="random prompts: of token ids below V instead of words",
    )
    only = "of --speed-bench, the prompts of this category alone, such as coding"
    sub.add_argument("--category", metavar="NAME", help=only)
    add_value(sub, "--prompt-tokens", 256, "token ids or words of random prompts", positive, "N")
    add_value(
        sub, "--spread", 0.0, "random lengths are uniform within this share of it, from 0 to 1", share, "S"
    )
    add_value(sub, "--max-tokens", 128, "of an answer", positive, "N")
    add_value(sub, "--temperature", 0.0, "0: greedy", float, "T")
    ignore = "answers have --max-tokens tokens; not every server knows the field"
    sub.add_argument("--ignore-eos", action="store_true", help=ignore)
    extra = """more fields of every request, as JSON: '{"top_p": 0.9}'"""
    sub.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help=extra)
    add_value(
        sub, "--timeout", 600.0, "seconds without data after which a request has failed", positive_number, "S"
    )


def _add_prompts(sub: Parser, prompts: int) -> None:
    add_value(sub, "--prompts", prompts, "how many prompts", positive, "N")
    _add_lengths(sub)


def _add_lengths(sub: Parser) -> None:
    add_value(sub, "--prompt-tokens", 64, "tokens of every prompt", positive, "N")
    add_value(sub, "--max-tokens", 128, "tokens to generate for each", positive, "N")


def _add_acceptance(sub: Parser) -> "argparse._MutuallyExclusiveGroup":
    """Forced acceptance; returns the group of it, for other ways to say it."""
    about, either = declared(LLMOptions)["synthetic_acceptance"], sub.add_mutually_exclusive_group()
    either.add_argument("--synthetic-acceptance", type=acceptance, metavar=about.metavar, help=about.help)
    return either


def _add_load_format(sub: Parser) -> None:
    """Declare --load-format, for measurements that need no sensible text."""
    add_options(sub, LLMOptions, ("load_format",))
    sub.set_defaults(load_format=LLMOptions.load_format)


def _add_draft_vocab(sub: Parser) -> None:
    """Declare --draft-vocab, of which every number is measured."""
    help = "how many of the commonest tokens drafts choose among, 0: all (default: as the model's list says)"
    sub.add_argument("--draft-vocab", type=integers, default=[], metavar="N,...", help=help)


def _add_compile_cache(sub: Parser) -> None:
    """Declare --compile-cache, for measurements that compile in this process."""
    folder = "~/.cache/mtp-jax/xla"
    help = f"folder of compiled programs, or none (default: {folder})"
    sub.add_argument("--compile-cache", default=folder, metavar="DIR", help=help)


def _depth(a: Arguments) -> Reports:
    from mtp_jax.lab.bench import depth, subject

    model = subject.load(a.model, any(a.depths), a.load_format)
    load = depth.DepthLoad(
        a.depths,
        a.temperature,
        a.prompts,
        a.prompt_tokens,
        a.max_tokens,
        a.synthetic_acceptance,
        a.draft_vocab,
    )
    yield depth.run(model, load)


def _sweep(a: Arguments) -> Reports:
    from mtp_jax.lab.bench import subject, sweep

    unknown = [m for m in a.modes if m not in sweep.MODES]
    if unknown:
        raise ConfigError(f"--modes {unknown[0]}; expected some of {','.join(sweep.MODES)}")
    drafting = set(a.modes) - {"off", "control"}
    forced = a.synthetic_acceptance
    if given := a.simulate_acceptance:
        forced = tuple(itertools.accumulate([*given, *given[-1:] * a.depth][: a.depth], operator.mul))
    load = sweep.SweepLoad(
        a.concurrency, a.depth, a.requests, a.prompt_tokens, a.max_tokens, a.temperature, a.rounds
    )
    yield from sweep.run(subject.load(a.model, bool(drafting), a.load_format), a.modes, load, forced)


def _acceptance(a: Arguments) -> Reports:
    from mtp_jax.lab.bench import acceptance

    load = acceptance.AcceptanceLoad(
        a.temperatures, a.depth, a.prompts, a.prompt_tokens, a.max_tokens, a.samples, a.pieces, a.draft_vocab
    )
    yield acceptance.run(a.model, load)


def _questions(a: Arguments) -> Reports:
    from mtp_jax.lab.bench import questions

    yield questions.run(a.model, questions.QuestionLoad(a.temperatures, a.depth, a.max_tokens, a.draft_model))


def _window(a: Arguments) -> Reports:
    from mtp_jax.lab.bench import subject, window

    yield window.run(
        subject.load(a.model, True, a.load_format),
        a.windows,
        a.rounds,
        a.depth,
        a.prompts,
        a.max_tokens,
    )


def _vocabulary(a: Arguments) -> Reports:
    from mtp_jax.lab.bench import vocabulary

    yield vocabulary.run(a.model, a.text, a.count, a.list)


def _gpu(a: Arguments) -> Reports:
    from mtp_jax.lab.bench import gpu, shapes

    if a.model is None:
        raise ConfigError(f"name a directory with config.json, or one of {', '.join(shapes.NAMED)}")
    name, cfg = shapes.find(a.model, a.layers, not any(a.depths))
    acceptance = gpu.ACCEPTANCE if a.synthetic_acceptance is None else a.synthetic_acceptance
    load = gpu.StepLoad(a.depths, a.slots, a.rows, acceptance, a.steps, a.sampled, a.draft_vocab)
    if a.dry_run:
        yield from gpu.dry_run(name, cfg, load)
        return
    reports = gpu.run(name, cfg, load, a.trace)
    if gpu.platform() == "cpu":
        show.note("no GPU is here: these are times of the CPU; --dry-run tells of a GPU without one")
    yield from reports


def _serve(a: Arguments) -> Reports:
    from mtp_jax.lab.bench import served, traffic

    if a.category and not a.speed_bench:
        raise ConfigError("--category has no effect without --speed-bench FILE; add it, or leave it out")
    if a.concurrency and a.arrivals:
        raise ConfigError(
            f"--arrivals {a.arrivals} has no effect beside --concurrency: a request is sent when another "
            "is answered; leave one of them out"
        )
    levels = a.concurrency or a.rates or _RATES
    if a.sharegpt:
        prompts = traffic.sharegpt(a.sharegpt)
    elif a.speed_bench:
        prompts = traffic.speed_bench(a.speed_bench, a.category)
    else:
        count = a.requests * len(levels)
        prompts = traffic.random_prompts(count, a.prompt_tokens, a.spread, a.vocabulary, a.seed)
    api = a.api or ("chat" if a.sharegpt or a.speed_bench else "completions")
    fields = {"max_tokens": a.max_tokens, "temperature": a.temperature}
    fields |= {"ignore_eos": True} if a.ignore_eos else {}
    arrivals = None if a.concurrency else a.arrivals or "poisson"
    load = served.ServerLoad(levels, a.requests, arrivals, a.seed, a.timeout)
    yield from served.run(a.url, api, a.model, fields | a.extra_body, prompts, load)


def _object(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"""{text!r:.80} is not a JSON object; write '{{"top_p": 0.9}}'""")
    return found


def _free(path: Path, command: str) -> Path:
    """``path``, or ``path`` with a number if that file has the figures of another command."""
    numbered = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if _made_by(p) in (None, command))


def _made_by(path: Path) -> str | None:
    """The command whose figures a file holds; None where there is no file that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["command"]
    except OSError:
        return None
    except (ValueError, LookupError, TypeError, RecursionError):
        return "unknown"


def _run(args: Arguments) -> int:
    """Measure, print, write, level by level. Returns the exit status."""
    try:
        return _measure(args)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this benchmark needs {error.name}; install it with: pip install {error.name}"
        ) from error


def _note_rows(report: "Report", first: int) -> None:
    """Show rows of a table that is not complete."""
    for row in report.rows[first:]:
        show.note(", ".join(f"{name} {cell}" for name, cell in zip(report.headers, row, strict=True)))


def _subject(args: Arguments) -> str:
    """The name of the model, or of the endpoint, as part of a file's name."""
    model = args.model
    if isinstance(model, Path) and model.is_file():  # a config.json is named as its directory
        model = model.absolute().parent
    name = str(getattr(args, "url", None) or model).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]", "-", name)[:_LONGEST_NAME]


def _measure(args: Arguments) -> int:
    compile_cache = getattr(args, "compile_cache", None)
    if compile_cache == "none":
        forget_compile_cache()
    from mtp_jax.api.compile_cache import use_compile_cache
    from mtp_jax.lab.bench import plot
    from mtp_jax.lab.bench.report import check, environment, write

    command = f"mtp-jax {shlex.join(args.command)}"
    path = args.json or _free(Path(f"build/bench/{args.name}-{_subject(args)}.json"), command)
    check(path)
    png = None
    if args.plotted and plot.can_draw():
        png = args.png or path.with_suffix(".png")
        check(png)
    elif args.plotted and args.png is not None:
        raise ConfigError("--png needs matplotlib: pip install matplotlib; or leave it out")
    # A level's rate may be infinite, which is no number of JSON.
    hidden = ("run", "measure", "plotted", "command", "json", "png", "rates")
    options: JsonObject = {k: v for k, v in vars(args).items() if k not in hidden}
    made_by = {"command": command, "options": options, "environment": environment()}
    if compile_cache not in (None, "none"):
        use_compile_cache(compile_cache)
    shown, failed = 0, False
    for report in args.measure(args):
        write(report, path, made_by)
        if png is not None:
            plot.draw(report, png, made_by)
        if report.pending:  # the table comes at the end
            _note_rows(report, shown)
            shown = len(report.rows)
        failed = bool(report.faults)
    written = ", ".join(map(str, filter(None, (path, png))))
    show.write(f"{report.text()}\n\n{command} -> {written}\n")
    if args.plotted and png is None:
        show.note("no figure, as matplotlib is missing: pip install matplotlib")
    return int(failed)
