"""Index scores: float64 in numpy is the oracle, what the interpreter finds."""

from functools import partial

import jax
import numpy as np
import pytest

from kernels_pallas.check.cases.index_scores import case, inputs, shapes
from kernels_pallas.index_scores import api, mosaic_gpu, reference
from kernels_pallas.index_scores.index_rows import pack, unpack
from kernels_pallas.index_scores.mosaic_gpu import DIM
from kernels_pallas.splits import choose_splits
from kernels_pallas.visible import Window, chain
from tests.kernels.interpreter import needs_interpreter, notices, without
from tests.rounding import near


@pytest.mark.parametrize("name", ["small-window", "small-nextn", "small-fp8", "small-pages128"])
def test_the_reference_is_the_formula(name):
    q, weights, keys, page_table, visible = jax.jit(partial(inputs, shapes()[name]))(jax.random.key(2))
    length = page_table.shape[1] * shapes()[name].page

    @jax.jit
    def run(keys, visible):
        rows = unpack(keys) if isinstance(keys, tuple) else keys
        found = reference.index_scores(q, weights, keys, page_table, visible)
        return found, rows, visible.mask(q.shape[1], length)

    got, rows, seen = (np.asarray(x) for x in run(keys, visible))
    rows = rows.astype(np.float64)[np.asarray(page_table)].reshape(len(page_table), length, -1)
    want = np.einsum("bwhi,bli->bwhl", np.asarray(q, np.float64), rows)
    want = np.einsum("bwhl,bwh->bwl", np.where(want < 0, 0, want), np.asarray(weights, np.float64))
    np.testing.assert_array_equal(got == -np.inf, ~seen)
    broken = seen & np.isnan(want)
    assert broken.any()
    assert (got[broken] == np.inf).all()
    near(got[seen & ~broken], want[seen & ~broken], DIM + q.shape[2])  # of a product, and of heads


@pytest.mark.parametrize("kind", ["chain", "long", "tree"])
def test_the_kernel_is_told_what_a_mask_says(kind):
    width = 40 if kind == "long" else 5
    length, count = np.array([[3, 17, 50, 9], [width, 2, 1, 0]], np.int32)
    bits = np.random.default_rng(0).integers(0, 2**31, size=(4, width)).astype(np.int32)

    @jax.jit
    def run(length, count, bits):
        visible = chain(length, count, first=2)
        if kind == "tree":
            visible = Window(visible.first, length, count, bits)
        return api._seen(visible, width + 2, 64), visible.mask(width, 64), visible.end()

    told, mask, ends = run(length, count, bits)
    first, end, ahead, last = np.asarray(told)[..., None]
    row = np.arange(64)
    bit = ahead >> np.clip(row - end, 0, 31) & 1
    got = (row >= first) & ((row < end) | (bit == 1))
    np.testing.assert_array_equal(got[:, :width], mask)
    assert not got[:, width:].any()
    np.testing.assert_array_equal(last[:, 0, 0], np.clip(ends, 0, 64))


@pytest.mark.parametrize(("blocks", "tiles"), [(1, 1), (1, 2048), (40, 192), (600, 64)])
def test_splits_leave_each_some_tiles(blocks, tiles):
    assert 1 <= choose_splits(blocks, tiles, api.SPLIT_COST) <= min(tiles, 132)
    assert choose_splits(1, 2048, api.SPLIT_COST) > 64


@pytest.mark.parametrize(
    ("q", "keys", "match"),
    [
        (((1, 1, 8, 128), "float32"), ((2, 64, 128), "float32"), "dtype of queries is float32"),
        (((1, 1, 8, 128), "bfloat16"), ((2, 64, 128), "float32"), "dtype of keys is float32"),
        (((1, 1, 8, 64), "bfloat16"), ((2, 64, 64), "bfloat16"), "dimensions of a head is 64"),
        (((1, 1, 12, 128), "bfloat16"), ((2, 64, 128), "bfloat16"), "heads is 12"),
        (((1, 1, 8, 128), "bfloat16"), ((2, 48, 128), "bfloat16"), "rows per page is 48"),
        (((1, 1, 8, 128), "bfloat16"), (((2, 16, 128), "fp8")), "rows per page is 16"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(q, keys, match):
    shape, dtype = keys

    def run(q, weights, rows, table, length):
        rows = pack(rows) if dtype == "fp8" else rows.astype(dtype)
        return api.index_scores(q, weights, rows, table, chain(length, 1), implementation="mosaic_gpu")

    given = (
        np.zeros(*q),
        np.zeros(q[0][:3], np.float32),
        np.zeros(shape, np.float32),
        np.zeros((1, 2), np.int32),
    )
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, *given, np.array([3], np.int32))


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "where"),
    [
        pytest.param("barrier_wait", "copy.<locals>.tile.<locals>.<lambda>", id="a stage is free"),
        pytest.param("barrier_wait", "compute.<locals>.tile", id="a tile is there"),
    ],
)
def test_a_missing_wait_is_noticed(operation, where, monkeypatch, capfd):
    without(monkeypatch, operation, where)
    assert notices(case("mutant", shapes()["small-ring"]))
    capfd.readouterr()  # every race is printed


@needs_interpreter
@pytest.mark.slow
def test_scales_that_are_left_out_are_noticed(monkeypatch):
    monkeypatch.setattr(mosaic_gpu.Warpgroup, "row", lambda self, ref: ref[...] * 0 + 1)
    assert notices(case("mutant", shapes()["small-fp8"]))
