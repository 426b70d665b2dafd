"""Count what programs on a CPU cost: ``python -m tests.decode.program_cost [CASE...]``; 1 if over the budget.

    instructions  of the optimised program: time of XLA's passes
    kernels       distinct, object files: 20 to 30 ms of compilation and three memory mappings each
    run           kernels of one step, loops of known length unrolled, others once: time of launches
    server        executables of a default server: memory

No clock and no weights: programs are compiled for shapes, and the compiler's own dump is counted. The budget
(``program_budget.toml``) is of one jaxlib, as each compiles in its own way; a number there may only fall.
"""

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax.api.demo import demo_model
from mtp_jax.checkpoint.formats import FP8, FP8_BY_HEAD
from mtp_jax.decode.bookkeeping import abstract_state
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.decode.launches import ON_CPU
from mtp_jax.decode.programs import Programs
from mtp_jax.decode.state import StateShape
from mtp_jax.engine.buckets import Buckets
from mtp_jax.engine.config import EngineConfig
from mtp_jax.heads.build import build
from mtp_jax.lab.bench.synthetic import preset
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import compiler_options
from mtp_jax.model.family import config_of_file
from mtp_jax.model.narrow import Bf16, Fp8
from mtp_jax.model.params import Params, Spec, dtype_of, param_specs
from mtp_jax.model.spec import scale_spec
from mtp_jax.model.stack import Stack, stacked
from mtp_jax.model.trunk import Model
from tests.models import TINY

BUDGET = Path(__file__).with_name("program_budget.toml")
SAMPLED, GREEDY = SamplingMode("sampled", "block"), SamplingMode()
Keep = Callable[[Spec], Any]


@dataclass(frozen=True)
class Case:
    """A program. slots: of its windows; keep: a parameter as it lies in memory."""

    cfg: ModelConfig
    keep: Keep
    slots: int
    depth: int
    mode: SamplingMode
    tokens: int = 0


@dataclass(frozen=True)
class Cost:
    """See the module."""

    instructions: int
    kernels: int
    run: int


def shape_of(spec: Spec, kind: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, kind)


def float32(spec: Spec) -> Any:
    """As a float32 checkpoint is kept."""
    return shape_of(spec, dtype_of(spec, "float32"))


def bf16(spec: Spec) -> Any:
    """As a bfloat16 checkpoint is kept on a CPU."""
    narrow = len(spec.tensor_shape) > 1 and not spec.float32
    return Bf16(shape_of(spec, jnp.bfloat16), shape_of(spec, jnp.uint16)) if narrow else float32(spec)


def fp8(spec: Spec) -> Any:
    """An FP8 checkpoint as it is kept: tables in bfloat16, ``kv_b`` in FP8 where heads end with blocks."""
    if spec.float32 or len(spec.tensor_shape) < 2 or not (FP8.can_stay(spec) or FP8_BY_HEAD.can_stay(spec)):
        return float32(spec)
    if spec.init == "embedding":
        return bf16(spec)
    scale = scale_spec(spec)
    return Fp8(shape_of(spec, jnp.float8_e4m3fn), float32(scale), shape_of(spec, jnp.int8))


def cases() -> dict[str, Case]:
    """By name."""
    demo = config_of_file(demo_model() / "config.json")
    dense, moe = (preset(name).config for name in ("dense", "moe"))
    return {
        "tiny-sampled": Case(TINY, float32, 2, 3, SAMPLED),
        "tiny-chunk": Case(TINY, float32, 2, 3, GREEDY, 16),
        "demo": Case(demo, bf16, 1, 3, GREEDY),
        "demo-undrafted": Case(demo, bf16, 1, 0, GREEDY),
        "demo-sampled": Case(demo, bf16, 8, 3, SAMPLED),
        "demo-chunk": Case(demo, bf16, 8, 3, SAMPLED, 256),
        "dense-bf16": Case(dense, bf16, 1, 3, GREEDY),
        "moe-fp8": Case(moe, fp8, 1, 3, GREEDY),
    }


