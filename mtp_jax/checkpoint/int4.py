"""int4 checkpoints: compressed-tensors' pack-quantized format, symmetric, with a scale per group of inputs.

``X.weight_packed`` is int32 [o, i / 8]: value j of a word, plus 8, is in its bits 4 j to 4 j + 3.
``X.weight_scale`` is [o, i / group], in any float type. ``X.weight_shape`` is [o, i] as two numbers.
There is no ``X.weight``.
"""

import numpy as np

from mtp_jax.checkpoint import four_bits

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"

_PAIRS = four_bits.pairs(np.arange(-8, 8))


def dequantise(words: np.ndarray, scale: np.ndarray, columns: range, out: np.ndarray) -> None:
    """Write some rows of a weight into ``out``, see ``four_bits.dequantise``.

    Args:
        words: int32 [rows, i / 8]. Words are little-endian in files.
        scale: bfloat16, float16 or float32 [rows, i / group].
        columns: range of columns to write, which must lie within [0, i).
        out: float32 or bfloat16 [rows, len(columns)].
    """
    packed = np.ascontiguousarray(words).view(np.uint8)
    four_bits.dequantise(packed, scale.astype(np.float32), columns, out, _PAIRS)
