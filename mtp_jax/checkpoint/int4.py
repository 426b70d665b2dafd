"""int4 checkpoints: compressed-tensors' pack-quantized format, symmetric, with a scale per group of inputs.

``X.weight_packed`` is int32 [o, i / 8]: value j of a word, plus 8, is in its bits 4 j to 4 j + 3.
``X.weight_scale`` is [o, i / group], in any float type. ``X.weight_shape`` is [o, i] as two numbers.
There is no ``X.weight``.
"""

import numpy as np

from mtp_jax.model.hf_quantization import INT4_PER_WORD

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"

# The two int4 values of each byte, low bits first, as words are little-endian in files.
_PAIRS = np.array([[(byte & 15) - 8, (byte >> 4) - 8] for byte in range(256)], np.float32)


def dequantise(words: np.ndarray, scale: np.ndarray, columns: range, out: np.ndarray) -> None:
    """Write ``value * scale of its group`` for some rows of a weight into ``out``.

    Products are float32, and rounded to the dtype of ``out`` once.

    Args:
        words: int32 [rows, i / 8].
        scale: bfloat16, float16 or float32 [rows, i / group].
        columns: range of columns to write, within [0, i).
        out: float32 or bfloat16 [rows, len(columns)].
    """
    group = words.shape[1] * INT4_PER_WORD // scale.shape[1]
    first, last = columns.start // INT4_PER_WORD, -(-columns.stop // INT4_PER_WORD)
    packed = np.ascontiguousarray(words[:, first:last])
    values = _PAIRS[packed.view(np.uint8)].reshape(len(words), packed.shape[1] * INT4_PER_WORD)
    skipped = columns.start - first * INT4_PER_WORD
    of_column = np.arange(columns.start, columns.stop) // group
    out[...] = values[:, skipped : skipped + len(columns)] * scale.astype(np.float32)[:, of_column]
