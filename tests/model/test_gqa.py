"""Grouped-query attention against a plain loop, on parts of the heads, over pages that hold garbage."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from mtp_jax.errors import ConfigError
from mtp_jax.model.attention import cpu as cpu_attention
from mtp_jax.model.attention.gqa import KvHeads, Queries
from mtp_jax.model.attention.source import Paged, Whole
from mtp_jax.model.backend import Backend, mosaic_gpu, xla, xla_cpu
from mtp_jax.model.cache import Entries, LayerCache, PagedView, empty_cache, read_rows
from mtp_jax.model.layers import rope_angles
from mtp_jax.model.narrow import Bf16
from mtp_jax.model.sharding import check_divisible
from mtp_jax.model.sight import Sight
from mtp_jax.model.visible import chain
from tests import models
from tests.model.kinds import gqa
from tests.models import apart, rigged
from tests.rounding import near

CFG = models.gqa()  # eight query heads of four kv heads
B, T, N, G, H = 2, 6, 8, 4, 8


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32))


def plainly(q: np.ndarray, rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    keys, values = rows.astype(np.float64).reshape(B, -1, 2, G, H).transpose(2, 0, 3, 1, 4)
    out = np.zeros(q.shape)
    for b, w, n in np.ndindex(*q.shape[:3]):
        scores = keys[b, n // (N // G)] @ q[b, w, n] / np.sqrt(H)
        weights = np.exp(scores - scores.max()) * mask[b, w]
        out[b, w, n] = weights / weights.sum() @ values[b, n // (N // G)]
    return out


@pytest.mark.parametrize("parts", apart([1, 2, 4, 8], 8))
def test_each_part_of_the_heads_asks_its_own_kv_heads(parts: int):
    q, rows = normal(B, 3, N, H), normal(B, T, 2 * G * H)
    mask = np.broadcast_to(np.tri(3, T, 2) > 0, (B, 3, T))
    kv_heads = np.arange(N) // (N // G)

    @jax.jit
    def attend(q: jax.Array, heads: jax.Array, mask: jax.Array) -> jax.Array:
        whole = Whole(rows, mask)
        return gqa(xla()).attend(Queries(q), KvHeads(heads, G, N // G), whole, CFG.softmax_scale)

    pairs = zip(np.split(q, parts, axis=2), np.split(kv_heads, parts), strict=True)
    got = np.concatenate([attend(mine, heads, mask) for mine, heads in pairs], axis=2)
    near(got, plainly(*map(np.asarray, (q, rows, mask))), H + T)  # a score, a sum over the rows
    assert not np.asarray(attend(q[:, :, : N // parts], kv_heads[: N // parts], mask & False)).any()


def views(table: jax.Array, positions: jax.Array) -> tuple[PagedView, ...]:
    return (PagedView(table, positions, chain(positions[:, 0], (positions >= 0).sum(axis=1))),)


CASES = [(fp8, on) for fp8 in (False, True) for on in (xla(), xla_cpu())]


@pytest.mark.parametrize(("fp8", "on"), apart(CASES, (True, xla()), (False, xla_cpu())))
def test_a_broken_row_stays_with_those_that_see_it(fp8: bool, on: Any):
    """The last token is not finite. Its row is written, and tokens before it are as they were."""
    layer, size = rigged(CFG).layers[0], 4
    x, row = np.array(normal(B, T, CFG.hidden_size)), CFG.row
    whole = x.copy()
    x[:, -1] = np.inf

    @jax.jit
    def attended(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        where = views(jnp.asarray([[4, 1], [0, 3]]), positions)
        cache = empty_cache(6, size, CFG, 0, jnp.float32, fp8=fp8)
        sight = Sight(rope_angles(CFG, positions), where)
        _, q, rows, cache = on.before_attention(layer, CFG, x, sight, cache)
        out, cache, _ = on.attend(layer.attention, CFG, q, rows, cache, sight)
        assert isinstance(cache, LayerCache)
        seen = jnp.ones((B, 2 * size), bool)
        return out, read_rows(cache, where[0].page_table, seen, jnp.float32, row.e4m3, row.block)

    (want, _), (got, found) = (map(np.asarray, attended(given)) for given in (whole, x))
    np.testing.assert_array_equal(got[:, :-1], want[:, :-1])
    assert np.isnan(got[:, -1]).all()
    assert np.isnan(found[:, T - 1, : G * H]).all()
    assert not found[:, T - 1, G * H :].any()


@pytest.mark.parametrize("parts", apart([1, 4], 4))
def test_blocks_of_the_cache_equal_all_of_it(monkeypatch, parts: int, rng):
    """Blocks have two pages, the last has one. Rows that no token sees are NaN. An idle slot gives zeros.

    How many blocks another slot needs changes nothing, to the bit.
    """
    size, columns, width = 4, 5, 3
    monkeypatch.setattr(cpu_attention, "_BLOCK", 2 * size)
    q = jnp.asarray(rng.normal(size=(B, width, N // parts, H)).astype(np.float32))
    heads = KvHeads(jnp.arange(N)[: N // parts] // (N // G), G, N // G)
    table = rng.permutation(B * columns).reshape(B, columns)
    rows = rng.normal(size=(B * columns + 1, size, 2 * G * H)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def attended(on: Backend, cache: LayerCache, view: PagedView) -> jax.Array:
        return gqa(on).attend(Queries(q), heads, Paged(cache, view, CFG.row), CFG.softmax_scale)

    found = {}
    for others in (-1, 2, size, 3 * size, columns * size - width):
        ends = np.array([size + 1, others])
        positions = np.where(ends[:, None] < 0, -1, ends[:, None] + np.arange(width))
        (view,) = views(jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32))
        pages = rows.copy()
        for slot in range(B):
            seen = (np.arange(columns * size) <= positions[slot].max()).reshape(columns, size, 1)
            pages[table[slot]] = np.where(seen, pages[table[slot]], np.nan)
        cache = LayerCache(jnp.asarray(pages))
        found[others] = np.asarray(attended(xla_cpu(), cache, view))
        near(found[others], attended(xla(), cache, view), H + columns * size)
    np.testing.assert_array_equal(found[-1][1], 0)
    for got in found.values():
        np.testing.assert_array_equal(got[0], found[-1][0])


def test_an_fp8_row_is_rounded_head_by_head():
    """A loud head costs its neighbours nothing: e4m3 has four significant bits, whatever the others are."""
    loud = np.where(np.arange(2 * G) == 3, np.float32(1e6), np.float32(1)).repeat(H)
    rows, row = np.asarray(normal(B, T, 2 * G * H)) * loud, CFG.row

    @jax.jit
    def kept(rows: jax.Array) -> jax.Array:
        stored = empty_cache(B, T, CFG, 0, jnp.float32, fp8=True).stored(Entries(rows), row)
        table, seen = jnp.arange(B)[:, None], jnp.ones((B, T), bool)
        return read_rows(stored, table, seen, jnp.float32, row.e4m3, row.block)

    found = np.asarray(kept(rows))
    error = np.abs(found - rows).reshape(B, T, 2 * G, H)
    assert (error <= np.abs(rows).reshape(error.shape).max(axis=-1, keepdims=True) / 16).all()


def test_kernels_that_must_attend_refuse_it():
    layer, x = rigged(CFG).layers[0], normal(B, T, CFG.hidden_size)

    @functools.partial(jax.jit, static_argnums=0)
    def queries(on: Backend, x: jax.Array) -> jax.Array:
        angles = rope_angles(CFG, jnp.broadcast_to(jnp.arange(T), (B, T)))
        return on.before_attention(layer, CFG, x, Sight(angles), None)[1].whole

    with pytest.raises(ConfigError, match="grouped-query attention has no kernel; take kernels=auto"):
        queries(mosaic_gpu(strict=True), x)
    near(queries(mosaic_gpu(), x), queries(xla(), x), 2 * CFG.hidden_size + H)  # norms and a product


def test_a_mesh_that_cuts_groups_apart_is_refused():
    cfg = replace(CFG, num_attention_heads=12, n_routed_experts=12, moe_intermediate_size=24)
    check_divisible(cfg, AbstractMesh((1, 4), ("data", "model")))
    with pytest.raises(ConfigError, match="gives each device 2 query heads, and each 3 share a kv head"):
        check_divisible(cfg, AbstractMesh((1, 6), ("data", "model")))


def test_queries_may_stay_narrow():
    """A head that was written in bfloat16, on a CPU: kv heads are found by the shape of the weight."""
    attention: Any = rigged(CFG).layers[0].attention
    narrow = replace(attention, q=Bf16(jnp.asarray(np.asarray(attention.q).astype(jnp.bfloat16))))
    found, want = (xla_cpu().kind(CFG).by_head(a, CFG) for a in (narrow, attention))
    np.testing.assert_array_equal(found.of, want.of)
    assert (found.count, found.group) == (want.count, want.group) == (4, 2)
