"""Products of experts and linear layers: oracles, layout, and what the interpreter finds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.registry import cases
from kernels_pallas.fp8_matmul import api as fp8
from kernels_pallas.grouped_matmul import api, mosaic_gpu, reference
from kernels_pallas.grouped_matmul.layout import Tiles, group_rows
from kernels_pallas.grouped_matmul.tile import ProductSizes, Tile
from kernels_pallas.quantised import quantise
from tests.kernels.interpreter import distance, needs_interpreter, notices, rounded, without
from tests.rounding import error, near

CASES = {c.name: c for c in (*cases("grouped_matmul/"), *cases("fp8_matmul/"))}

# Roundings to e4m3 that follow each other in an MLP: of a row, in each of two products; of the next row. SiLU
# changes less than 1.3 times as much as its argument.
MLP = 1.3**2 + 1 + 1


def random_fp8(rng, *shape):
    w = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
    scale = rng.uniform(0.5, 1, (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)))
    return w, (scale / shape[-1] ** 0.5).astype(np.float32)


def random_rows(rng, *shape):
    return rng.normal(size=shape).astype(jnp.bfloat16)


def expanded(w, scale) -> np.ndarray:
    """The weight in float64, element by element."""
    w, scale = w.astype(np.float64), scale.astype(np.float64)
    rows, columns = np.arange(w.shape[-2]) // 128, np.arange(w.shape[-1]) // 128
    return w * scale[..., rows[:, None], columns]


def silu(x):
    return x / (1 + np.exp(-x))


def gated(gate, up, limit=None):
    return silu(gate) * up if limit is None else silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)


def test_quantised_blocks_reach_the_largest_value_and_are_near(rng):
    x = (rng.normal(size=(5, 384)) * 1e-3).astype(np.float32)
    x[2, :128] = 0
    rows, back = jax.jit(lambda x: ((rows := quantise(x)), rows.expand()))(x)
    blocks = np.abs(np.asarray(rows.values).astype(np.float32)).reshape(5, 3, 128).max(-1)
    assert (np.delete(blocks.reshape(-1), 6) == 448).all()
    assert blocks[2, 0] == 0
    # Half a unit of three bits of mantissa, or of the smallest subnormal number; and of float32, twice.
    bound = np.maximum(np.abs(x) / 16, np.repeat(np.asarray(rows.scale).T, 128, 1) * 2**-10)
    assert (np.abs(back - x) <= bound + error(2, np.abs(x))).all()


def test_weights_of_partial_blocks_expand(rng):
    w, scale = random_fp8(rng, 2, 200, 130)
    near(jax.jit(reference.expand_weights)(w, scale), expanded(w, scale), 1)


@pytest.mark.parametrize(("pairs", "chosen"), [(1, 1), (50, 5), (9000, 3)])
def test_every_pair_has_a_slot_in_a_tile_of_its_group(pairs, chosen, rng):
    ids = rng.integers(-2, 9, pairs).astype(np.int32)
    groups = jax.jit(group_rows, static_argnums=(1, 2))(ids.reshape(-1, chosen), 7, 64)
    place = np.asarray(groups.place).T.reshape(-1)
    inside = (ids >= 0) & (ids < 7)
    total = groups.token.shape[0]
    assert (place[~inside] == total).all()
    assert len(set(place[inside])) == inside.sum()
    assert (np.asarray(groups.token)[place[inside]] == np.flatnonzero(inside) // chosen).all()
    owner = np.full(total, -1)
    count = int(groups.tiles.count[0])
    assert count == sum(-(-int((ids == g).sum()) // 64) for g in range(7))
    for group, first, height in np.asarray(groups.tiles.table).T[:count]:
        assert first % 8 == height % 8 == 0
        assert first + 64 <= total
        assert (owner[first : first + height] == -1).all()
        owner[first : first + height] = group
    assert (np.asarray(groups.tiles.table)[2, count:] == 0).all()
    assert (owner[place[inside]] == ids[inside]).all()
    for g in range(7):
        assert (owner == g).sum() == -(-int((ids == g).sum()) // 8) * 8
    # Rows of a group keep their order: sums do not depend on what other rows choose.
    for g in range(7):
        assert (np.diff(place[ids == g]) > 0).all()


@pytest.mark.parametrize(("quantised", "limit"), [(True, None), (False, None), (True, 0.25)])
def test_experts_equal_those_of_float64(quantised, limit, rng):
    x, weights = random_rows(rng, 20, 256), rng.random((20, 2)).astype(np.float32)
    ids = rng.integers(-1, 6, (20, 2)).astype(np.int32)
    gate_up, gate_up_scale = random_fp8(rng, 5, 2, 128, 256)
    down, down_scale = random_fp8(rng, 5, 256, 128)
    big, small = expanded(gate_up, gate_up_scale), expanded(down, down_scale)
    if not quantised:
        gate_up, down = big.astype(jnp.bfloat16), small.astype(jnp.bfloat16)
        gate_up_scale = down_scale = None
    run = jax.jit(partial(api.expert_mlp, implementation="xla", limit=limit))
    y = run(x, ids, weights, gate_up, down, gate_up_scale, down_scale)
    expected = np.zeros((20, 256))
    for t, (row, chosen) in enumerate(zip(x.astype(np.float64), ids, strict=True)):
        for k, e in enumerate(chosen):
            if 0 <= e < 5:
                gate, up = big[e] @ row
                expected[t] += float(weights[t, k]) * (small[e] @ gated(gate, up, limit))
    # In bfloat16 results of products are rounded besides, and weights.
    most = rounded(MLP, jnp.float8_e4m3fn) if quantised else rounded(2 * MLP + 3)
    assert distance(y, expected) < most


def test_linear_and_mlp_equal_those_of_float64(rng):
    x = random_rows(rng, 7, 256)
    gate_up, gate_up_scale = random_fp8(rng, 2, 128, 256)
    down, down_scale = random_fp8(rng, 256, 128)
    row, big, small = x.astype(np.float64), expanded(gate_up, gate_up_scale), expanded(down, down_scale)
    y = jax.jit(partial(fp8.fp8_matmul, implementation="xla"))(x, gate_up[0], gate_up_scale[0])
    assert distance(y, row @ big[0].T) < rounded(1, jnp.float8_e4m3fn)
    for limit in (None, 0.25):
        run = jax.jit(partial(fp8.fp8_mlp, implementation="xla", limit=limit))
        y = run(x, gate_up, down, gate_up_scale, down_scale)
        want = gated(row @ big[0].T, row @ big[1].T, limit) @ small.T
        assert distance(y, want) < rounded(MLP, jnp.float8_e4m3fn)


@pytest.mark.parametrize("count", [5, pytest.param(130, marks=pytest.mark.rest)])
def test_a_product_for_each_group_equals_float64(rng, count):
    """A group of few tokens has one tile; of 130 it has two, the second with two rows."""
    x = random_rows(rng, count, 3, 256)
    w, scale = random_fp8(rng, 3, 128, 256)
    y = jax.jit(partial(fp8.fp8_by_group, implementation="xla"))(x, w, scale)
    want = np.einsum("tgi,goi->tgo", x.astype(np.float64), expanded(w, scale))
    assert distance(y, want) < rounded(1, jnp.float8_e4m3fn)


def test_rows_quantised_before_give_the_same(rng):
    """Bit by bit, in one program."""
    x = random_rows(rng, 7, 256)
    gate_up, gate_up_scale = random_fp8(rng, 2, 128, 256)
    down, down_scale = random_fp8(rng, 256, 128)
    ids, weights = np.zeros((7, 1), np.int32), np.ones((7, 1), np.float32)
    mlp = gate_up, down, gate_up_scale, down_scale
    for run, *given in (
        (fp8.fp8_matmul, gate_up[0], gate_up_scale[0]),
        (fp8.fp8_mlp, *mlp),
        (api.expert_mlp, ids, weights, *(w[None] for w in mlp)),
    ):

        @jax.jit
        def ways(x, *given, run=run):
            each = (quantise(x), quantise(x).padded(64))
            return [run(rows, *given, implementation="xla")[:7] for rows in (x, *each)]

        plain, before, padded = ways(x, *given)
        np.testing.assert_array_equal(before, plain)
        # More rows than there are, as whole tiles have, change nothing but the order of sums, on which the
        # rounding of the next product's rows may hang.
        assert distance(padded, plain) < rounded(1, jnp.float8_e4m3fn)


def test_rows_quantised_before_are_refused_with_weights_that_are_not():
    x, w = jax.jit(quantise)(np.ones((8, 128), np.float32)), jnp.zeros((1, 128, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="activations is float8_e4m3fn, must be bfloat16"):
        api.check(x, w, None)


@pytest.mark.parametrize(
    ("x", "w", "match"),
    [
        ((8, 128, "float32"), (128, 128, "float8_e4m3fn"), "activations is float32"),
        ((8, 128, "bfloat16"), (128, 128, "bfloat16"), "weights is bfloat16"),
        ((8, 128, "bfloat16"), (96, 128, "float8_e4m3fn"), "output features over 64 is 32"),
        ((8, 192, "bfloat16"), (128, 192, "float8_e4m3fn"), "input features over 128 is 64"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(x, w, match):
    x, w = (jax.ShapeDtypeStruct(a[:2], a[2]) for a in (x, w))
    run = partial(fp8.fp8_matmul, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, x, w, np.ones((1, 1), np.float32))


@pytest.mark.parametrize(
    ("tile", "match"),
    [
        (Tile(96, 128), "expected 64 x"),
        (Tile(128, 256), "expected 64 x"),
        (Tile(64, 128, splits=3), "256 terms are not a multiple of 384"),
        (Tile(128, 128), "64 rows; expected 128 or more"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tile, match):
    x, w = jnp.zeros((64, 256), jnp.float8_e4m3fn), jnp.zeros((1, 1, 128, 256), jnp.float8_e4m3fn)
    tiles = Tiles(jnp.zeros((3, 1), jnp.int32), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match=match):
        mosaic_gpu.grouped_matmul(x, w, jnp.ones((2, 64)), jnp.ones((1, 1, 1, 2)), tiles, tile=tile)


@pytest.mark.parametrize(
    ("groups", "columns", "thread_blocks"),
    # DeepSeek-V3's shared expert and a token's experts: split inside each over eight GPUs, and whole.
    [(1, 256, 2 * 8), (8, 256, 16 * 4), (1, 2048, 16 * 4), (8, 2048, 128)],
)
def test_gated_products_of_few_tiles_split_k_over_clusters(groups, columns, thread_blocks):
    tile = api.choose_gated_tile(1, groups, columns, 7168)
    assert groups * (columns // 128) * tile.splits == thread_blocks
    sizes = ProductSizes(tile, jnp.float8_e4m3fn, True, 64, columns, 7168, groups)
    assert sizes.cluster == tile.splits
    assert sizes.walkers == (thread_blocks if tile.splits > 1 else tile.thread_blocks)


def test_tall_tiles_ask_the_cache_for_fewer_bytes():
    """Operations for each byte of operands that a thread block fetches: 128 with 128 rows."""
    assert fp8.one_launch(64, 7168, 1536, 576)  # DeepSeek-V3's q_a and kv_a fill the GPU together
    assert not fp8.one_launch(4096, 7168, 1536, 576)  # but 576 columns want tiles of 64
    for tile in (api.choose_tile(4096, 7168), fp8.choose_tile(4096, 16384, 7168)):
        sizes = ProductSizes(tile, jnp.float8_e4m3fn, False, 4096, 7168, 16384, 16)
        products = 2 * sizes.block_rows * tile.columns
        assert products / (sizes.block_rows + tile.columns / tile.pair) > 170


# What a warpgroup waits for: the case, the operation, and the end of the name of the function that waits.
WAITS = {
    "the ring is free again": ("small-gated", "barrier_wait", "Walk.await_free"),
    "the ring is full": ("small-gated", "barrier_wait", "Walk.scaled_sums.<locals>.step"),
    "the other half of a row": ("small-gated", "barrier_wait", "Walk.store_quantised"),
    "the tile before is written": ("small-gated", "wait_smem_to_gmem", "Walk.store"),
    "values are visible to copies": ("small-gated", "commit_smem", "Walk.store"),
    "own parts are written": ("small-gated-parts", "wait_smem_to_gmem", "Walk.sum_parts"),
    "the cluster's parts are written": ("small-gated-parts", "barrier_wait", "Walk.sum_parts"),
}


@needs_interpreter
@pytest.mark.slow
def test_rows_of_the_next_group_overwritten_are_noticed(monkeypatch):
    real = mosaic_gpu.grouped_matmul

    def whole_tiles(x, w, x_scale, w_scale, tiles, **options):
        whole = replace(tiles, table=tiles.table.at[2].set(64))
        return real(x, w, x_scale, w_scale, whole, **options)

    monkeypatch.setattr(mosaic_gpu, "grouped_matmul", whole_tiles)
    assert notices(CASES["grouped_matmul/small-gated"])


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("what", WAITS)
def test_a_missing_wait_is_noticed(what, monkeypatch, capfd):
    case, *wait = WAITS[what]
    without(monkeypatch, *wait)
    assert notices(CASES[f"grouped_matmul/{case}"])
    capfd.readouterr()  # every race is printed
