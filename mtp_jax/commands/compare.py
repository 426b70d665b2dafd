"""`generate --compare`: a completion with and without speculation, measured side by side."""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mtp_jax.api.progress import Reporter
from mtp_jax.commands import show
from mtp_jax.commands.options import depth, ready
from mtp_jax.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mtp_jax.api.completions import Prompt
    from mtp_jax.api.llm import LLM
    from mtp_jax.api.outputs import RequestOutput

_RUNS = 3


@dataclass(frozen=True)
class Measured:
    """Medians over the runs of one side.

    Attributes:
        depth: drafts per step, or most drafts of adaptive depth.
        tokens_per_second: after the first token; 0.0 with fewer than two tokens.
        first_token: seconds from the request to its first token.
        finished: seconds from the request to its end.
        acceptance_length: tokens per step.
    """

    depth: int
    tokens_per_second: float
    first_token: float
    finished: float
    acceptance_length: float


def compare(
    args: argparse.Namespace, llm: "LLM", prompt: "Prompt", params: SamplingParams, report: Reporter
) -> int:
    """Measure and print, both sides by one engine. Returns 1 if a run failed, or sides differ that may not.

    In float32 both sides must agree in greedy decoding, and with a seed under the coupled verifier.
    """
    sides = (params, replace(params, num_speculative_tokens=0))
    for side in sides:
        llm.warm_up(prompt, side)
    ready(report, llm)
    # The first run of each side is not measured: caches are cold, and its text is printed meanwhile.
    if not args.json:
        show.stream(llm, prompt, params)
    runs: list[list[RequestOutput]] = [[], []]
    for i in range((args.runs or _RUNS) + 1):
        for side, outputs in zip(sides, runs, strict=True):
            llm.engine.flush_prefix_cache()  # else only the first run would prefill
            output = llm.generate([prompt], side)[0]
            if i > 0:
                outputs.append(output)
    depths = llm.engine.config.num_speculative_tokens, 0
    fast, slow = (_measured(most, outputs) for most, outputs in zip(depths, runs, strict=True))
    tokens = [output.outputs[0].token_ids for outputs in runs for output in outputs]
    fixed = params.temperature == 0 or (params.seed is not None and llm.engine.config.verifier == "coupled")
    same = all(t == tokens[0] for t in tokens) if fixed else None
    if args.json:
        result = {
            "with": asdict(fast),
            "without": asdict(slow),
            "speedup": _ratio(fast.tokens_per_second, slow.tokens_per_second),
            "speedup_end_to_end": _ratio(slow.finished, fast.finished),
            "same_tokens": same,
            "runs": len(runs[0]),
        }
        show.write(json.dumps(result | {"output": show.as_json(runs[0][-1])}, ensure_ascii=False) + "\n")
    else:
        show.write(
            "\n"
            + _lines(
                depth(llm),
                fast,
                slow,
                runs,
                _verdict(tokens, same, llm.engine.config.dtype),
                params.temperature,
            )
        )
    status = show.failed([output for outputs in runs for output in outputs])
    return 1 if same is False and llm.engine.config.dtype == "float32" else status


def _measured(depth: int, outputs: "list[RequestOutput]") -> Measured:
    return Measured(
        depth,
        statistics.median(map(show.decode_rate, outputs)),
        statistics.median(o.timing.first_token or 0.0 for o in outputs),
        statistics.median(o.timing.finished or 0.0 for o in outputs),
        outputs[-1].speculation.acceptance_length,
    )


def _lines(
    name: str,
    fast: Measured,
    slow: Measured,
    runs: "list[list[RequestOutput]]",
    verdict: str,
    temperature: float,
) -> str:
    rate, end = _ratio(fast.tokens_per_second, slow.tokens_per_second), _ratio(slow.finished, fast.finished)
    counts = [len(outputs[-1].outputs[0].token_ids) for outputs in runs]
    many = f"{counts[0]}" if counts[0] == counts[1] else f"{counts[0]} and {counts[1]}"
    how = f"temperature {temperature:g}" if temperature else "greedy"
    accepted = "".join(f"; {part}" for part in show.speculation(runs[0][-1].speculation)[1:])
    return (
        f"{name}: {fast.tokens_per_second:.0f} tokens/s, acceptance length "
        f"{fast.acceptance_length:.2f} | depth 0: {slow.tokens_per_second:.0f} tokens/s | "
        f"{rate:.2f}x, {verdict}\n"
        f"end to end: {fast.finished:.3f} s, first token after {fast.first_token * 1000:.0f} ms | "
        f"{slow.finished:.3f} s, first token after {slow.first_token * 1000:.0f} ms | {end:.2f}x\n"
        f"{many} tokens, {how}, medians of {len(runs[0])} alternating runs{accepted}\n"
        + ("green: drafted tokens\n" if show.colours() else "")
    )


def _verdict(tokens: list[list[int]], same: bool | None, dtype: str) -> str:
    if same is None:
        return "sampled, so tokens differ by chance (not with --verifier coupled --seed N)"
    if same:
        return "same tokens"
    shortest = min(map(len, tokens))
    at = next((i for i in range(shortest) if len({own[i] for own in tokens}) > 1), shortest)
    why = "" if dtype == "float32" else f", as {dtype} rounding can"
    return f"TOKENS DIFFER from number {at} on{why}"


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
