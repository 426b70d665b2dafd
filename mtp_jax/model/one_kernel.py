"""Functions of a few numbers, compiled as one kernel each on a CPU.

XLA on a CPU makes a kernel of every fusion, and a fusion ends at each reduction, gather or loop. A kernel
takes 20 to 30 ms to compile and 1.7 us to launch, however small, and sums of a few numbers become a dozen.
XLA compiles a small loop as one kernel, its body included, in a call that it marks. The same mark on a call
of any function does the same to that function. Where XLA does not know the mark the call is a call.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from mtp_jax.model.device import platform

F = TypeVar("F", bound=Callable[..., Any])

_MARKS = {"xla_cpu_small_call": "true", "inlineable": "false"}
# XLA hands a reduction of so many float32 to a library (YNNPACK), which no such kernel can call. Fewer are
# at most 16 KiB, half of a core's first cache, which one core reads in a microsecond.
MOST_NUMBERS = 4095


def one_kernel(f: F) -> F:
    """Compile ``f`` as one kernel on a CPU, where it has few enough numbers; elsewhere it is itself.

    Every call is a kernel of its own, where XLA compiles equal fusions once: it is for what a program
    computes once, or in a loop (``Xla.small``).

    f: of arrays and trees of arrays, all of which it uses: XLA ends the process over some that are not used
    (``tests/model/test_one_kernel.py``). It neither sorts nor multiplies matrices, which libraries do, nor
    reduces an array of float32 that is larger than its arguments together.
    """
    jitted = jax.jit(f)

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        if platform() != "cpu" or sum(a.size for a in jax.tree.leaves(args)) > MOST_NUMBERS:
            return f(*args)
        with set_xla_metadata(**_MARKS):
            return jitted(*args)

    return run  # type: ignore[return-value]
