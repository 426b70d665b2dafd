"""FP4 checkpoints: DeepSeek-V4's experts in e2m1 with a power of two per 32 inputs (OCP MX, MXFP4).

``X.weight`` is int8 [o, i / 2], two values to a byte, the low four bits first. ``X.scale`` is ue8m0
[o, i / 32]: 2^(x - 127).
"""

import numpy as np

from mtp_jax.checkpoint import four_bits

_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
PAIRS = four_bits.pairs(np.concatenate([_POSITIVE, -_POSITIVE]))
"""The two e2m1 values of each byte."""


def dequantise(codes: np.ndarray, scale: np.ndarray, columns: range, out: np.ndarray) -> None:
    """Write some rows of a weight into ``out``, see ``four_bits.dequantise``.

    Args:
        codes: int8 [rows, i / 2].
        scale: float8_e8m0fnu [rows, i / 32].
        columns: range of columns to write, which must lie within [0, i).
        out: float32 or bfloat16 [rows, len(columns)].
    """
    four_bits.dequantise(codes.view(np.uint8), scale.astype(np.float32), columns, out, PAIRS)
