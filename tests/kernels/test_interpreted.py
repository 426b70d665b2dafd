"""Small cases of every kernel in Pallas' interpreter: equal to the reference, and no two threads race."""

from typing import Any

import pytest

from kernels_pallas.check.registry import cases
from tests.kernels.interpreter import interpret, needs_interpreter

# The largest distance by kernel; that of others is their cases' tolerance.
LIMITS = {"top_k": 0.0, "mla_decode": 4e-3, "mla_prefill": 4e-3} | dict.fromkeys(
    ("mla_absorb", "mla_values", "mla_low_rank", "rms_norm", "grouped_matmul", "fp8_matmul", "hyper"), 3e-3
)
SMALL = {case.name: case for case in cases() if case.small}
# One of each way through a kernel; the others are slow, or further cases of kernels without a loop.
FAST = (
    "mla_decode/small-one-token", "router/small-one-group", "expert_layout/small-some", "top_k/small-ties",
    "grouped_matmul/small-gated", "fp8_matmul/small-two", "index_scores/small-fp8",
    "mla_absorb/small-parts", "mla_values/small-parts",
    "mla_low_rank/small-page-edges", "rms_norm/small-parts", "rms_norm/small-heads",
    "hyper/small-leave", "hyper/small-enter",
)  # fmt: skip
SHORT = ("mla_absorb/", "mla_values/", "mla_low_rank/", "rms_norm/", "hyper/")


def marked(name: str) -> Any:
    old = name.startswith(("mla_decode/", "mla_prefill/"))  # those jax 0.10 interprets, too
    further = pytest.mark.rest if name.startswith(SHORT) else pytest.mark.slow
    return pytest.param(
        name, marks=[*([] if name in FAST else [further]), *([] if old else [needs_interpreter])]
    )


@pytest.mark.parametrize("name", [marked(name) for name in SMALL])
def test_a_kernel_equals_its_reference_without_races(name):
    run = interpret(SMALL[name])
    assert not run.races
    assert run.distance <= LIMITS.get(name.split("/")[0], SMALL[name].tolerance)
