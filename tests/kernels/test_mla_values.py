"""Results of attention merged, taken out of the latent space and quantised by one kernel."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.cases.mla_values import ValuesShape, case, inputs, shapes
from kernels_pallas.mla_values.api import check, mla_values
from kernels_pallas.mla_values.mosaic_gpu import MOST
from tests.kernels.interpreter import distance, needs_interpreter, notices, rounded, without

FEW = ValuesShape(2, 2, 3, 4)


def exact(mixed, v_up, window):
    """Token by token, head by head, in float64."""
    out, lse = (np.asarray(x, np.float64) for x in (mixed.out, mixed.lse))
    (_, slots, height, _), (heads, width, _) = out.shape, v_up.shape
    v_up, per_block = np.asarray(v_up, np.float64), height // lse.shape[2]
    values = np.empty((slots * window, heads, width))
    for slot, token, head in np.ndindex(slots, window, heads):
        row = token * (height // window) + head
        weights = 2 ** lse[:, slot, row // per_block, row % per_block]
        latents = weights @ out[:, slot, row] / weights.sum()
        values[slot * window + token, head] = v_up[head] @ latents
    return values.reshape(slots * window, -1)


@pytest.mark.parametrize("shape", [FEW, replace(FEW, splits=1), replace(FEW, width=256)])
def test_reference_equals_float64(shape):
    mixed, v_up = jax.jit(partial(inputs, shape))(jax.random.key(1))
    run = jax.jit(partial(mla_values, window=shape.window, implementation="xla"))
    found = np.asarray(run(mixed, v_up).expand())[: shape.tokens]
    # Rounded to e4m3 once; to bfloat16 before, which is far less.
    assert distance(found, exact(mixed, v_up, shape.window)) < rounded(1.1, jnp.float8_e4m3fn)


@needs_interpreter
@pytest.mark.rest
@pytest.mark.parametrize("what", ["await_latents", "await_values"])
def test_a_missing_wait_is_noticed(what, monkeypatch, capfd):
    without(monkeypatch, "barrier_wait", f"mla_values.<locals>.body.<locals>.{what}")
    assert notices(case("small-parts", shapes()["small-parts"]))
    capfd.readouterr()  # every race is printed


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": MOST + 1}, "tokens past the most, 8, is 1, must be 0"),
        ({"v_up": jax.ShapeDtypeStruct((3, 128, 512), jnp.float32)}, "up-projection is float32, must be"),
        ({"v_up": jax.ShapeDtypeStruct((3, 128, 256), jnp.bfloat16)}, "latent rank is 256, must be 512"),
        ({"v_up": jax.ShapeDtypeStruct((3, 192, 512), jnp.bfloat16)}, "width over 128 is 64, must be 0"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change, match):
    given = {"tokens": MOST, "v_up": jax.ShapeDtypeStruct((3, 128, 512), jnp.bfloat16)}
    check(**given)
    with pytest.raises(ValueError, match=match):
        check(**given | change)
