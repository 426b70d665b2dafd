"""Products in bfloat16: accumulated in float32 and rounded once, for any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.model.backend import xla, xla_cpu
from mtp_jax.model.products.plain import Products

_IN, _OUT = 96, 40


@pytest.fixture(params=[xla().products, xla_cpu().products], ids=["xla", "xla_cpu"])
def on(request: pytest.FixtureRequest) -> Products:
    return request.param


def _inputs(rows: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """x, w, and their product in float64."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, _IN)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((_OUT, _IN)), jnp.bfloat16)
    return x, w, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 65])
def test_linear_rounds_to_bfloat16_once(rows, on):
    x, w, exact = _inputs(rows)
    y = jax.jit(on.linear)(x, w)
    assert (y.shape, y.dtype) == ((rows, _OUT), jnp.bfloat16)
    # Half a unit in the last of bfloat16's 8 bits, and float32's rounding of sums that almost cancel.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 65])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_logits_are_not_rounded_to_the_tables_dtype(rows, dtype, on):
    x, w, exact = _inputs(rows)
    logits = jax.jit(on.head)(x.astype(dtype), w.astype(dtype))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-4)


def test_linear_keeps_every_axis_of_rows_and_weight(on):
    x, w, exact = _inputs(6)
    y = on.linear(x.reshape(2, 3, _IN), w.reshape(2, 20, _IN))
    assert y.shape == (2, 3, 2, 20)
    np.testing.assert_allclose(np.asarray(y, np.float64).reshape(6, _OUT), exact, rtol=2**-8, atol=1e-4)
