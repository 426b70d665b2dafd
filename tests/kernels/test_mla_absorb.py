"""Queries taken into the latent space and rotated, by one kernel: oracles, and what the interpreter finds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.cases.mla_absorb import AbsorbShape, inputs
from kernels_pallas.mla_absorb.api import check, mla_absorb
from kernels_pallas.mla_absorb.mosaic_gpu import MOST, PAIRS
from tests.kernels.interpreter import distance, rounded

FEW = AbsorbShape(2, 2, 3, parts=2, rows=7)


def exact(q, k_up, angles, *, interleaved):
    """Token by token, head by head, pairs as complex numbers, in float64."""
    cos, sin = (np.asarray(x, np.float64) for x in angles)
    (heads, nope, rank), (slots, window) = k_up.shape, cos.shape[:2]
    k_up = np.asarray(k_up, np.float64)
    whole = np.asarray(q, np.float64).sum(0).reshape(q.shape[1], heads, -1)
    inward, rope = np.empty((slots, window, heads, rank)), np.empty((slots, window, heads, 2 * PAIRS))
    for slot, token, head in np.ndindex(slots, window, heads):
        first, last = np.split(whole[slot * window + token, head], [nope])
        inward[slot, token, head] = first @ k_up[head]
        pairs = last[::2] + 1j * last[1::2] if interleaved else last[:PAIRS] + 1j * last[PAIRS:]
        turned = pairs * (cos + 1j * sin)[slot, token]
        rope[slot, token, head] = np.concatenate([turned.real, turned.imag])
    return inward, rope


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [FEW, replace(FEW, parts=0), replace(FEW, nope=192)])
def test_reference_equals_float64(shape, interleaved):
    given = jax.jit(partial(inputs, shape))(jax.random.key(1))
    found = jax.jit(partial(mla_absorb, interleaved=interleaved, implementation="xla"))(*given)
    for got, want in zip(found, exact(*given, interleaved=interleaved), strict=True):
        assert distance(got, want) < rounded(2)  # the sum of parts, and the result


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": jax.ShapeDtypeStruct((3, 3, 576), jnp.float32)}, "tokens past the most, 8, is 1, must be 0"),
        ({"q": jax.ShapeDtypeStruct((2, 2, 576), jnp.float16)}, "queries is float16, must be bfloat16 or"),
        ({"q": jax.ShapeDtypeStruct((2, 2, 480), jnp.bfloat16)}, "rope dimensions is 32, must be 64"),
        ({"k_up": jax.ShapeDtypeStruct((3, 128, 256), jnp.bfloat16)}, "latent rank is 256, must be 512"),
        ({"k_up": jax.ShapeDtypeStruct((3, 128, 512), jnp.float32)}, "up-projection is float32, must be"),
        ({"k_up": jax.ShapeDtypeStruct((4, 80, 512), jnp.bfloat16)}, "width over 64 is 16, must be 0"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change, match):
    _, k_up, _ = jax.eval_shape(partial(inputs, FEW), jax.random.key(0))
    given = {"q": jax.ShapeDtypeStruct((2, MOST // 2, 576), jnp.bfloat16), "k_up": k_up}
    check(**given)
    with pytest.raises(ValueError, match=match):
        check(**given | change)
