"""Decode speed against the number of drafts per step: one request at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_jax.bench.acceptance import repeated
from mtp_jax.bench.report import Report, Spread
from mtp_jax.bench.subject import Prompts, Subject, prompts_for
from mtp_jax.bench.synthetic import complete
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, Speculation
from mtp_jax.errors import ConfigError


@dataclass(frozen=True)
class Decode:
    """One depth over all prompts.

    Attributes:
        seconds: per prompt, from the first token to the last.
        tokens: decoded in that time, all prompts together.
        speculation: of all prompts.
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
    engines: dict[int, Engine], prompts: Prompts, max_tokens: int, temperature: float = 0.0
) -> dict[int, Decode]:
    """Decode every prompt at every depth before the next prompt, the depths in rotating order.

    The first prompt is run once more before, so that no measured run is an engine's first.
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
        assert r.first_token_at is not None
        assert r.finished_at is not None
        seconds.append(r.finished_at - r.first_token_at)
    return Decode(
        seconds,
        sum(len(r.output) - 1 for r in requests),
        sum((r.speculation for r in requests), Speculation()),
        [r.output for r in requests],
    )


def speedup(plain: Decode, other: Decode) -> Spread:
    """Per prompt the time of ``plain`` over that of ``other``."""
    return Spread.of([a / b for a, b in zip(plain.seconds, other.seconds, strict=True)])


def run(
    subject: Subject,
    depths: Sequence[int],
    temperature: float,
    prompts: int,
    prompt_tokens: int,
    max_tokens: int,
) -> Report:
    """Decode the same prompts at each depth; depth 0 is always among them, as the baseline."""
    depths = sorted({0, *depths})
    if max_tokens < 2:
        raise ConfigError(f"max_tokens = {max_tokens}; expected at least 2: the first comes from the prefill")
    given = prompts_for(subject, prompts, prompt_tokens)
    engines = {d: subject.engine(d, 1, prompt_tokens + max_tokens) for d in depths}
    measured = decode_alternating(engines, given, max_tokens, temperature)
    plain = measured[0]
    rows, figures = [], []
    for depth, decode in measured.items():
        ratio, spec = speedup(plain, decode), decode.speculation
        same = decode.texts == plain.texts if temperature == 0 else None
        repeats = sum(map(repeated, decode.texts)) / prompts
        position = [n / spec.steps for n in spec.accepted_per_position]
        rows.append(
            (
                depth,
                f"{decode.rate:.1f}",
                f"{decode.rate / plain.rate:.2f}",
                ratio.show(),
                f"{spec.acceptance_length:.3f}",
                f"{sum(decode.seconds) / spec.steps * 1e3:.2f}",
                f"{repeats:.0%}",
                {True: "yes", False: "NO", None: "sampled"}[same],
            )
        )
        figures.append(
            {
                "depth": depth,
                "tokens_per_second": decode.rate,
                "of_depth_0": decode.rate / plain.rate,
                "acceptance_length": spec.acceptance_length,
                "acceptance_per_position": position,
                "speedup": ratio,
                "step_seconds": sum(decode.seconds) / spec.steps,
                "same_tokens": same,
                "repeated": repeats,
                "seconds": decode.seconds,
            }
        )
    headers = (
        "depth",
        "tokens/s",
        "of depth 0",
        "per prompt, median (quartiles)",
        "acceptance length",
        "ms/step",
        "repeated",
        "same tokens",
    )
    how = f"temperature {temperature:g}" if temperature else "greedy"
    notes = [
        f"{prompts} prompts of {prompt_tokens} tokens ({given.source}), {max_tokens} tokens each, batch 1, "
        f"{how}; time from the first token to the last. Tokens/s: of all prompts together; per prompt: the "
        "time at depth 0 over that at this depth."
    ]
    return Report(f"Decode speed by depth: {subject.name}", headers, rows, notes, {"depths": figures})
