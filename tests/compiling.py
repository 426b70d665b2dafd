"""How XLA compiles for tests: fast, as tiny programs run for milliseconds and take seconds to compile.

Without optimisation they take a third of that. Half of the gain is XLA's older emitter, which jaxlib has no
longer from 0.11 on. Results differ in their last bits from those of programs as they are for users, which
`make test-nightly` runs.
"""

import os
import threading
from importlib.metadata import version
from typing import Any

from mtp_jax.machine import converts_float16

# The older emitter converts e4m3 by way of float16.
_OLD_EMITTER = version("jaxlib").startswith("0.10.") and converts_float16()

# For a program whose very bits are tested: ``jax.jit(f, compiler_options=AS_FOR_USERS)``.
AS_FOR_USERS: dict[str, Any] = {"xla_backend_optimization_level": 3}
# XLA would split a program's kernels among threads that tests, one process for each core, have not.
FAST = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if _OLD_EMITTER:
    AS_FOR_USERS["xla_cpu_use_fusion_emitters"] = True
    FAST.append("--xla_cpu_use_fusion_emitters=false")


NEEDS_FLOAT16 = (
    "needs a processor with F16C, and XLA_FLAGS that allow AVX: XLA converts float16 in no other way"
)


def lacks_float16(error: BaseException) -> bool:
    """Whether XLA could not compile a program because float16 cannot be converted here.

    Nearly all that XLA does with e4m3, but for conversions to float32 and from it, goes by way of float16.
    """
    return not converts_float16() and "Failed to materialize symbols" in str(error)


def compile_fast() -> None:
    """Have XLA compile fast, in this process and in those that it starts. Before jax is imported."""
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*FAST, *given]))


def share_contexts() -> None:
    """Lower 500 programs of a thread in one MLIR context, which costs a fifth of an operation's compilation.

    jax makes one for each, and has no option. What they have in common stays in a context, so it is renewed.
    """
    from jax._src.interpreters import mlir

    make, mine = mlir.make_ir_context, threading.local()

    def shared() -> Any:
        left = getattr(mine, "left", 0)
        if not left:
            mine.context = make()
        mine.left = (left or 500) - 1
        return mine.context

    mlir.make_ir_context = shared
