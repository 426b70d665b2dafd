"""MLA prefill: the reference against float64, and the kernel, interpreted, against the reference."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.baselines.mla_prefill import xla
from kernels_pallas.check.cases.mla_prefill import (
    DEEPSEEK,
    GLM,
    PrefillShape,
    case,
    counted,
    expanded,
    latent,
    over_rows,
    shapes,
)
from kernels_pallas.mla_prefill.api import attend, merge
from kernels_pallas.mla_prefill.sizes import ROPE, HeadWidths, key_widths, value_widths
from kernels_pallas.visible import chain
from tests.kernels.interpreter import distance, needs_interpreter, notices, rounded, without
from tests.rounding import near


def exact(q, k, k_rope, v, seen, scale):
    """Query by query and head by head, in float64; the output, and log2 of the sums of exponentials."""
    q, k, k_rope, v = (np.asarray(x, np.float64) for x in (q, k, k_rope, v))
    (slots, queries, heads, _), own = q.shape, k.shape[-1]
    out, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.full((slots, heads, queries), -1e30)
    for b, t, n in np.ndindex(slots, queries, heads):
        rows = np.flatnonzero(seen[b, t])
        if len(rows):
            scores = k[b, rows, n] @ q[b, t, n, :own] + k_rope[b, rows] @ q[b, t, n, own:]
            weights = np.exp(scores * scale)
            out[b, t, n] = weights @ v[b, rows, n] / weights.sum()
            lse[b, n, t] = np.log2(weights.sum())
    return out, lse


@pytest.mark.parametrize("sizes", [DEEPSEEK, GLM])
def test_reference_equals_float64(sizes):
    shape = PrefillShape(2, 7, (7, 3, 0), (5, 0, 9), begin=1, sizes=sizes)
    # Apart from what reads them, or XLA would leave out their rounding to bfloat16.
    q, k, k_rope, v, visible = jax.jit(partial(expanded, shape))(jax.random.key(1))

    @jax.jit
    def run(*inputs):
        by_reference = attend(*inputs, scale=shape.scale, implementation="xla")
        return by_reference, xla(*inputs, scale=shape.scale), visible.mask(7, shape.rows)

    (out, lse), baseline, seen = run(q, k, k_rope, v, visible)
    seen = np.asarray(seen)
    some = np.asarray(seen.any(-1))
    expected, expected_lse = exact(q, k, k_rope, v, seen, shape.scale)
    assert distance(out, expected) < rounded(1)  # the output
    assert not np.asarray(out, np.float64)[~some].any()
    some_lse = np.moveaxis(some, 1, -1)[:, None] & np.ones((1, lse.shape[1], 1), bool)
    assert (np.asarray(lse)[~some_lse] <= -1e30).all()
    # Terms of a score, and of the sum of their exponentials.
    near(np.asarray(lse)[some_lse], expected_lse[some_lse], q.shape[-1] + shape.rows)
    # Probabilities and the output are rounded.
    assert distance(np.asarray(baseline, np.float64)[some], expected[some]) < rounded(2)


def test_blocks_of_history_merge_to_the_whole():
    shape = PrefillShape(2, 9, (9, 4), (150, 300), block=128)

    @jax.jit
    def run(*inputs):
        by_xla = partial(over_rows, scale=shape.scale, implementation="xla")
        return [counted(partial(by_xla, n), *inputs)[0] for n in (512, 128)]

    whole, blocks = run(*jax.jit(partial(latent, shape))(jax.random.key(2)))
    assert distance(blocks, whole) < rounded(3)  # both outputs, and that of a block


def test_merging_with_nothing_changes_nothing():
    out, lse = np.ones((1, 2, 1, 4), np.float32), np.array([[[3.0, -1e30]]], np.float32)
    merged, total = jax.jit(merge)((out, lse), (np.zeros_like(out), np.full_like(lse, -1e30)))
    assert merged[0, 0].tolist() == out[0, 0].tolist()
    assert total[0, 0, 0] == 3
    assert np.isfinite(merged).all()


@pytest.mark.parametrize(
    ("q", "k", "k_rope", "v", "dtype", "match"),
    [
        (192, 128, 64, 128, "float32", "dtypes"),
        (160, 128, 32, 128, "bfloat16", "shared key is 32, must be 64"),
        (224, 128, 64, 128, "bfloat16", "query is 224, must be 192"),
        (160, 96, 64, 128, "bfloat16", "own key is 96, must be 64 or 128 or 192 or 256 or 320"),
        (448, 384, 64, 64, "bfloat16", "own key is 384"),
        (256, 192, 64, 320, "bfloat16", r"keys of 192 \+ 64 is 320, must be 64 or 128 or 192 or 256"),
        (320, 256, 64, 256, "bfloat16", r"keys of 256 \+ 64 is 256, must be 64 or 128;"),
        (128, 64, 64, 256, "bfloat16", r"keys of 64 \+ 64 is 256, must be 64 or 128 or 192;"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(q, k, k_rope, v, dtype, match):
    shapes = (1, 4, 2, q), (1, 8, 2, k), (1, 8, k_rope), (1, 8, 2, v)

    def run(length, q, k, k_rope, v):
        return attend(q, k, k_rope, v, chain(length, 4), scale=0.1, implementation="mosaic_gpu")

    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, jax.ShapeDtypeStruct((1,), "int32"), *given)


@pytest.mark.parametrize("key", key_widths())
def test_the_columns_of_every_output_fill_memory_that_is_read_no_more(key):
    for value in value_widths(key):
        stored = HeadWidths(key, value).stored()
        assert [i for part in stored for i in range(part.start, part.stop)] == list(range(value))
        for part, width in zip(stored, (key, ROPE, 64), strict=True):
            assert part.stop - part.start in (0, width)


@pytest.mark.parametrize(
    ("sizes", "keys"),
    [
        (DEEPSEEK, 128),
        (HeadWidths(64, 192), 128),
        (HeadWidths(128, 192), 64),
        (GLM, 64),
        (HeadWidths(320, 64), 64),
    ],
)
def test_the_keys_of_a_step_are_the_most_with_room_for_two_stages(sizes, keys):
    assert sizes.keys == keys
    # Bytes of bfloat16: queries with probabilities, and both stages of keys and values.
    used = [2 * (128 * (sizes.query + 64) + 2 * n * (sizes.query + sizes.value)) for n in (keys, 2 * keys)]
    assert used[0] <= 225 * 1024
    assert keys == 128 or used[1] > 225 * 1024


def test_a_tree_is_refused():
    sizes = (1, 4, 2, 192), (1, 8, 2, 128), (1, 8, 64), (1, 8, 2, 128)
    tree = replace(chain(jnp.array([0]), 4), ancestors=jnp.array([[0, 1, 2, 5]]))
    inputs: Any = *(jnp.zeros(s, jnp.bfloat16) for s in sizes), tree
    with pytest.raises(ValueError, match="tokens are a tree"):
        attend(*inputs, scale=DEEPSEEK.query**-0.5, implementation="mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small-history", "small-glm-history"])
@pytest.mark.parametrize(
    ("operation", "where"),
    [
        pytest.param("barrier_wait", "step.<locals>.<lambda>", id="memory of keys and values is free"),
        pytest.param("barrier_wait", "compute.<locals>.step", id="keys and values are there"),
        pytest.param("commit_smem", "compute", id="outputs are visible to the copy", marks=needs_interpreter),
    ],
)
def test_a_missing_barrier_is_noticed(operation, where, name, monkeypatch, capfd):
    without(monkeypatch, operation, where)
    assert notices(case("mutant", shapes()[name]))
    capfd.readouterr()  # every race is printed
