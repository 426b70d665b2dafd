"""Products of experts and linear layers: oracles, layout, and what the interpreter finds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.checking.registry import cases
from kernels_pallas.fp8_matmul import api as fp8
from kernels_pallas.grouped_matmul import api, mosaic_gpu, reference
from kernels_pallas.grouped_matmul.layout import Tiles, group_rows
from kernels_pallas.grouped_matmul.tile import Sizes, Tile
from kernels_pallas.quantised import quantise
from tests.kernels.interpreter import distance, interpret, notices, without

CASES = {c.name: c for c in (*cases("grouped_matmul/"), *cases("fp8_matmul/"))}
SMALL = [name for name, case in CASES.items() if case.small]
# One of each way through the kernel; the others are slow.
FAST = ("grouped_matmul/small-gated", "fp8_matmul/small-split")
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Pallas interprets these kernels from jax 0.11 on"
)


def random_fp8(key, shape):
    w = jax.random.normal(key, shape, jnp.float32).astype(jnp.float8_e4m3fn)
    scale = jax.random.uniform(key, (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), minval=0.5)
    return w, scale / shape[-1] ** 0.5


def expanded(w, scale) -> np.ndarray:
    """The weight in float64, element by element."""
    w, scale = np.asarray(w.astype(jnp.float32), np.float64), np.asarray(scale, np.float64)
    rows, columns = np.arange(w.shape[-2]) // 128, np.arange(w.shape[-1]) // 128
    return w * scale[..., rows[:, None], columns]


def silu(x):
    return x / (1 + np.exp(-x))


def test_quantised_blocks_reach_the_largest_value_and_are_near():
    x = jax.random.normal(jax.random.key(0), (5, 384), jnp.float32) * 1e-3
    x = x.at[2, :128].set(0)
    rows = quantise(x)
    blocks = np.abs(np.asarray(rows.values.astype(jnp.float32))).reshape(5, 3, 128).max(-1)
    assert (np.delete(blocks.reshape(-1), 6) == 448).all()
    assert blocks[2, 0] == 0
    back = np.asarray(rows.expand())
    # Half a unit of three bits of mantissa, or of the smallest subnormal number.
    bound = np.maximum(np.abs(np.asarray(x)) / 16, np.repeat(np.asarray(rows.scale).T, 128, 1) * 2**-10)
    assert (np.abs(back - np.asarray(x)) <= bound * 1.001).all()


def test_weights_of_partial_blocks_expand():
    w, scale = random_fp8(jax.random.key(1), (2, 200, 130))
    np.testing.assert_allclose(reference.expand_weights(w, scale), expanded(w, scale), rtol=1e-6)


@pytest.mark.parametrize(("pairs", "chosen"), [(1, 1), (50, 5), (9000, 3)])
def test_every_pair_has_a_slot_in_a_tile_of_its_group(pairs, chosen):
    ids = jax.random.randint(jax.random.key(pairs), (pairs,), -2, 9)
    groups = jax.jit(group_rows, static_argnums=(1, 2))(ids.reshape(-1, chosen), 7, 64)
    ids, place = np.asarray(ids), np.asarray(groups.place).T.reshape(-1)
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


@pytest.mark.parametrize("quantised", [True, False])
def test_experts_equal_those_of_float64(quantised):
    keys = jax.random.split(jax.random.key(2), 5)
    x = jax.random.normal(keys[0], (20, 256), jnp.bfloat16)
    ids = jax.random.randint(keys[1], (20, 2), -1, 6)
    weights = jax.random.uniform(keys[2], (20, 2))
    gate_up, gate_up_scale = random_fp8(keys[3], (5, 2, 128, 256))
    down, down_scale = random_fp8(keys[4], (5, 256, 128))
    big, small = expanded(gate_up, gate_up_scale), expanded(down, down_scale)
    if not quantised:
        gate_up, down = jnp.bfloat16(big), jnp.bfloat16(small)
        gate_up_scale = down_scale = None
    run = jax.jit(partial(api.expert_mlp, implementation="xla"))
    y = run(x, ids, weights, gate_up, down, gate_up_scale, down_scale)
    expected = np.zeros((20, 256))
    for t, (row, chosen) in enumerate(zip(np.asarray(x, np.float64), np.asarray(ids), strict=True)):
        for k, e in enumerate(chosen):
            if 0 <= e < 5:
                gate, up = big[e] @ row
                expected[t] += float(weights[t, k]) * (small[e] @ (silu(gate) * up))
    assert distance(y, expected) < (0.06 if quantised else 0.01)


def test_linear_and_mlp_equal_those_of_float64():
    keys = jax.random.split(jax.random.key(3), 3)
    x = jax.random.normal(keys[0], (7, 256), jnp.bfloat16)
    gate_up, gate_up_scale = random_fp8(keys[1], (2, 128, 256))
    down, down_scale = random_fp8(keys[2], (256, 128))
    row, big, small = np.asarray(x, np.float64), expanded(gate_up, gate_up_scale), expanded(down, down_scale)
    y = jax.jit(partial(fp8.fp8_matmul, implementation="xla"))(x, gate_up[0], gate_up_scale[0])
    assert distance(y, row @ big[0].T) < 0.05
    y = jax.jit(partial(fp8.fp8_mlp, implementation="xla"))(x, gate_up, down, gate_up_scale, down_scale)
    assert distance(y, (silu(row @ big[0].T) * (row @ big[1].T)) @ small.T) < 0.06


def test_rows_quantised_before_give_the_same():
    keys = jax.random.split(jax.random.key(4), 3)
    x = jax.random.normal(keys[0], (7, 256), jnp.bfloat16)
    gate_up, gate_up_scale = random_fp8(keys[1], (2, 128, 256))
    down, down_scale = random_fp8(keys[2], (256, 128))
    ids, weights = jnp.zeros((7, 1), jnp.int32), jnp.ones((7, 1))
    experts = gate_up[None], down[None], gate_up_scale[None], down_scale[None]
    for run in (
        partial(fp8.fp8_matmul, w=gate_up[0], w_scale=gate_up_scale[0]),
        partial(fp8.fp8_mlp, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale),
        lambda x, **on: api.expert_mlp(x, ids, weights, *experts, **on),
    ):
        run = jax.jit(partial(run, implementation="xla"))
        np.testing.assert_array_equal(run(quantise(x)), run(x))
        # More rows than there are, as whole tiles have, change nothing.
        np.testing.assert_array_equal(run(quantise(x).padded(64))[:7], run(x))


def test_rows_quantised_before_are_refused_with_weights_that_are_not():
    x, w = quantise(jnp.ones((8, 128))), jnp.zeros((1, 128, 128), jnp.bfloat16)
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
    x, w = jnp.zeros(x[:2], x[2]), jnp.zeros(w[:2], w[2])
    with pytest.raises(ValueError, match=match):
        fp8.fp8_matmul(x, w, jnp.ones((1, 1)), implementation="mosaic_gpu")


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
    sizes = Sizes(tile, jnp.float8_e4m3fn, True, 64, columns, 7168, groups)
    assert sizes.cluster == tile.splits
    assert sizes.walkers == (thread_blocks if tile.splits > 1 else tile.thread_blocks)


def test_tall_tiles_ask_the_cache_for_fewer_bytes():
    """Operations for each byte of operands that a thread block fetches: 128 with 128 rows."""
    for tile in (api.choose_tile(4096, 7168), fp8.choose_tile(4096, 7168, 16384)):
        sizes = Sizes(tile, jnp.float8_e4m3fn, False, 4096, 7168, 16384, 16)
        products = 2 * sizes.block_rows * tile.columns
        assert products / (sizes.block_rows + tile.columns / tile.pair) > 170


@needs_interpreter
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_kernels_equal_their_reference_without_races(name):
    run = interpret(CASES[name])
    assert not run.races
    assert run.distance < 3e-3


# What a warpgroup waits for: the case, the operation, and the end of the name of the function that waits.
WAITS = {
    "the ring is free again": ("small-gated", "barrier_wait", "step.<locals>.<lambda>"),
    "the ring is full": ("small-gated", "barrier_wait", "_Walk.scaled_sums.<locals>.step"),
    "the other half of a row": ("small-gated", "barrier_wait", "_Walk.store_quantised"),
    "the tile before is written": ("small-gated", "wait_smem_to_gmem", "_Walk.store"),
    "values are visible to copies": ("small-gated", "commit_smem", "_Walk.store"),
    "own parts are written": ("small-gated-parts", "wait_smem_to_gmem", "_Walk.sum_parts"),
    "the cluster's parts are written": ("small-gated-parts", "barrier_wait", "_Walk.sum_parts"),
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
