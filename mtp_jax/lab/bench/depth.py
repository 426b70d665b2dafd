"""Decode speed against the number of drafts per step, greedy and sampled: one request at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    engines: dict[int, Engine], prompts: EqualPrompts, max_tokens: int, temperature: float = 0.0
) -> dict[int, Decode]:
    """Decode every prompt at every depth before the next prompt, the depths in rotating order.

    The first prompt also runs once before, so that no measured run is an engine's first.
    """
    runs: dict[int, list[Request]] = {depth: [] for depth in engines}
    order = list(engines)
    for engine in engines.values():
        complete(engine, prompts.ids[:1], max_tokens, temperature)
    for i, prompt in enumerate(prompts.ids):
        for depth in order[i % len(order) :] + order[: i % len(order)]:
            runs[depth] += complete(engines[depth], [prompt], max_tokens, temperature)
    return {depth: _decode(requests) for depth, requests in runs.items()}


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


def run(
    subject: Subject,
    depths: Sequence[int],
    temperatures: Sequence[float],
    prompts: int,
    prompt_tokens: int,
    max_tokens: int,
    synthetic_acceptance: Acceptance | None = None,
) -> Report:
    """Decode the same prompts at each temperature and depth, each depth against depth 0 of its temperature.

    Depth 0 is always measured. synthetic_acceptance: of depths above 0, as the option of ``LLM``. Raises
    ConfigError or RequestError for sizes and temperatures out of range.
    """
    depths, temperatures = sorted({0, *depths}), list(dict.fromkeys(temperatures))
    if max_tokens < 2:
        raise ConfigError(f"max_tokens = {max_tokens}; expected at least 2: the first comes from the prefill")
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # refuses a bad temperature before the measurement
    given = prompts_for(subject, prompts, prompt_tokens)
    length, asked = prompt_tokens + max_tokens, synthetic_acceptance
    engines = {d: subject.engine(d, 1, length, synthetic_acceptance=asked) for d in depths}
    figures = []
    for temperature in temperatures:
        measured = decode_alternating(engines, given, max_tokens, temperature)
        figures += [_figures(temperature, d, decode, measured[0]) for d, decode in measured.items()]
    notes = [
        f"{prompts} prompts of {prompt_tokens} tokens ({given.source}), {max_tokens} tokens each, batch 1; "
        "time from the first token to the last. Temperature 0 is greedy. Tokens/s: of all prompts together; "
        "per prompt: the time at depth 0 over that at this depth, both at the temperature of the row."
    ]
    title = f"Decode speed by depth: {subject.name}"
    laws = [f"at depth {d} {e.config.law}" for d, e in engines.items() if e.config.law]
    if laws:
        figures = [f | {"same_tokens": None} for f in figures]
    report = Report(title, _HEADERS, [_row(f) for f in figures], notes, {"depths": figures})
    return forced(report, "; ".join(laws)) if laws else report


_HEADERS = (
    "temperature",
    "depth",
    "tokens/s",
    "of depth 0",
    "per prompt, median (quartiles)",
    "acceptance length",
    "ms/step",
    "repeated",
    "same tokens",
)


def _figures(temperature: float, depth: int, decode: Decode, plain: Decode) -> JsonObject:
    """Results of one depth; plain: depth 0 at the same temperature."""
    spec = decode.speculation
    return {
        "temperature": temperature,
        "depth": depth,
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
        f"{f['tokens_per_second']:.1f}",
        f"{f['of_depth_0']:.2f}",
        f["speedup"].show(),
        f"{f['acceptance_length']:.3f}",
        f"{f['step_seconds'] * 1e3:.2f}",
        f"{f['repeated']:.0%}",
        {True: "yes", False: "NO", None: "sampled" if f["temperature"] else "-"}[f["same_tokens"]],
    )