def lowered(case: Case) -> Any:
    """The program, for shapes alone, with 8 slots of 16 pages."""
    cfg, on = case.cfg, xla_cpu()
    params: Params = jax.tree.map(case.keep, param_specs(cfg))
    groups = [stacked(g) if len(g) > 1 else g[0] for g in on.arranged(params.layers)]
    params = Params(params.embed, tuple(groups), params.norm, params.head, params.nextn)
    counts = [len(g) if isinstance(g, Stack) else None for g in groups]
    model, drafter = Model(cfg, on), build(cfg)
    state = abstract_state(model, drafter, StateShape(8, 128, 64, 16), groups=counts)
    key = StepKey(case.slots, case.depth, 16, case.mode, case.tokens, int(case.tokens > 0))
    return Programs(Decoding(model, drafter), params, state).lowering.program(key)


def cost_of(case: Case) -> Cost:
    """Compile a program and count."""
    with tempfile.TemporaryDirectory() as dump:
        options = {**compiler_options(), "xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        text = lowered(case).compile(options).as_text()
        kernels = sum(name.endswith(".o") for name in os.listdir(dump))
    return Cost(len(re.findall(" = ", text)), kernels, run_by(text))


# What becomes of these is no kernel.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "optimization-barrier",
}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", re.M)
_CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def run_by(text: str) -> int:
    """Kernels that a run of a program launches; of a condition the branch with most."""
    parts: dict[str, list[tuple[str, str]]] = {}
    name, entry = "", ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = head[2]
            entry = name if head[1] else entry
            parts[name] = []
        elif found := _INSTRUCTION.match(line):
            parts[name].append((found[1], line))

    def of(name: str) -> int:
        return sum(launches(op, line) for op, line in parts[name])

    def launches(op: str, line: str) -> int:
        if op in _FREE:
            return 0
        called = [c for c in _CALLED.findall(line) if c in parts]
        if op == "while":
            trips = _TRIPS.search(line)
            return (int(trips[1]) if trips else 1) * sum(map(of, called))
        if op == "conditional":
            branches = _BRANCHES.search(line)
            names = re.findall(r"[\w.-]+", branches[1].replace("%", "")) if branches else called
            return max(map(of, names))
        if op == "call" and 'xla_cpu_small_call="true"' not in line:
            return sum(map(of, called))
        return 1

    return of(entry)


def faults(name: str, cost: Cost, most: dict[str, int]) -> list[str]:
    """What exceeds the budget."""
    found = {"instructions": cost.instructions, "kernels": cost.kernels, "run": cost.run}
    return [f"{name}: {n} {what}, budget {most[what]}" for what, n in found.items() if n > most[what]]


def executables() -> int:
    """Programs of a default server with grammars; a structured step is two."""
    first, rest = Buckets(EngineConfig(adaptive_depth=True), 1, ON_CPU).server(structured=True)
    keys = first + rest
    return len(keys) + sum(isinstance(k, StepKey) and k.mode.structured for k in keys)


def main(names: list[str]) -> int:
    """Print a line for each case; 1 if one exceeds its budget."""
    jax.config.update("jax_enable_compilation_cache", False)
    budget, over = tomllib.loads(BUDGET.read_text()), []
    every = cases()
    for name in names or every:
        cost = cost_of(every[name])
        print(
            f"{name:16} {cost.instructions:6} instructions {cost.kernels:4} kernels {cost.run:5} run",
            flush=True,
        )
        over += faults(name, cost, budget[name])
    print(f"a default server: {executables()} executables")
    if executables() > budget["server"]["executables"]:
        over.append(
            f"a default server: {executables()} executables, budget {budget['server']['executables']}"
        )
    if version("jaxlib") != budget["jaxlib"]:
        print(f"not held against the budget: it is of jaxlib {budget['jaxlib']}, this is {version('jaxlib')}")
        return 0
    print("\n".join(over) or "within the budget")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
