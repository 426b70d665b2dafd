"""`generate --compare`: completions with and without speculation, measured side by side."""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from mtp_jax.api.progress import Reporter
from mtp_jax.commands import show
from mtp_jax.commands.options import depth, ready
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonObject
from mtp_jax.spread import Spread

if TYPE_CHECKING:
    from mtp_jax.api.completions import Prompt
    from mtp_jax.api.llm import LLM
    from mtp_jax.api.outputs import RequestOutput

_CHANCE = 0.05  # of a difference that is none: the usual level of significance
_LEAST = math.ceil(math.log2(2 / _CHANCE))
"""Runs of each side, all of which one side must win to be faster."""
# Where they do not all agree: the fewest runs of which the slower side may win three.
_MOST = 15

Runs: TypeAlias = "Sequence[Sequence[RequestOutput]]"
"""Outputs with drafts, and without: number i of both is of one prompt and seed."""


@dataclass(frozen=True)
class Medians:
    """Medians over the runs of one side.

    Attributes:
        depth: number of drafts per step, or most drafts of adaptive depth.
        tokens_per_second: number of tokens per second after the first token; 0.0 with fewer than two tokens.
        first_token: seconds from the request to its first token.
        finished: seconds from the request to its end.
        acceptance_length: number of tokens per step, over all runs.
    """

    depth: int
    tokens_per_second: float
    first_token: float
    finished: float
    acceptance_length: float


@dataclass(frozen=True)
class PlainSteps:
    """PlainSteps with drafts in units of steps without any, over all runs.

    Attributes:
        tokens: number of tokens per step with drafts.
        cost: number of steps without drafts that take the time of a step with drafts.
    """

    tokens: float
    cost: float

    @classmethod
    def of(cls, runs: Runs) -> "PlainSteps":
        """Counts steps and tokens after the first of each run, and their seconds."""
        steps, seconds = [], []
        for outputs in runs:
            steps.append(sum(o.speculation.steps for o in outputs))
            seconds.append(sum((o.timing.finished or 0.0) - (o.timing.first_token or 0.0) for o in outputs))
        emitted = sum(len(o.outputs[0].token_ids) - 1 for o in runs[0])
        return cls(
            _ratio(emitted, steps[0]), _ratio(_ratio(seconds[0], steps[0]), _ratio(seconds[1], steps[1]))
        )

    def told(self, gains: Sequence[float]) -> str:
        """A sentence that explains the gain, or why there is none."""
        saved, cost = max(self.tokens - 1, 0), max(self.cost - 1, 0)
        facts = (
            f"a step's drafts save {saved:.2f} steps without drafts, and take as long as {cost:.2f} of them"
        )
        if len(gains) < _LEAST or (_differ(gains) and statistics.median(gains) > 1):
            return facts
        if not _differ(gains):
            return f"no gain beyond noise: {facts}"
        return f"no gain on this machine: {facts}; drafts pay where they save more than they cost"


def compare(
    args: argparse.Namespace,
    llm: "LLM",
    prompts: "Sequence[Prompt]",
    params: SamplingParams,
    report: Reporter,
) -> int:
    """Measure and print, both sides by one engine. Returns 1 if a run failed, or sides differ that may not.

    In float32 both sides must agree in greedy decoding, and with a seed under the coupled verifier.
    Raises RequestError where the model has nothing to draft with.
    """
    if not llm.engine.config.num_speculative_tokens:
        raise RequestError(
            "--compare needs drafts to compare with none, and the model has no NextN layers; give it a head "
            "with --draft-model, or add --suffix-drafts"
        )
    sides = (params, replace(params, num_speculative_tokens=0))
    for prompt, side in itertools.product(prompts, sides):  # one at a time, as they will run
        llm.warm_up(prompt, side)
    ready(report, llm, args)
    # The first run of each side is not measured: caches are cold, and its text is printed meanwhile.
    if not args.json:
        show.stream(llm, prompts[0], params)
    runs = _alternating(llm, prompts, sides, args.runs)
    fixed = params.temperature == 0 or (params.seed is not None and llm.engine.config.verifier == "coupled")
    tokens = [tuple(output.outputs[0].token_ids for output in pair) for pair in zip(*runs, strict=True)]
    same = all(a == b for a, b in tokens) if fixed else None
    depths = llm.engine.config.num_speculative_tokens, 0
    fast, slow = (_measured(most, outputs) for most, outputs in zip(depths, runs, strict=True))
    if args.json:
        show.write(json.dumps(_as_json(fast, slow, runs, same), ensure_ascii=False) + "\n")
    else:
        verdict = _verdict(tokens, same, llm.engine.config.dtype)
        work = _work(runs, len(prompts), params)
        show.write("\n" + _lines(depth(llm), fast, slow, runs, verdict, work))
    status = show.failed([*runs[0], *runs[1]])
    return 1 if same is False and llm.engine.config.dtype == "float32" else status


