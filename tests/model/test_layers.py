"""Products in bfloat16: accumulated in float32 and rounded once, for any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.model.backend import xla, xla_cpu
from mtp_jax.model.products.plain import Products
from tests.rounding import error, near, roundoff

_IN, _OUT = 96, 40


@pytest.fixture(params=[xla().products, xla_cpu().products], ids=["xla", "xla_cpu"])
def on(request: pytest.FixtureRequest) -> Products:
    return request.param


def _inputs(rows: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """x, w, and their product in float64."""
    rng = np.random.default_rng(rows)
    x, w = (jnp.asarray(rng.standard_normal((n, _IN)).astype(jnp.bfloat16)) for n in (rows, _OUT))
    return x, w, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


def rounded_once(y, exact: np.ndarray) -> None:
    """Half a unit in the last of bfloat16's 8 bits, and float32's rounding of sums that almost cancel."""
    sums = error(_IN, np.abs(exact).max())
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=roundoff(jnp.bfloat16), atol=sums)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 65])
def test_linear_rounds_to_bfloat16_once(rows, on):
    x, w, exact = _inputs(rows)
    y = jax.jit(on.linear)(x, w)
    assert (y.shape, y.dtype) == ((rows, _OUT), jnp.bfloat16)
    rounded_once(y, exact)


@pytest.mark.parametrize("rows", [1, 4, 65])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_logits_are_not_rounded_to_the_tables_dtype(rows, dtype, on):
    x, w, exact = _inputs(rows)
    logits = jax.jit(on.head)(*(jnp.asarray(np.asarray(a).astype(dtype)) for a in (x, w)))
    assert logits.dtype == jnp.float32
    near(logits, exact, _IN)


def test_linear_keeps_every_axis_of_rows_and_weight(on):
    x, w, exact = _inputs(6)
    y = jax.jit(on.linear)(*(jnp.asarray(np.asarray(a).reshape(2, -1, _IN)) for a in (x, w)))
    assert y.shape == (2, 3, 2, 20)
    rounded_once(np.asarray(y).reshape(6, _OUT), exact)
