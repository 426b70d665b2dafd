"""The shapes that both kernels of hyper-connections are checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Operation, Work
from kernels_pallas.hyper import api, mosaic_gpu, reference
from kernels_pallas.hyper.mosaic_gpu import TOGETHER
from kernels_pallas.hyper.rule import STREAMS, GateParams, GateRule, Gates, InputForms, Projected
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.quantised import BLOCK

GATES = 2 * STREAMS + STREAMS**2
# DeepSeek-V4-Flash's.
RULE = GateRule(iterations=20, eps=1e-6, norm_eps=1e-6)
# Instructions of a warp that wait for each other: of half a turn four sums of four, four reciprocals and 16
# products; and of making a number's sigmoid or exponential.
_HALF_TURN, _EACH = 36, 10


@dataclass(frozen=True)
class ProjectShape:
    """Streams behind a sublayer, before the next one.

    Attributes:
        tokens, width: number of tokens, and of a stream's values.
        results: number of float32 parts of each of the sublayer's results; 0: it is bfloat16. None: there was
            no sublayer.
        outputs: number of gates; 4 where streams end.
        padding: number of rows of the results that are not read.
    """

    tokens: int
    width: int
    results: tuple[int, ...] | None = None
    outputs: int = GATES
    padding: int = 0


@dataclass(frozen=True)
class EnterShape:
    """Streams before a sublayer.

    Attributes:
        tokens, width: number of tokens, and of a stream's values.
        parts: number of parts of the product; None: the number that ``project`` leaves.
        ends: whether streams end here: the gated sum is not normed.
        plain: whether the result is wanted in bfloat16, beside e4m3.
    """

    tokens: int
    width: int
    parts: int | None = None
    ends: bool = False
    plain: bool = False


def shapes() -> dict[str, ProjectShape | EnterShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    return {
        "small-project": ProjectShape(2, 256, outputs=STREAMS),
        "small-leave": ProjectShape(5, 256, (2, 0), padding=3),
        "small-enter": EnterShape(2, 1024, plain=True),
        "small-enter-whole": EnterShape(3, 512, parts=1),
        "small-collapse": EnterShape(2, 512, parts=32, ends=True),
        # DeepSeek-V4-Flash's sizes, and DeepSeek-V4-Pro's: one slot, and 16; a chunk of a prompt.
        "leave-4": ProjectShape(4, 4096, (0,)),
        "leave-64": ProjectShape(64, 4096, (0, 0)),
        "leave-4-pro": ProjectShape(4, 7168, (4,)),
        "collapse-4": ProjectShape(4, 4096, outputs=STREAMS),
        "enter-4": EnterShape(4, 4096, plain=True),
        "enter-64": EnterShape(64, 4096),
        "enter-4-pro": EnterShape(4, 7168),
        "enter-8192": EnterShape(8192, 4096, parts=1),
    }


def case(name: str, shape: ProjectShape | EnterShape) -> Case:
    """The case of one shape."""
    return _project(name, shape) if isinstance(shape, ProjectShape) else _enter(name, shape)


def _project(name: str, shape: ProjectShape) -> Case:
    def inputs(key: jax.Array) -> CaseInputs:
        keys = jax.random.split(key, 4)
        blocks, rows = (shape.width // BLOCK, BLOCK), shape.tokens + shape.padding
        streams = _streams(keys[0], shape.tokens, shape.width).reshape(-1, STREAMS, *blocks)
        weight = jax.random.normal(keys[1], (shape.outputs, STREAMS, *blocks)) * shape.width**-0.5
        results = [
            jax.random.normal(keys[2], (n or 1, rows, *blocks), jnp.float32 if n else jnp.bfloat16)
            for n in shape.results or ()
        ]
        out, mix = jax.random.uniform(keys[3], (2, shape.tokens, STREAMS, STREAMS))
        return streams, results, None if shape.results is None else Gates(out[:, 0], mix), weight

    left = shape.results is not None
    row = shape.tokens * shape.width
    moved = STREAMS * shape.width * 4 * shape.outputs + 2 * STREAMS * row * (1 + left)
    moved += sum(row * (4 * parts or 2) for parts in shape.results or ())
    tiles = -(-shape.tokens // TOGETHER)
    blocks = tiles * STREAMS * shape.width // BLOCK
    asked = 4 * BLOCK * shape.outputs + TOGETHER * BLOCK * 2 * (STREAMS + 2 if left else 1)
    work = Work(2 * STREAMS * row * (shape.outputs + STREAMS * left), moved, "bf16")
    plan = KernelPlan(blocks, asked)
    return _made(name, inputs, mosaic_gpu.project, reference.project, work, plan)


def _enter(name: str, shape: EnterShape) -> Case:
    outputs = STREAMS if shape.ends else GATES
    parts = shape.parts or STREAMS * shape.width // BLOCK

    def inputs(key: jax.Array) -> CaseInputs:
        keys = jax.random.split(key, 5)
        streams = _streams(keys[0], shape.tokens, shape.width)
        found = jax.random.normal(keys[1], (shape.tokens, outputs, parts)) * (shape.width / parts) ** 0.5
        squares = jax.random.uniform(keys[2], (shape.tokens, parts), maxval=2 * STREAMS * shape.width / parts)
        scale = jax.random.uniform(keys[3], (1 if shape.ends else 3,), minval=0.5, maxval=2.0)
        base, norm = jax.random.normal(keys[4], (outputs,)), jnp.linspace(0.5, 1.5, shape.width)
        return streams, Projected(found, squares), GateParams(scale, base, None if shape.ends else norm)

    wanted = InputForms(shape.ends, shape.plain, not shape.ends)
    row = shape.tokens * shape.width
    moved = row * (2 * STREAMS + 2 * (shape.ends + shape.plain) + (not shape.ends))
    moved += 4 * shape.tokens * (outputs + 1) * parts
    path = outputs * _EACH + (0 if shape.ends else (2 * RULE.iterations - 1) * _HALF_TURN)

    def run(which: Any, *given: Any, interpret: Interpreter | None = None) -> tuple[Array, ...]:
        found = api.enter(*given, rule=RULE, wanted=wanted, implementation=which, interpret=interpret)
        low = found.quantised
        rows = () if low is None else (low.values[: shape.tokens], low.scale[:, : shape.tokens])
        plain = [x for x in (found.total, found.plain) if x is not None]
        return (*plain, *rows, *(found.gates or ()))

    plan = KernelPlan(shape.tokens, moved / shape.tokens, path=path)
    kernel, oracle = partial(run, "mosaic_gpu"), partial(run, "xla")
    return _made(name, inputs, kernel, oracle, Work(2 * STREAMS * row, moved, "bf16"), plan)


def _streams(key: jax.Array, tokens: int, width: int) -> Array:
    return jax.random.normal(key, (tokens, STREAMS, width), jnp.bfloat16)


def _made(name: str, inputs: Any, kernel: Operation, oracle: Operation, work: Work, plan: KernelPlan) -> Case:
    return Case(
        name=f"hyper/{name}",
        inputs=inputs,
        kernel=kernel,
        reference=oracle,
        work=work,
        plan=plan,
        baselines={"xla": oracle},
    )
