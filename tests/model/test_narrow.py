"""Numbers of few bits become float32 exactly, with instructions for float16 and without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.model import narrow


@pytest.mark.parametrize("instructions", [True, False])
def test_every_float16_is_itself(monkeypatch, instructions):
    monkeypatch.setattr(narrow, "converts_float16", lambda: instructions)
    bits = np.arange(2**16, dtype=np.uint16).view(np.int16)
    bits = bits[np.isfinite(bits.view(np.float16))]
    got = jax.jit(lambda x: narrow.float16_of_bits(x))(bits)
    np.testing.assert_array_equal(got, bits.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("instructions", [True, False])
def test_every_e4m3_is_itself(monkeypatch, instructions):
    monkeypatch.setattr(narrow, "converts_float16", lambda: instructions)
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    got = jax.jit(lambda x: narrow.e4m3_of_bits(x) * narrow.E4M3_UNIT)(codes.view(np.int8))
    np.testing.assert_array_equal(got, codes.view(jnp.float8_e4m3fn).astype(np.float32))
