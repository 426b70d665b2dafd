"""FP8 checkpoints: e4m3 weights with one scale per 128x128 block (arXiv 2412.19437, section 3.3).

Blocks at the edge are partial: a [576, 7168] weight has a [5, 56] scale. The scale's tensor is called
``weight_scale_inv``, but weights are multiplied with it. Releases have it in float32, and some tools write it
in bfloat16; DeepSeek-V4's is called ``scale`` and is in ue8m0. float32 represents both exactly.
"""

import numpy as np

from mtp_jax.model.hf_quantization import FP8_BLOCK


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scale of a weight: one entry for every block, partial blocks included."""
    return tuple(-(-n // FP8_BLOCK) for n in shape)


def blocks(rows: range) -> range:
    """The range of rows of scales for some rows of a weight."""
    return range(rows.start // FP8_BLOCK, -(-rows.stop // FP8_BLOCK))


def has_nan(weight: np.ndarray) -> bool:
    """Whether float8_e4m3fn values include NaN: all bits of exponent and mantissa set."""
    return bool(((weight.view(np.uint8) & 0x7F) == 0x7F).any())


def dequantise(weight: np.ndarray, scale: np.ndarray, first: int, columns: range, out: np.ndarray) -> None:
    """Write ``weight * scale of its block`` for some rows of a weight into ``out``.

    Args:
        weight: float8_e4m3fn [rows, i], neighbouring rows.
        scale: float32 [blocks of these rows, ceil(i / 128)].
        first: the place of the first row in its block, within [0, 128).
        columns: range of columns to write, which must lie within [0, i).
        out: float32 or bfloat16 [rows, len(columns)].
    """
    # A table of all 256 values is several times faster than a cast.
    codes = np.arange(256, dtype=np.uint8).view(weight.dtype).astype(np.float32)
    of_column = np.arange(columns.start, columns.stop) // FP8_BLOCK
    for block, scales in enumerate(scale):
        some = slice(max(block * FP8_BLOCK - first, 0), (block + 1) * FP8_BLOCK - first)
        values = codes[weight[some, columns.start : columns.stop].view(np.uint8)]
        out[some] = values * scales[of_column]
