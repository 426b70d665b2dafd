"""FP8 checkpoints: e4m3 weights with one float32 scale per 128x128 block (arXiv 2412.19437, section 3.3).

Blocks at the edge are partial: a [576, 7168] weight has a [5, 56] scale. The tensor is called
``weight_scale_inv`` and is nevertheless multiplied with.
"""

import numpy as np

from mtp_jax.model.hf_quantization import FP8_BLOCK

SCALE_SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scale of a weight: one entry for every block, partial ones included."""
    return tuple(-(-n // FP8_BLOCK) for n in shape)


def has_nan(weight: np.ndarray) -> bool:
    """Whether float8_e4m3fn values have NaN among them: all bits of exponent and mantissa set."""
    return bool(((weight.view(np.uint8) & 0x7F) == 0x7F).any())


def dequantise(weight: np.ndarray, scale: np.ndarray, rows: range, columns: range, out: np.ndarray) -> None:
    """Write ``weight * scale of its block`` for a rectangle of the weight into ``out``.

    Args:
        weight: float8_e4m3fn [o, i].
        scale: float32 [ceil(o / 128), ceil(i / 128)].
        rows: rows wanted, within [0, o).
        columns: columns wanted, within [0, i).
        out: float32 or bfloat16 [len(rows), len(columns)].
    """
    # A table of all 256 values is several times faster than a cast.
    codes = np.arange(256, dtype=np.uint8).view(weight.dtype).astype(np.float32)
    of_column = np.arange(columns.start, columns.stop) // FP8_BLOCK
    for block in range(rows.start // FP8_BLOCK, -(-rows.stop // FP8_BLOCK)):
        start, stop = max(rows.start, block * FP8_BLOCK), min(rows.stop, (block + 1) * FP8_BLOCK)
        values = codes[weight[start:stop, columns.start : columns.stop].view(np.uint8)]
        out[start - rows.start : stop - rows.start] = values * scale[block, of_column]
