"""Figures of this machine for a report of a defect: versions, instructions, forms of programs, peaks."""

import os

import jax

from mtp_jax.api.demo import demo_model
from mtp_jax.api.llm import LLM
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench.machine import measure
from mtp_jax.lab.bench.report import environment
from mtp_jax.machine import converts_float16, memory_size, processor_features, program_folder
from mtp_jax.model.backend import backend
from mtp_jax.model.config import MlaConfig
from mtp_jax.model.device import compiler_options, multiplies_bf16, platform

# Instruction sets that choose among forms of a program, here or in XLA's code generator: of x86 and of ARM.
_SETS = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16"),
    *(
        "avx_vnni",
        "avx512_vnni",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
        "asimd",
        "asimdhp",
        "sve",
        "sve2",
        "bf16",
    ),
)


def figures() -> JsonObject:
    """All figures, by name. Half a minute without a compile cache.

    ``forms``: choices by device and processor. ``step_seconds``: the costs by depth that a server measures
    at its start, here with the embedded model and one request. ``peaks``: the machine's limits, to compare.
    """
    on, features = backend(), processor_features()
    dtypes = ("float32", "bfloat16") if platform() != "cpu" or multiplies_bf16() else ("float32",)
    peaks = {dtype: measure(dtype) for dtype in dtypes}
    return environment() | {
        "devices": [device.device_kind for device in jax.devices()],
        "memory_bytes": memory_size(),
        "instructions": [name for name in _SETS if name in features],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "compiler_options": compiler_options(),
        "compile_cache": program_folder(),
        "forms": {
            "float16_conversions": converts_float16(),
            "products": type(on.products).__name__,
            "attention": type(on.kinds[MlaConfig]).__name__,
            "experts": type(on.experts).__name__,
            "bfloat16_matrices": multiplies_bf16(),
        },
        "step_seconds": _step_seconds(),
        "peaks": {
            dtype: {"flops": found.flops, "bytes_per_second": found.bandwidth}
            for dtype, found in peaks.items()
        },
    }


def _step_seconds() -> dict[str, float]:
    """Seconds of a step by depth, as adaptive depth believes them after the warm-up."""
    llm = LLM(demo_model(), adaptive_depth=True, max_num_seqs=1, max_model_len=256)
    llm.warm_up([[0]])
    (ways,) = llm.engine.depth.measured.values()
    return {f"depth {depth}": seconds for (depth, _), seconds in sorted(ways.items())}


def lines(found: JsonObject) -> str:
    """The figures as lines of a name and a value, parts of a figure as ``figure.part``."""
    rows: dict[str, object] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, dict) and value:
            for part, inner in value.items():
                add(f"{name}.{part}", inner)
        else:
            rows[name] = ", ".join(map(str, value)) if isinstance(value, list) else value

    for name, value in found.items():
        add(name, value)
    width = max(map(len, rows))
    shown = {name: f"{value:,.4g}" if isinstance(value, float) else value for name, value in rows.items()}
    return "".join(f"{name:<{width}}  {value}\n" for name, value in shown.items())
