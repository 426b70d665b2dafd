"""Run whole decode steps of a large model on one GPU, with weights made there: their time, and where it goes.

    python -m tests.kernels.run_step MODEL [--depths 0,3] [--slots N] [--rows N] [--layers N] [--sampled]

A step is the engine's own program, launched as the engine does: before the last one's result is read. Slots
are declared to hold rows that no model computed, so that no prompt comes before the first step. Acceptance is
forced (``mtp_jax.decode.law``); the text is garbage. Then a few steps are traced, for the time of each
kernel, and of each launch of a layer, in order.
"""

import argparse
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp

from mtp_jax.api.local import local_engine, local_runner
from mtp_jax.bench.report import Spread, table
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.decode.launches import ReleaseCache, Step
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.decode.state import Slots, State
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import make_mesh
from mtp_jax.profiling.trace import Trace, read
from tests.kernels.compile_step import INDEXER, abstract_params, config
from tests.kernels.random_weights import random_params

# 2.9 tokens per step with three drafts: SGLang's and DeepSeek's reports of DeepSeek-V3 name 2.4 to 3.
ACCEPTANCE = 0.85, 0.64, 0.41
SETTLE, STEPS, TRACED = 8, 200, 4
MOST = 25  # kernels to print
ATTENTION = "mla_decode"
_WINDOW = "traced steps"


@dataclass(frozen=True)
class Measured:
    """Steps of one depth.

    Attributes:
        seconds: of a step.
        call: seconds that the host takes to launch one.
        tokens: per step and slot.
        trace: of some steps.
    """

    seconds: Spread
    call: Spread
    tokens: float
    trace: Trace


def models(layers: int | None) -> dict[str, ModelConfig]:
    """By name: what fits into one GPU's memory. layers: of the trunk; None: as many as that.

    share    what one of 8 GPUs computes of DeepSeek-V3, its heads, widths and vocabulary split over 8,
             without the collectives; 128 of 256 experts, of which a step of few tokens reads as many
    deep     DeepSeek-V3 with 16 experts in each layer
    wide     5 layers of DeepSeek-V3
    sparse   5 layers of DeepSeek-V3.2 with 128 experts in each
    joyai    JoyAI-LLM-Flash, 48 B
    tiny     for a CPU
    """
    whole = replace(config(layers or 61), first_k_dense_replace=3)
    few = layers or 5
    joyai = replace(
        config(layers or 40),
        hidden_size=2048,
        intermediate_size=7168,
        moe_intermediate_size=768,
        num_attention_heads=32,
        n_group=1,
        topk_group=1,
        nextn_moe=(False,),
    )
    return {
        "share": replace(
            whole,
            vocab_size=16384,
            intermediate_size=2304,
            moe_intermediate_size=256,
            num_attention_heads=16,
            n_routed_experts=128,
        ),
        "deep": replace(whole, n_routed_experts=16, n_group=1, topk_group=1),
        "wide": config(few),
        "sparse": config(few, INDEXER, experts=128),
        "joyai": joyai,
        "tiny": replace(
            joyai,
            vocab_size=512,
            hidden_size=256,
            intermediate_size=256,
            moe_intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=8,
            q_lora_rank=128,
            n_routed_experts=16,
        ),
    }


def engine_of(cfg: ModelConfig, params: Params, depth: int, slots: int, rows: int) -> Engine:
    """An engine whose slots have room for the rows and for what the steps add."""
    longest = rows + (depth + 1) * (SETTLE + STEPS + TRACED + 2)
    sizes = EngineConfig(
        num_speculative_tokens=depth,
        max_num_seqs=slots,
        max_model_len=longest,
        dtype="bfloat16",
        prefix_cache=False,
        synthetic_acceptance=ACCEPTANCE[:depth] or None,
    )
    if not depth:
        return local_engine(cfg.with_nextn(()), replace(params, nextn=()), sizes)
    return local_engine(cfg, params, sizes)


def declare(runner: LocalRunner, depth: int, rows: int) -> None:
    """Let every slot be in the midst of a greedy request, with so many random rows behind it."""

    def full(array: jax.Array, value: float) -> jax.Array:
        return jnp.full(array.shape, value, array.dtype)

    def random(state: State) -> State:
        def of(a: jax.Array) -> jax.Array:
            return jax.random.normal(jax.random.key(1), a.shape, a.dtype) if a.dtype == jnp.bfloat16 else a

        return state.replace(trunk=jax.tree.map(of, state.trunk))

    state = jax.jit(random, donate_argnums=0)(runner.state)
    s: Slots = state.slots
    plain = replace(s.sampling, top_p=full(s.sampling.top_p, 1), repetition=full(s.sampling.repetition, 1))
    slots = s.replace(
        length=full(s.length, rows),
        active=full(s.active, True),
        remaining=full(s.remaining, 2**20),
        depth=full(s.depth, depth),
        page_table=jnp.arange(s.page_table.size, dtype=jnp.int32).reshape(s.page_table.shape),
        sampling=plain,
    )
    runner.state = state.replace(slots=slots)


