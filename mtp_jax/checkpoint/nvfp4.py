"""NVFP4 checkpoints: e2m1 with an e4m3 scale per 16 inputs, and a float32 scale of the whole weight.

    ModelOpt:            X.weight, X.weight_scale, X.weight_scale_2, which multiplies
    compressed-tensors:  X.weight_packed, X.weight_scale, X.weight_global_scale, which divides

Codes are uint8 [o, i / 2], two values to a byte, the low four bits first, and are called X.weight here in
either layout. Scales of inputs (input_scale, input_global_scale) are not read, as products take inputs in
whole precision.
"""

from collections.abc import Mapping

import numpy as np

from mtp_jax.checkpoint import four_bits, fp4
from mtp_jax.checkpoint.safetensors_file import Tensor

SCALE, TIMES, OVER = "_scale", "_scale_2", "_global_scale"
"""Endings of names behind a weight's: scales of groups, and the whole weight's in either layout."""


def whole(tensors: Mapping[str, Tensor], name: str) -> np.float32:
    """The scale of a whole weight by its name; 1 where the layout has none."""
    return tensors[name].array()[0] if name in tensors else np.float32(1)


def dequantise(
    codes: np.ndarray, scale: np.ndarray, times: np.float32, over: np.float32, columns: range, out: np.ndarray
) -> None:
    """Write some rows of a weight into ``out``, see ``four_bits.dequantise``.

    Args:
        codes: uint8 [rows, i / 2].
        scale: float8_e4m3fn [rows, i / 16].
        times, over: the factor and the divisor of all scales; 1 for the one that a layout lacks.
        columns: range of columns to write, which must lie within [0, i).
        out: float32 or bfloat16 [rows, len(columns)].
    """
    four_bits.dequantise(codes, scale.astype(np.float32) * times / over, columns, out, fp4.PAIRS)
