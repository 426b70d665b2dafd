"""The low ranks' norms, the key's rotation and the cache write: oracles, and what the interpreter finds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.cases.mla_low_rank import LowRankShape, case, inputs
from kernels_pallas.mla_low_rank.api import check, mla_low_rank
from kernels_pallas.mla_low_rank.mosaic_gpu import PAIRS, RANK
from tests.kernels.interpreter import distance, interpret, needs_interpreter, rounded

EDGES = LowRankShape(3, (0, 6, -1, 15), q_rank=512, page=8, columns=2)


def exact(q, kv, q_norm, kv_norm, angles, pages, page_table, positions, *, eps, interleaved):
    """Token by token, the key's pairs as complex numbers, in float64."""

    def normed(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)

    sums = (np.asarray(x, np.float64).sum(0)[: positions.size] for x in (q, kv))
    q, kv = (x.reshape(*positions.shape, -1) for x in sums)
    key, (cos, sin) = kv[..., RANK:], (np.asarray(x, np.float64) for x in angles)
    pairs = key[..., ::2] + 1j * key[..., 1::2] if interleaved else key[..., :PAIRS] + 1j * key[..., PAIRS:]
    pairs = pairs * (cos + 1j * sin)
    rows = np.concatenate([normed(kv[..., :RANK], kv_norm), pairs.real, pairs.imag], axis=-1)
    low = normed(q, q_norm).reshape(-1, q.shape[-1])
    if pages is None:
        return low, rows
    pages = np.array(pages, np.float64)
    for slot, token in np.ndindex(positions.shape):
        position = int(positions[slot, token])
        if 0 <= position < page_table.shape[1] * pages.shape[1]:
            page, row = divmod(position, pages.shape[1])
            pages[page_table[slot, page], row] = rows[slot, token]
    return low, pages


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "shape", [EDGES, replace(EDGES, q_parts=2, kv_parts=3), replace(EDGES, written=False)]
)
def test_reference_equals_float64(shape, interleaved):
    given = jax.jit(partial(inputs, shape))(jax.random.key(1))

    @jax.jit
    def run(*given):
        low, out = mla_low_rank(*given, eps=0.1, interleaved=interleaved, implementation="xla")
        return low.expand(), out

    low, out = run(*given)
    want_low, want = exact(*given, eps=0.1, interleaved=interleaved)
    assert distance(low, want_low) < rounded(1, jnp.float8_e4m3fn)
    assert distance(out, want) < rounded(2)  # in the norm and in the cache
    if shape.written:
        changed = (np.asarray(out, np.float64) != np.asarray(given[5], np.float64)).any(-1)
        # Of the slots' tokens: three, three, none of an idle slot, and one before its pages end.
        assert changed.sum() == 3 + 3 + 0 + 1


@pytest.mark.parametrize(
    ("what", "change", "match"),
    [
        ("q", lambda x: x[..., :500], "width over 512 is 500"),
        ("kv", lambda x: x.astype(jnp.float16), "latents is float16, must be bfloat16 or float32"),
        ("kv", lambda x: x[..., :-32], "rope dimensions is 32, must be 64"),
        ("kv_norm", lambda x: x[:256], "latent rank is 256, must be 512"),
        ("pages", lambda x: x.astype(jnp.float32), "dtype of the cache is float32, must be bfloat16"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(what, change, match):
    q, kv, _, kv_norm, _, pages, *_ = jax.eval_shape(partial(inputs, EDGES), jax.random.key(0))
    given = {"q": q, "kv": kv, "kv_norm": kv_norm, "pages": pages}
    check(**given)
    with pytest.raises(ValueError, match=match):
        check(**given | {what: jax.eval_shape(change, given[what])})


@needs_interpreter
def test_two_tokens_that_write_one_row_are_a_race(capfd):
    def clashing(key):
        *given, positions = edges.inputs(key)
        return *given, jnp.zeros_like(positions)

    edges = case("clash", EDGES)
    assert interpret(replace(edges, inputs=clashing)).races
    capfd.readouterr()  # every race is printed
