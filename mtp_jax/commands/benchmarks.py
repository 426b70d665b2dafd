"""The benchmarks of `mtp-jax bench`: the options of each, and the measurement they are for."""

import argparse
import math
import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from mtp_jax.commands.parser import Parser, counts, integers, positive, positive_number
from mtp_jax.errors import ConfigError

if TYPE_CHECKING:
    from mtp_jax.bench.report import Report

    # The report so far after every level; the last one is whole.
    Reports = Iterator[Report]
    Measurement = Callable[[argparse.Namespace], Reports]

Arguments = argparse.Namespace

_LEVELS = [1, 2, 4, 8, 16, 32, 64]


class Command(Protocol):
    """How a benchmark is declared."""

    def __call__(
        self, name: str, measure: "Measurement", help: str, *, on_model: bool = False, plotted: bool = False
    ) -> Parser:
        """A subcommand, to which its own options are added.

        on_model: it takes --model and --compile-cache. plotted: its figures are drawn, too.
        """
        ...


def declare(command: Command) -> None:
    """Declare every benchmark."""
    _declare_load(command)
    _declare_serve(command)
    _declare_overhead(command)
    _declare_soak(command)
    _declare_burst(command)
    _declare_depth(command)
    _declare_acceptance(command)
    _declare_window(command)
    _declare_host(command)
    _declare_startup(command)


def _declare_load(command: Command) -> None:
    for name, levels, help in (
        ("offline", [8], "throughput and latency of the Python engine, with and without MTP"),
        ("sweep", _LEVELS, "the same from 1 to 64 requests at a time"),
    ):
        sub = command(name, _load, help, on_model=True, plotted=True)
        sub.add_argument("--concurrency", type=integers, default=levels, help="requests at a time")
        sub.add_argument(
            "--modes",
            type=_names,
            default=["off", "fixed", "adaptive"],
            help="of MTP; control: off once more, which shows how far noise goes",
        )
        sub.add_argument("--depth", type=int, default=3, help="drafts per step; adaptive: at most")
        sub.add_argument(
            "--requests", type=positive, help="per run (default: 4 per concurrent one, at least 16)"
        )
        sub.add_argument("--prompt-tokens", type=positive, default=64)
        sub.add_argument("--max-tokens", type=positive, default=128)
        sub.add_argument("--temperature", type=float, default=0.0, help="0: greedy, and tokens are compared")
        sub.add_argument("--rounds", type=positive, default=3, help="measured runs of every mode")
        sub.add_argument(
            "--simulate-acceptance",
            type=_numbers,
            metavar="P,...",
            help="keep drafts at random with these probabilities by position, NOT as the model says; every "
            "output is labelled so",
        )


def _load(a: Arguments) -> "Reports":
    from mtp_jax.bench import load
    from mtp_jax.bench.simulate import Simulated
    from mtp_jax.bench.subject import load as load_model

    unknown = [m for m in a.modes if m not in load.MODES]
    if unknown:
        raise ConfigError(f"--modes {unknown[0]}; expected some of {','.join(load.MODES)}")
    drafting = set(a.modes) - {"off", "control"}
    simulated = Simulated(tuple(a.simulate_acceptance)) if a.simulate_acceptance is not None else None
    given = load.Load(
        a.concurrency, a.depth, a.requests, a.prompt_tokens, a.max_tokens, a.temperature, a.rounds
    )
    yield from load.run(load_model(a.model, drafts=bool(drafting)), a.modes, given, simulated)


def _declare_serve(command: Command) -> None:
    sub = command("serve", _serve, "throughput and latency of an OpenAI-compatible server", plotted=True)
    sub.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="without /v1")
    sub.add_argument("--api-key", metavar="KEY", help="if the server wants one")
    sub.add_argument("--model", metavar="NAME", help="its name on the server (default: the first)")
    sub.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    sub.add_argument("--concurrency", type=integers, default=[], help="requests at a time, closed loop")
    sub.add_argument(
        "--rate", type=_numbers, default=[], metavar="R,...", help="requests/s, Poisson arrivals"
    )
    sub.add_argument(
        "--requests", type=positive, help="per run (default: 4 per concurrent one, 10 s of arrivals)"
    )
    sub.add_argument("--prompt-characters", type=positive, default=256)
    sub.add_argument("--max-tokens", type=positive, default=128)
    sub.add_argument("--temperature", type=float, default=0.0)
    sub.add_argument("--rounds", type=positive, default=3, help="measured runs at every level")
    sub.add_argument("--compare", action="store_true", help="beside every run one without speculation")


def _serve(a: Arguments) -> "Reports":
    from mtp_jax.bench import serve
    from mtp_jax.bench.client import Target

    target = Target(a.base_url, a.model or "", a.chat, a.max_tokens, a.temperature)
    load = serve.Load(a.concurrency, a.rate, a.requests, a.prompt_characters, a.rounds, a.compare)
    yield serve.run(target, a.api_key, load)


def _declare_overhead(command: Command) -> None:
    sub = command("overhead", _overhead, "what AsyncLLM and HTTP cost over the Python engine", on_model=True)
    sub.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    sub.add_argument("--depth", type=int, default=3, help="drafts per step")
    sub.add_argument("--requests", type=int, default=32, help="per round")
    sub.add_argument("--prompt-characters", type=int, default=128, help="tokens, if it has no tokenizer")
    sub.add_argument("--max-tokens", type=int, default=96)
    sub.add_argument("--rounds", type=int, default=5, help="measured rounds of every way")