def _as_json(fast: Medians, slow: Medians, runs: Runs, same: bool | None) -> JsonObject:
    return {
        "with": asdict(fast),
        "without": asdict(slow),
        "speedup": statistics.median(_gains(runs)),
        "speedup_end_to_end": statistics.median(_gains_to_end(runs)),
        "step": asdict(PlainSteps.of(runs)),
        "within_noise": not _differ(_gains(runs)),
        "same_tokens": same,
        "runs": len(runs[0]),
        "output": show.as_json(runs[0][0]),
    }


def _alternating(
    llm: "LLM", prompts: "Sequence[Prompt]", sides: Sequence[SamplingParams], count: int | None
) -> "list[list[RequestOutput]]":
    """Runs of both sides in turn, each turn of the next prompt and seed; a first of each is dropped.

    count: None: their noise decides.
    """
    runs: list[list[RequestOutput]] = [[], []]
    least, most = (count, count) if count else (max(_LEAST, len(prompts)), max(_MOST, len(prompts)))
    # Decided after the fewest or after the most: to look after each run would make chance likelier.
    turn = -1
    while turn < least or (turn < most and not _differ(_gains(runs)[:least])):
        number = max(turn, 0)
        for side, outputs in zip(sides, runs, strict=True):
            llm.engine.flush_prefix_cache()  # else only the first run would prefill
            seed = None if side.seed is None else side.seed + number
            output = llm.generate([prompts[number % len(prompts)]], replace(side, seed=seed))[0]
            if turn >= 0:
                outputs.append(output)
        turn += 1
    return runs


def _measured(depth: int, outputs: "list[RequestOutput]") -> Medians:
    return Medians(
        depth,
        statistics.median(map(show.decode_rate, outputs)),
        statistics.median(o.timing.first_token or 0.0 for o in outputs),
        statistics.median(o.timing.finished or 0.0 for o in outputs),
        sum((o.speculation for o in outputs), Speculation()).acceptance_length,
    )


def _lines(name: str, fast: Medians, slow: Medians, runs: Runs, verdict: str, work: str) -> str:
    gains = _gains(runs)
    rate, end = _told(gains), _told(_gains_to_end(runs))
    spoken = show.speculation(sum((o.speculation for o in runs[0]), Speculation()))
    accepted = "".join(f"; {part}" for part in spoken[1:])
    return (
        f"{name}: {fast.tokens_per_second:.0f} tokens/s, acceptance length "
        f"{fast.acceptance_length:.2f} | depth 0: {slow.tokens_per_second:.0f} tokens/s | "
        f"{rate}, {verdict}\n"
        f"{PlainSteps.of(runs).told(gains)}\n"
        f"end to end: {fast.finished:.3f} s, first token after {fast.first_token * 1000:.0f} ms | "
        f"{slow.finished:.3f} s, first token after {slow.first_token * 1000:.0f} ms | {end}\n"
        f"{work}{accepted}\n" + ("green: drafted tokens\n" if show.colours() else "")
    )


def _work(runs: Runs, prompts: int, params: SamplingParams) -> str:
    """The work that was measured."""
    counts = [sum(len(o.outputs[0].token_ids) for o in outputs) for outputs in runs]
    many = f"{counts[0]}" if counts[0] == counts[1] else f"{counts[0]} and {counts[1]}"
    how = f"temperature {params.temperature:g}" if params.temperature else "greedy"
    if params.temperature and params.seed is not None:
        how += f", seeds from {params.seed} on"
    some = f"medians and quartiles of {len(runs[0])} alternating runs"
    some += f" of {prompts} prompts" if prompts > 1 else ""
    return f"{many} tokens, {how}, {some}"


def _verdict(tokens: "Sequence[tuple[list[int], ...]]", same: bool | None, dtype: str) -> str:
    if same is None:
        return "sampled, so tokens differ by chance (not with --verifier coupled --seed N)"
    if same:
        return "same tokens"
    at = min(
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in tokens
        if a != b
    )
    why = "" if dtype == "float32" else f", as {dtype} rounding can"
    return f"TOKENS DIFFER from number {at} on{why}"


def _gains(runs: Runs) -> list[float]:
    """The speed-up of each pair of runs after the first token: neighbours share the state of the machine."""
    return [_ratio(show.decode_rate(a), show.decode_rate(b)) for a, b in zip(*runs, strict=True)]


def _gains_to_end(runs: Runs) -> list[float]:
    """The speed-up of each pair of whole requests."""
    pairs = zip(*runs, strict=True)
    return [_ratio(b.timing.finished or 0.0, a.timing.finished or 0.0) for a, b in pairs]


def _differ(gains: Sequence[float]) -> bool:
    """Whether chance hardly explains how often the same side wins (sign test)."""
    fewer = min(sum(g > 1 for g in gains), sum(g < 1 for g in gains))
    tails = 2 * sum(math.comb(len(gains), k) for k in range(fewer + 1))
    return tails < _CHANCE * 2 ** len(gains)


def _told(gains: Sequence[float]) -> str:
    """Median and quartiles of speed-ups, which claim nothing where chance explains them."""
    found = Spread.of(gains)
    told = f"{found.median:.2f}x ({found.low:.2f}-{found.high:.2f})"
    if _differ(gains):
        return told
    return f"{told} of too few runs to tell" if len(gains) < _LEAST else f"the same within noise, {told}"


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
