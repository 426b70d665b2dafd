"""Decode speed against the number of drafts per step, greedy and sampled: one request at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from mtp_jax.decode.law import Acceptance
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench.acceptance import repeated
from mtp_jax.lab.bench.report import Report, forced
from mtp_jax.lab.bench.subject import EqualPrompts, Subject, prompts_for
from mtp_jax.lab.bench.synthetic import complete
from mtp_jax.spread import Spread

_Chosen = TypeVar("_Chosen")


class _Level(NamedTuple):
    """A number of drafts per step, and the tokens that they choose among, as the option ``draft_vocab``."""

    depth: int
    draft_vocab: int | None


@dataclass(frozen=True)
class Decode:
    """Results of one depth over all prompts.

    Attributes:
        seconds: time of each prompt, from the first token to the last.
        tokens: number of tokens decoded in that time, all prompts together.
        speculation: counts of all prompts.
        texts: output ids per prompt.
    """

    seconds: list[float]
    tokens: int
    speculation: Speculation
    texts: list[list[int]]

    @property
    def rate(self) -> float:
        """Decoded tokens per second, prefill not counted."""
        return self.tokens / sum(self.seconds)


def decode_alternating(
    engines: dict[_Chosen, Engine], prompts: EqualPrompts, max_tokens: int, temperature: float = 0.0
) -> dict[_Chosen, Decode]:
    """Decode every prompt with every engine before the next prompt, the engines in rotating order.

    The first prompt also runs once before, so that no measured run is an engine's first.
    """
    runs: dict[_Chosen, list[Request]] = {key: [] for key in engines}
    order = list(engines)
    for engine in engines.values():
        complete(engine, prompts.ids[:1], max_tokens, temperature)
    for i, prompt in enumerate(prompts.ids):
        for key in order[i % len(order) :] + order[: i % len(order)]:
            runs[key] += complete(engines[key], [prompt], max_tokens, temperature)
    return {key: _decode(requests) for key, requests in runs.items()}


def _decode(requests: list[Request]) -> Decode:
    seconds = []
    for r in requests:
        assert r.progress.first_token_at is not None
        assert r.progress.finished_at is not None
        seconds.append(r.progress.finished_at - r.progress.first_token_at)
    return Decode(
        seconds,
        sum(len(r.progress.output) - 1 for r in requests),
        sum((r.progress.speculation for r in requests), Speculation()),
        [r.progress.output for r in requests],
    )


def speedup(plain: Decode, other: Decode) -> Spread:
    """The time of ``plain`` over the time of ``other``, for each prompt."""
    return Spread.of([a / b for a, b in zip(plain.seconds, other.seconds, strict=True)])


@dataclass(frozen=True)
class DepthLoad:
    """The completions that are timed: every prompt at every temperature and depth, and at depth 0.

    Attributes:
        depths: numbers of drafts per step.
        prompts: number of prompts.
        prompt_tokens: number of tokens of each prompt.
        max_tokens: number of tokens of each completion.
        synthetic_acceptance: the law of depths above 0, as the option of ``LLM``.
        draft_vocab: numbers of tokens that drafts choose among, each of them measured at every depth; 0: all;
            none: the model's own list.
    """

    depths: Sequence[int]
    temperatures: Sequence[float]
    prompts: int
    prompt_tokens: int
    max_tokens: int
    synthetic_acceptance: Acceptance | None = None
    draft_vocab: Sequence[int] = ()


def run(subject: Subject, load: DepthLoad) -> Report:
    """Decode the same prompts at each temperature and depth, each depth against depth 0 of its temperature.

    Raises ConfigError or RequestError for sizes and temperatures out of range.
    """
    depths, temperatures = sorted({0, *load.depths}), list(dict.fromkeys(load.temperatures))
    prompts, prompt_tokens, max_tokens = load.prompts, load.prompt_tokens, load.max_tokens
    if max_tokens < 2:
        raise ConfigError(f"max_tokens = {max_tokens}; expected at least 2: the first comes from the prefill")
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # refuses a bad temperature before the measurement
    given = prompts_for(subject, prompts, prompt_tokens)
    length, asked, sizes = prompt_tokens + max_tokens, load.synthetic_acceptance, load.draft_vocab
    engines = {
        level: subject.engine(
            level.depth, 1, length, synthetic_acceptance=asked, draft_vocab=level.draft_vocab
        )
        for level in _levels(depths, sizes)
    }
    plain = _Level(0, None)
    figures = []
    for temperature in temperatures:
        measured = decode_alternating(engines, given, max_tokens, temperature)
        figures += [
            _figures(temperature, level.depth, _drafted(engines[level]), decode, measured[plain])
            for level, decode in measured.items()
        ]
    notes = [
        f"{prompts} prompts of {prompt_tokens} tokens ({given.source}), {max_tokens} tokens each, batch 1; "
        "time from the first token to the last. Temperature 0 is greedy. Tokens/s: of all prompts together; "
        "per prompt: the time at depth 0 over that at this depth, both at the temperature of the row."
    ]
    title = f"Decode speed by depth: {subject.name}"
    laws = {f"at depth {k.depth} {e.config.law}": None for k, e in engines.items() if e.config.law}
    if laws:
        figures = [f | {"same_tokens": None} for f in figures]
    report = Report(title, _HEADERS, [_row(f) for f in figures], notes, {"depths": figures})
    return subject.marked(forced(report, "; ".join(laws)) if laws else report)


_HEADERS = (
    "temperature",
    "depth",
    "drafted tokens",
    "tokens/s",
    "of depth 0",
    "per prompt, median (quartiles)",
    "acceptance length",
    "ms/step",
    "repeated",
    "same tokens",
)


def _levels(depths: Sequence[int], sizes: Sequence[int]) -> list[_Level]:
    """Every depth with every number of tokens; depth 0 once."""
    return [_Level(d, n) for d in depths for n in (sizes if d and sizes else [None])]


def _drafted(engine: Engine) -> int:
    """Tokens that an engine's drafts choose among."""
    tokens = engine.config.draft_vocab
    return len(tokens) if tokens else engine.cfg.vocab_size


def _figures(temperature: float, depth: int, among: int, decode: Decode, plain: Decode) -> JsonObject:
    """Results of one depth.

    among: number of tokens that drafts choose among. plain: depth 0 at the same temperature.
    """
    spec = decode.speculation
    return {
        "temperature": temperature,
        "depth": depth,
        "draft_vocab": among if depth else None,
        "tokens_per_second": decode.rate,
        "of_depth_0": decode.rate / plain.rate,
        "acceptance_length": spec.acceptance_length,
        "acceptance_per_position": [n / spec.steps for n in spec.accepted_per_position],
        "speedup": speedup(plain, decode),
        "step_seconds": sum(decode.seconds) / spec.steps,
        "same_tokens": decode.texts == plain.texts if temperature == 0 else None,
        "repeated": sum(map(repeated, decode.texts)) / len(decode.texts),
        "seconds": decode.seconds,
    }


def _row(f: JsonObject) -> tuple[object, ...]:
    return (
        f"{f['temperature']:g}",
        f["depth"],
        f"{f['draft_vocab']:,}" if f["depth"] else "-",
        f"{f['tokens_per_second']:.1f}",
        f"{f['of_depth_0']:.2f}",
        f["speedup"].show(),
        f"{f['acceptance_length']:.3f}",
        f"{f['step_seconds'] * 1e3:.2f}",
        f"{f['repeated']:.0%}",
        {True: "yes", False: "NO", None: "sampled" if f["temperature"] else "-"}[f["same_tokens"]],
    )