def _overhead(a: Arguments) -> "Reports":
    from functools import partial

    from mtp_jax.api.llm import LLM
    from mtp_jax.bench import overhead
    from mtp_jax.bench.subject import DEMO
    from serve.run import served

    model = None if a.model == DEMO else a.model
    load = overhead.Load(a.concurrency, a.depth, a.requests, a.prompt_characters, a.max_tokens, a.rounds)
    yield overhead.run(a.model, partial(LLM, model, compile_cache=None), served, load)


def _declare_soak(command: Command) -> None:
    sub = command("soak", _soak, "random traffic against a server of its own; status 1 if it shows a fault")
    sub.add_argument("--model", default="demo", metavar="DIR", help="model directory, or demo")
    sub.add_argument("--minutes", type=positive_number, default=10.0)
    sub.add_argument("--rate", type=positive_number, default=3.0, help="requests per second")
    sub.add_argument("--seed", type=int, default=0)
    few_pages = ["--max-model-len", "252", "--page-size", "16", "--num-pages", "24"]
    sub.add_argument("--serve-options", type=shlex.split, default=few_pages, help="of mtp-jax serve")


def _soak(a: Arguments) -> "Reports":
    from mtp_jax.bench import soak

    yield soak.run(a.model, a.minutes, a.rate, a.seed, a.serve_options)


def _declare_burst(command: Command) -> None:
    sub = command("burst", _burst, "how soon a full queue refuses; status 1 if it takes more than 100 ms")
    sub.add_argument("--model", default="demo", metavar="DIR", help="model directory, or demo")
    sub.add_argument("--queue", type=int, default=16, help="most waiting requests of the server")
    sub.add_argument("--times", type=int, default=50, help="requests of a burst, per place in the queue")
    sub.add_argument("--bursts", type=int, default=5)
    sub.add_argument("--max-tokens", type=int, default=16)
    sub.add_argument("--serve-options", type=shlex.split, default=["--max-model-len", "256"])


def _burst(a: Arguments) -> "Reports":
    from mtp_jax.bench import burst

    yield burst.run(a.model, a.queue, a.times, a.bursts, a.max_tokens, a.serve_options)


def _declare_depth(command: Command) -> None:
    sub = command(
        "depth", _depth, "decode speed against the number of drafts per step", on_model=True, plotted=True
    )
    sub.add_argument("--depths", type=integers, default=[0, 1, 2, 3, 4, 5])
    sub.add_argument("--temperature", type=float, default=0.0, help="0: greedy, and tokens are compared")
    sub.add_argument("--prompts", type=positive, default=64)
    sub.add_argument("--prompt-tokens", type=positive, default=64)
    sub.add_argument("--max-tokens", type=positive, default=128)


def _depth(a: Arguments) -> "Reports":
    from mtp_jax.bench import depth, subject

    model = subject.load(a.model, drafts=any(a.depths))
    yield depth.run(model, a.depths, a.temperature, a.prompts, a.prompt_tokens, a.max_tokens)


def _declare_acceptance(command: Command) -> None:
    sub = command("acceptance", _acceptance, "how many drafts come true on held-out text", on_model=True)
    sub.add_argument("--temperatures", type=_numbers, default=[0.0, 0.7, 1.0])
    sub.add_argument("--depth", type=int, default=3)
    sub.add_argument("--prompts", type=positive, default=64)
    sub.add_argument("--prompt-tokens", type=positive, default=64)
    sub.add_argument("--max-tokens", type=positive, default=128)
    sub.add_argument("--samples", type=int, default=4, help="completions to quote")


def _acceptance(a: Arguments) -> "Reports":
    from mtp_jax.bench import acceptance

    yield acceptance.run(
        a.model, a.temperatures, a.depth, a.prompts, a.prompt_tokens, a.max_tokens, a.samples
    )


def _declare_window(command: Command) -> None:
    sub = command("window", _window, "what a wider window costs, in time and in bytes", on_model=True)
    sub.add_argument("--windows", type=counts, default=[1, 2, 4, 8])
    sub.add_argument("--rounds", type=positive, default=40, help="calls per window")
    sub.add_argument("--depth", type=int, default=3, help="of the end-to-end comparison")
    sub.add_argument("--prompts", type=positive, default=8)
    sub.add_argument("--max-tokens", type=positive, default=64)


def _window(a: Arguments) -> "Reports":
    from mtp_jax.bench import subject, window

    yield window.run(subject.load(a.model), a.windows, a.rounds, a.depth, a.prompts, a.max_tokens)


def _declare_host(command: Command) -> None:
    sub = command("host", _host, "host time per step that the device does not hide", on_model=True)
    sub.add_argument("--batch", type=positive, default=8)
    sub.add_argument("--depth", type=int, default=3)
    sub.add_argument("--steps", type=positive, default=24, help="steps per round")
    sub.add_argument("--rounds", type=positive, default=6)


def _host(a: Arguments) -> "Reports":
    from mtp_jax.bench import host, subject

    yield host.run(subject.load(a.model, drafts=a.depth > 0), a.batch, a.depth, a.steps, a.rounds)


def _declare_startup(command: Command) -> None:
    sub = command("startup", _startup, "from starting the process to the first text")
    sub.add_argument("--model", default="demo", metavar="DIR", help="model directory, or demo")
    sub.add_argument("--repeats", type=positive, default=3)
    sub.add_argument("--prompt", default="def fibonacci(n):")
    sub.add_argument("--max-tokens", type=positive, default=32)


def _startup(a: Arguments) -> "Reports":
    from mtp_jax.bench import startup

    yield startup.run(a.model, a.repeats, a.prompt, a.max_tokens)


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers; write 0.8,0.7")
    return numbers
