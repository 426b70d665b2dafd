"""Runs the Mosaic GPU kernels on the CPU, in Pallas' interpreter, and looks for races."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.check.case import Case
from tests.rounding import roundoff

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="Pallas interprets fences from jax 0.11 on"
)


@dataclass(frozen=True)
class Run:
    """What a case gave: the largest distance of an output from the reference, and whether threads raced.

    The distance is NaN where a race ended the run.
    """

    distance: float
    races: bool


def distance(got: Any, expected: Any) -> float:
    """Relative norm of the difference; NaN if anything is."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def rounded(times: float, dtype: Any = jnp.bfloat16) -> float:
    """The ``distance`` that so many roundings explain: of even errors, of at most u times a number each."""
    return float(np.sqrt(times / 3)) * roundoff(dtype)


def interpret(case: Case, seed: int = 0) -> Run:
    """Memory starts as NaN there, so that an output nobody writes is noticed."""
    inputs = jax.jit(case.inputs)(jax.random.key(seed))
    interpreter.reset_gpu_interpret_mode_state()
    try:
        out = case.kernel(*inputs, interpret=InterpretGPUParams(detect_races=True))
        pairs = zip(jax.tree.leaves(out), jax.tree.leaves(case.reference(*inputs)), strict=True)
        return Run(float(np.max([distance(*pair) for pair in pairs])), interpreter.get_races().races_found)
    except jax.errors.JaxRuntimeError as e:
        if "race detected" in str(e).lower():  # from jax 0.12 on the first race ends the run
            return Run(np.nan, True)
        raise
    finally:
        interpreter.reset_gpu_interpret_mode_state()


def without(monkeypatch: Any, operation: str, where: str) -> None:
    """Remove ``plgpu.operation`` from the functions whose qualified name ends in ``where``."""
    original: Callable[..., Any] = getattr(plgpu, operation)

    def mutant(*args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_code.co_qualname.endswith(where):
            return original(*args, **kwargs)
        removed.append(where)
        return None

    removed: list[str] = []
    monkeypatch.setattr(plgpu, operation, mutant)


def notices(case: Case) -> bool:
    """Whether the interpreter finds a race or a misused barrier, or the result is wrong."""
    try:
        run = interpret(case)
    except jax.errors.JaxRuntimeError as e:
        if any(word in str(e).lower() for word in ("barrier", "phase")):
            return True
        raise
    return run.races or not run.distance < case.tolerance
