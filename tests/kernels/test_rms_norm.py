"""Normalisation with a residual and quantisation: oracles, and what the interpreter finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.checking.registry import cases
from kernels_pallas.rms_norm import api
from tests.kernels.interpreter import distance, interpret, needs_fences

SMALL = {case.name: case for case in cases("rms_norm/") if case.small}


def random_rows(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@pytest.mark.parametrize("with_residual", [True, False])
def test_rows_equal_those_of_float64(with_residual):
    x, residual, weight = random_rows(0, 5, 512), random_rows(1, 5, 512), random_rows(2, 512)
    given = [x, residual] if with_residual else [x]
    normed = api.rms_norm(given, weight, 0.5, total=with_residual, plain=True, implementation="xla")
    wide, more, w = (np.asarray(a, np.float64) for a in (x, residual, weight))
    total = wide + more if with_residual else wide
    assert (normed.total is None) == (not with_residual)
    expected = total / np.sqrt((total**2).mean(1, keepdims=True) + 0.5) * w
    if with_residual:
        assert distance(normed.total, total) < 3e-3
    assert distance(normed.plain, expected) < 5e-3
    assert normed.quantised is not None
    assert distance(normed.quantised.expand()[:5], expected) < 0.03
    # The largest of a block uses the whole range.
    peaks = np.abs(np.asarray(normed.quantised.values[:5].astype(jnp.float32))).reshape(5, 4, 128).max(-1)
    assert (peaks == 448).all()


@pytest.mark.parametrize("heads_first", [True, False])
def test_heads_are_quantised_as_rows(heads_first):
    x = random_rows(3, 8, 3, 128)
    given = x if heads_first else x.swapaxes(0, 1)
    rows = api.quantise(given, blocks_first=heads_first, implementation="xla")
    expected = np.asarray(x, np.float64).transpose(1, 0, 2).reshape(3, -1)
    assert distance(rows.expand()[:3], expected) < 0.03


def test_parts_are_summed():
    x, weight = jax.random.normal(jax.random.key(4), (3, 5, 512)), random_rows(2, 512)
    normed = api.rms_norm([x], weight, 1e-6, plain=True, implementation="xla")
    total = np.asarray(x, np.float64).sum(0)
    expected = total / np.sqrt((total**2).mean(1, keepdims=True)) * np.asarray(weight, np.float64)
    assert distance(normed.plain, expected) < 5e-3


def test_what_is_not_wanted_is_not_there():
    x, weight = random_rows(0, 5, 512), random_rows(2, 512)
    assert api.rms_norm([x], weight, 1e-6, implementation="xla").plain is None
    plain = api.rms_norm([x], weight, 1e-6, plain=True, quantised=False, implementation="xla")
    assert plain.quantised is None
    with pytest.raises(ValueError, match="ask for one of them"):
        api.rms_norm([x], weight, 1e-6, quantised=False, implementation="xla")


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((4, 512), "float16", "dtype is float16, must be bfloat16 or float32"),
        ((4, 768), "bfloat16", "width over 512 is 256"),
        ((4, 16384), "bfloat16", "width past 8192 is 8192"),
    ],
)
def test_rows_that_the_kernel_cannot_normalise_are_refused(shape, dtype, match):
    with pytest.raises(ValueError, match=match):
        api.rms_norm([jnp.zeros(shape, dtype)], jnp.ones(shape[1]), 1e-6, implementation="mosaic_gpu")


@pytest.mark.parametrize(("shape", "match"), [((8, 3, 64), "block is 64"), ((6, 3, 128), "over 4 is 2")])
def test_heads_that_the_kernel_cannot_quantise_are_refused(shape, match):
    with pytest.raises(ValueError, match=match):
        api.quantise(jnp.zeros(shape, jnp.bfloat16), blocks_first=True, implementation="mosaic_gpu")


@needs_fences
@pytest.mark.parametrize("name", SMALL)
def test_kernels_equal_their_reference_without_races(name):
    run = interpret(SMALL[name])
    assert not run.races
    assert run.distance < 3e-3
