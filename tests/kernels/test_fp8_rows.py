"""Rows packed as FP8: what the bytes are, what is lost, and what happens to odd values."""

import jax
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.mla_decode.fp8_rows import pack, unpack
from tests.rounding import near

PACK, UNPACK = (jax.jit(f, static_argnums=1) for f in (pack, unpack))


def rows(rank: int, rope: int) -> np.ndarray:
    random = np.random.default_rng(rank)
    loud = np.exp(3 * random.normal(size=(4, 3, 1)))
    return (loud * random.normal(size=(4, 3, rank + rope))).astype(np.float32)


@pytest.mark.parametrize(("rank", "rope", "size"), [(512, 64, 656), (192, 32, 264), (24, 8, 44)])
def test_bytes_of_a_row(rank, rope, size):
    """Written out anew in numpy; a last block may be partial."""
    x = rows(rank, rope)
    words, scales = (np.asarray(a) for a in PACK(x, rank))
    assert (words.dtype, scales.dtype) == (np.uint16, np.float32)
    assert words.nbytes + scales.nbytes == 4 * 3 * size
    again = np.asarray(UNPACK((words, scales), rank))
    halves = words[..., : rank // 2]
    values = np.concatenate([halves & 0xFF, halves >> 8], -1).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    for i in range(0, rank, 128):
        block, scale = x[..., i : min(i + 128, rank)], scales[..., i // 128, None]
        near(scale[..., 0], np.abs(block).max(-1) / 448, 2)
        got = values[..., i : i + 128].astype(np.float32) * scale
        # Four significant bits; below 2^-6 of the scale steps of 2^-9.
        assert (np.abs(got - block) <= np.maximum(np.abs(block) / 16, scale / 2**10)).all()
        np.testing.assert_array_equal(again[..., i : i + block.shape[-1]], got)
    key = words[..., rank // 2 :].copy().view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(key, x[..., rank:].astype(ml_dtypes.bfloat16))


def test_packing_again_changes_nothing():
    once = UNPACK(PACK(rows(512, 64), 512), 512)
    near(UNPACK(PACK(once, 512), 512), once, 2)


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden():
    x = rows(256, 8)[:1]
    x[0, 0, 5], x[0, 1, 200], x[0, 2] = np.nan, np.inf, 0
    got = np.asarray(UNPACK(PACK(x, 256), 256))[0]
    assert not np.isfinite(got[0, 5])
    assert not np.isfinite(got[1, 200])
    np.testing.assert_array_equal(got[2], 0)
    # Zeros, which hidden rows become, are rows of zeros.
    nothing = np.zeros((4, 3, 136), np.uint16), np.zeros((4, 3, 2), np.float32)
    np.testing.assert_array_equal(UNPACK(nothing, 256), 0)
