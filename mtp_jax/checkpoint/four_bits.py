"""Weights of four bits in files, two to a byte, with a scale for each group of inputs."""

import numpy as np
from numpy.typing import ArrayLike


def pairs(values: ArrayLike) -> np.ndarray:
    """The two values of each byte, float32 [256, 2], the low four bits first, from the value of each code."""
    table = np.asarray(values, np.float32)
    codes = np.arange(256)
    return np.stack([table[codes & 15], table[codes >> 4]], axis=-1)


def dequantise(
    packed: np.ndarray, scale: np.ndarray, columns: range, out: np.ndarray, values: np.ndarray
) -> None:
    """Write ``value * scale of its group`` for some rows of a weight into ``out``.

    Products are float32, and rounded to the dtype of ``out`` once.

    Args:
        packed: uint8 [rows, i / 2].
        scale: float32 [rows, i / group].
        columns: range of columns to write, which must lie within [0, i).
        out: float32 or bfloat16 [rows, len(columns)].
        values: the two values of each byte, from ``pairs``.
    """
    group = packed.shape[1] * 2 // scale.shape[1]
    first, last = columns.start // 2, -(-columns.stop // 2)
    found = values[packed[:, first:last]].reshape(len(packed), 2 * (last - first))
    skipped = columns.start - first * 2
    of_column = np.arange(columns.start, columns.stop) // group
    out[...] = found[:, skipped : skipped + len(columns)] * scale[:, of_column]
