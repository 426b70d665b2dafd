"""The shapes the router is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Work
from kernels_pallas.grouped_matmul.layout import Groups, OwnGroups, group_all
from kernels_pallas.mosaic import WGMMA_ROWS, Interpreter
from kernels_pallas.router import mosaic_gpu, reference
from kernels_pallas.router.rule import Rule

DEEPSEEK_V3 = Rule(chosen=8, groups=8, kept=4, scaling=2.5)
KIMI_K2 = Rule(chosen=8, scaling=2.827)
V4_FLASH = Rule(chosen=6, scaling=1.5, scoring="sqrtsoftplus")


@dataclass(frozen=True)
class RouterShape:
    """``tokens`` that choose among ``experts``; the kernel is given a multiple of 4.

    Attributes:
        idle: one in ``idle`` tokens does not count; 0: all tokens count.
        own: first and number of the experts by which the rows of all tokens, 8 at most, are laid out.
    """

    tokens: int
    experts: int
    rule: Rule
    idle: int = 0
    own: tuple[int, int] | None = None


def shapes() -> dict[str, RouterShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    return {
        "small-groups": RouterShape(70, 64, Rule(chosen=4, groups=4, kept=2, scaling=2.5)),
        "small-one-group": RouterShape(64, 32, Rule(chosen=3, normalise=False)),
        "small-all-groups": RouterShape(128, 32, Rule(chosen=6, groups=2, kept=2)),
        "small-idle": RouterShape(128, 32, Rule(chosen=3), idle=3),
        "small-8-each": RouterShape(9, 24, Rule(chosen=4, groups=3, kept=2)),
        "small-v3": RouterShape(4, 256, DEEPSEEK_V3),
        "small-384": RouterShape(4, 384, KIMI_K2),
        "small-512": RouterShape(4, 512, Rule(chosen=10)),
        "small-v4": RouterShape(4, 64, V4_FLASH),
        "small-laid-3": RouterShape(3, 32, Rule(chosen=3), own=(8, 16)),
        "small-laid-8": RouterShape(
            8, 64, Rule(chosen=4, groups=4, kept=2, scaling=2.5), idle=3, own=(0, 64)
        ),
        "v3-1-laid": RouterShape(1, 256, DEEPSEEK_V3, own=(0, 256)),
        "v3-4-laid": RouterShape(4, 256, DEEPSEEK_V3, own=(0, 256)),
        "v3-4-laid-of8": RouterShape(4, 256, DEEPSEEK_V3, own=(96, 32)),
        "v3-8-laid": RouterShape(8, 256, DEEPSEEK_V3, own=(0, 256)),
        "one-group-1-laid": RouterShape(1, 256, Rule(chosen=8, scaling=2.5), own=(0, 256)),
        "v4-4-laid": RouterShape(4, 256, V4_FLASH, own=(0, 256)),
        "v4-64": RouterShape(64, 256, V4_FLASH),
        "v3-64": RouterShape(64, 256, DEEPSEEK_V3),
        "v3-512": RouterShape(512, 256, DEEPSEEK_V3),
        "v3-8192": RouterShape(8192, 256, DEEPSEEK_V3),
        "one-group-512": RouterShape(512, 64, Rule(chosen=6)),
        "one-group-256": RouterShape(64, 256, Rule(chosen=8, scaling=2.5)),
        "kimi-k2-64": RouterShape(64, 384, KIMI_K2),
        "512-experts": RouterShape(64, 512, Rule(chosen=10)),
    }


def case(name: str, shape: RouterShape) -> Case:
    """The case of one shape."""
    return Case(
        name=f"router/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(run, shape),
        reference=partial(expected, shape),
        work=work(shape),
        plan=KernelPlan(-(-shape.tokens // reference.ROWS), 4 * reference.ROWS * shape.experts),
        tolerance=1e-5,
        baselines={"xla": lambda x, bias, counted: reference.choose(x, bias, shape.rule, counted > 0)},
    )


def inputs(shape: RouterShape, key: jax.Array) -> CaseInputs:
    """Random logits, many of them equal: the order among equals is part of the result."""
    keys = jax.random.split(key)
    tokens = shape.tokens if shape.own else -(-shape.tokens // reference.ROWS) * reference.ROWS
    logits = jnp.round(jax.random.normal(keys[0], (tokens, shape.experts)) * 8) / 4
    bias = jnp.round(jax.random.normal(keys[1], (shape.experts,)) * 2) / 8
    return logits, bias, counted(shape, tokens).astype(jnp.int32)


def counted(shape: RouterShape, tokens: int) -> Bool[Array, " T"]:
    """Whether each of ``tokens`` chooses; padding does not."""
    token = jnp.arange(tokens)
    idle = shape.idle > 0 and token % shape.idle == 0
    return (token < shape.tokens) & ~jnp.asarray(idle)


def run(shape: RouterShape, *inputs: Any, interpret: Interpreter | None = None) -> tuple[Array, ...]:
    """The kernel's choice for real tokens, rank by rank."""
    own = OwnGroups(*shape.own) if shape.own else None
    ids, weights, out = mosaic_gpu.choose(*inputs, own=own, rule=shape.rule, interpret=interpret)
    ids, weights = ids[:, : shape.tokens], weights[:, : shape.tokens]
    if isinstance(out, Groups):
        return ids, weights, *jax.tree.leaves(out)
    return ids, weights, out[: -(-shape.tokens // reference.ROWS)]


def expected(shape: RouterShape, logits: jax.Array, bias: jax.Array, counted: jax.Array) -> tuple[Array, ...]:
    """The choice in plain jnp."""
    ids, weights = reference.choose(logits[: shape.tokens], bias, shape.rule, counted[: shape.tokens] > 0)
    if shape.own:
        first, count = shape.own
        return ids.T, weights.T, *jax.tree.leaves(group_all(ids - first, count, WGMMA_ROWS))
    counts = reference.count(ids, shape.experts)[: -(-shape.tokens // reference.ROWS)]
    return ids.T, weights.T, counts


def work(shape: RouterShape) -> Work:
    """The least work: logits read, choices written."""
    return Work(
        flops=0,
        bytes=4 * (shape.tokens * (shape.experts + 2 * shape.rule.chosen) + shape.experts),
        format="bf16",
    )