def measure(engine: Engine, depth: int, rows: int, sampled: bool) -> Measured:
    """Steps of all slots.

    sampled: by the program that can sample, which a server runs for greedy rows, too.
    """
    runner, c = local_runner(engine), engine.config
    mode = SamplingMode(c.drafting, c.verifier) if sampled else SamplingMode()
    key = StepKey(c.max_num_seqs, depth, c.columns, mode)
    runner.compile([key])
    declare(runner, depth, rows)
    counts, calls, times = [], [], []
    pending = runner.do(Step(key))
    for _ in range(SETTLE + STEPS):
        began = time.perf_counter()
        following = runner.do(Step(key))
        calls.append(time.perf_counter() - began)
        counts.append(pending.read().packed[:, depth + 1].mean())
        times.append(time.perf_counter() - began)
        pending = following
    pending.read()
    tokens = statistics.fmean(map(float, counts[SETTLE:]))
    return Measured(Spread.of(times[SETTLE:]), Spread.of(calls[SETTLE:]), tokens, traced(runner, key))


def traced(runner: LocalRunner, key: StepKey) -> Trace:
    """What runs in a few steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options), jax.profiler.TraceAnnotation(_WINDOW):
            for _ in range(TRACED):
                runner.do(Step(key)).read()
        (recorded,) = Path(folder).rglob("*.xplane.pb")
        return read(recorded, _WINDOW)


def launches(trace: Trace) -> list[tuple[str, float]]:
    """Every launch in order: its kernel, without XLA's number, and its seconds."""
    ops = sorted((op for line in trace.lines for op in line), key=lambda op: op.start)
    return [(re.sub(r"[._]\d+$", "", op.kernel), (op.end - op.start) / 1e9) for op in ops]


def kernels(found: Sequence[tuple[str, float]]) -> list[tuple[str, int, float]]:
    """(kernel, launches, seconds) of them all, the longest first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for name, seconds in found:
        spent[name].append(seconds)
    return sorted(((n, len(s), sum(s)) for n, s in spent.items()), key=lambda row: -row[2])


def layer(found: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """(kernel, median seconds) of each launch from one layer's attention to the next, in the commonest order.

    Empty where no kernel of ours computes attention.
    """
    begins = [i for i, (name, _) in enumerate(found) if name.startswith(ATTENTION)]
    parts = [found[a:b] for a, b in pairwise(begins)]
    orders = Counter(tuple(name for name, _ in part) for part in parts)
    if not orders:
        return []
    (order, _), *_ = orders.most_common(1)
    alike = [part for part in parts if tuple(name for name, _ in part) == order]
    return [(name, statistics.median(p[i][1] for p in alike)) for i, name in enumerate(order)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.run_step",
        description=f"{__doc__}\n{models.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", choices=models(None))
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4096, help="cached rows of each slot")
    parser.add_argument("--depths", default="0,3")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sampled", action="store_true", help="the program that can sample")
    options = parser.parse_args()
    cfg = models(options.layers)[options.model]
    params = random_params(jax.random.key(0), abstract_params(cfg, make_mesh(1, 1)))
    print(f"{options.model} on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    for depth in map(int, options.depths.split(",")):
        engine = engine_of(cfg, params, depth, options.slots, options.rows)
        m = measure(engine, depth, options.rows, options.sampled)
        found, rate = launches(m.trace), m.tokens * options.slots / m.seconds.median
        print(
            f"\ndepth {depth}, {options.slots} slots: a step {m.seconds.show(3, 1e3)} ms, the host's call "
            f"{m.call.show(3, 1e3)} ms; {m.tokens:.2f} tokens per step and slot, SIMULATED, hence {rate:.1f} "
            f"per second; {len(found) / TRACED:.0f} launches of together "
            f"{sum(t for _, t in found) / TRACED * 1e3:.3f} ms\n"
        )
        rows = [(n, f"{c / TRACED:.0f}", f"{t / TRACED * 1e3:.3f}") for n, c, t in kernels(found)[:MOST]]
        print(table(("kernel", "launches", "ms"), rows))
        if own := layer(found):
            print(f"\na layer, {sum(t for _, t in own) * 1e6:.1f} us\n")
            print(table(("kernel", "us"), [(n, f"{t * 1e6:.2f}") for n, t in own]), flush=True)
        engine.runner.do(ReleaseCache())
        del engine


if __name__ == "__main__":
    main()
