"""Normalisation with a residual and quantisation: oracles, and what the interpreter finds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from kernels_pallas.rms_norm import api
from kernels_pallas.weighed import Weighed
from tests.kernels.interpreter import distance, needs_interpreter, rounded

E4M3 = jnp.float8_e4m3fn


def random_rows(rng, *shape, dtype=jnp.bfloat16):
    return rng.normal(size=shape).astype(dtype)


def rms_norm(given, weight, eps, **options):
    """``api.rms_norm`` by XLA, in one program: (total, plain, quantised, that expanded)."""

    @jax.jit
    def run(given, weight):
        normed = api.rms_norm(given, weight, eps, implementation="xla", **options)
        return normed.total, normed.plain, normed.quantised, normed.quantised and normed.quantised.expand()

    return run(given, weight)


@pytest.mark.parametrize("with_residual", [True, False])
def test_rows_equal_those_of_float64(with_residual, rng):
    x, residual, weight = (random_rows(rng, *shape) for shape in ((5, 512), (5, 512), (512,)))
    given = [x, residual] if with_residual else [x]
    found, plain, quantised, rows = rms_norm(given, weight, 0.5, total=with_residual, plain=True)
    wide, more, w = (a.astype(np.float64) for a in (x, residual, weight))
    total = wide + more if with_residual else wide
    assert (found is None) == (not with_residual)
    expected = total / np.sqrt((total**2).mean(1, keepdims=True) + 0.5) * w
    if with_residual:
        assert distance(found, total) < rounded(1)
    assert distance(plain, expected) < rounded(2)  # and the total
    assert quantised is not None
    assert distance(rows[:5], expected) < rounded(1, E4M3)
    # The largest of a block uses the whole range.
    peaks = np.abs(np.asarray(quantised.values)[:5].astype(np.float32)).reshape(5, 4, 128).max(-1)
    assert (peaks == 448).all()


@pytest.mark.parametrize("heads_first", [True, False])
def test_heads_are_quantised_as_rows(heads_first, rng):
    x = random_rows(rng, 8, 3, 128)
    given = x if heads_first else x.swapaxes(0, 1)
    rows = jax.jit(lambda x: api.quantise(x, blocks_first=heads_first, implementation="xla").expand())(given)
    expected = x.astype(np.float64).transpose(1, 0, 2).reshape(3, -1)
    assert distance(rows[:3], expected) < rounded(1, E4M3)


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=[pytest.mark.rest, needs_interpreter])])
def test_results_of_experts_are_weighed(kernel, rng):
    x, weight, results = (random_rows(rng, *shape) for shape in ((3, 512), (512,), (9, 512)))
    results[8] = np.nan  # belongs to no token; a place past all rows must not read it
    place = np.array([[0, 1, 9], [4, 7, 2]], np.int32)
    weights = rng.random((2, 3)).astype(np.float32)
    weighed = Weighed(jnp.asarray(results), jnp.asarray(place), jnp.asarray(weights), (1, 3, 512))
    total = x.astype(np.float64)
    for (k, token), row in np.ndenumerate(place):
        total[token] += 0 if row == 9 else weights[k, token] * results[row].astype(np.float64)
    expected = total / np.sqrt((total**2).mean(1, keepdims=True) + 0.5) * weight.astype(np.float64)
    if kernel:
        options = {"implementation": "mosaic_gpu", "interpret": InterpretGPUParams()}
        plain = api.rms_norm([jnp.asarray(x), weighed], jnp.asarray(weight), 0.5, plain=True, **options).plain
    else:
        _, plain, *_ = rms_norm([x, weighed], weight, 0.5, plain=True)
    assert distance(plain, expected) < rounded(2)  # and the total


def test_parts_are_summed(rng):
    x, weight = random_rows(rng, 3, 5, 512, dtype=np.float32), random_rows(rng, 512)
    _, plain, _, _ = rms_norm([x], weight, 1e-6, plain=True)
    total = x.astype(np.float64).sum(0)
    expected = total / np.sqrt((total**2).mean(1, keepdims=True)) * weight.astype(np.float64)
    assert distance(plain, expected) < rounded(2)


def test_what_is_not_wanted_is_not_there():
    def shapes_of(**options):
        run = partial(api.rms_norm, eps=1e-6, implementation="xla", **options)
        rows, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((5, 512), (512,)))
        found = []
        jax.eval_shape(lambda x, weight: found.append(run([x], weight)), rows, weight)
        return found[0]

    assert shapes_of().plain is None
    assert shapes_of(plain=True, quantised=False).quantised is None
    with pytest.raises(ValueError, match="ask for one of them"):
        shapes_of(quantised=False)


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((4, 512), "float16", "dtype is float16, must be bfloat16 or float32"),
        ((4, 768), "bfloat16", "width over 512 is 256"),
        ((4, 16384), "bfloat16", "width past 8192 is 8192"),
    ],
)
def test_rows_that_the_kernel_cannot_normalise_are_refused(shape, dtype, match):
    run = partial(api.rms_norm, eps=1e-6, implementation="mosaic_gpu")
    x, weight = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], "float32")
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda x, weight: run([x], weight), x, weight)


@pytest.mark.parametrize(("shape", "match"), [((8, 3, 64), "block is 64"), ((6, 3, 128), "over 4 is 2")])
def test_heads_that_the_kernel_cannot_quantise_are_refused(shape, match):
    run = partial(api.quantise, blocks_first=True, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
