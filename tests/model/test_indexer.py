"""What sparse attention chooses, how choices are read from pages, and how few entries that touches."""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.index_scores import api as index_scores
from kernels_pallas.index_scores import index_rows
from kernels_pallas.mla_decode import api as mla_decode
from kernels_pallas.mla_decode.fp8_rows import pack
from kernels_pallas.top_k import api as top_k
from kernels_pallas.top_k.reference import top_k as top_k_reference
from mtp_jax.errors import ConfigError
from mtp_jax.model import indexer
from mtp_jax.model.attention.source import Chosen, Paged
from mtp_jax.model.backend import Backend, mosaic_gpu, xla, xla_cpu
from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.config import IndexerConfig, ModelConfig, RowFormat
from mtp_jax.model.indexer import NOTHING, IndexQueries
from mtp_jax.model.mla import Queries, Ups
from mtp_jax.model.visible import chain
from tests.model.kinds import latent
from tests.models import TINY, apart
from tests.rounding import near

B, W, HEADS, DIM, SIZE, COLUMNS, TOPK = 2, 3, 4, 8, 4, 8, 8
ROWS = SIZE * COLUMNS


def choosing(topk: int) -> ModelConfig:
    return replace(TINY, indexer=IndexerConfig(HEADS, DIM, topk, shared=(False, False)))


CFG = choosing(TOPK)


@dataclass(frozen=True)
class Draw:
    """Random inputs of attention with an indexer."""

    rng: np.random.Generator

    def normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.normal(size=shape), jnp.float32)

    def half(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.normal(size=shape).astype(jnp.bfloat16))

    def asked(self) -> IndexQueries:
        return IndexQueries(self.normal(B, W, HEADS, DIM), self.normal(B, W, HEADS))

    def queries(self) -> Queries:
        sizes = TINY.qk_nope_head_dim, TINY.qk_rope_head_dim
        q, q_rope = (self.normal(B, W, TINY.num_attention_heads, n) for n in sizes)
        return Queries(q, q_rope)

    def ups(self) -> Ups:
        sizes = TINY.qk_nope_head_dim, TINY.v_head_dim
        return Ups(*(self.normal(TINY.num_attention_heads, n, TINY.kv_lora_rank) for n in sizes))

    def view(self, lengths: Any = (20, 29), form: Any = "absorbed") -> PagedView:
        start = jnp.asarray(lengths)
        table = jnp.asarray(self.rng.permutation(B * COLUMNS).reshape(B, COLUMNS))
        written = start[:, None] + jnp.arange(W)
        return PagedView(table, written, chain(start, jnp.full(B, W)), form)


@pytest.fixture
def draw(rng) -> Draw:
    return Draw(rng)


def paged(cache: LayerCache, where: PagedView, only: Any = None) -> Paged:
    return Paged(cache, where, CFG.row, only)


@partial(jax.jit, static_argnums=2)
def _chosen(row: jax.Array, visible: jax.Array, topk: int) -> jax.Array:
    return top_k_reference(indexer.masked(row, visible), topk)


def chosen_of(found: Any, visible: Any = True, topk: int = 3) -> list[int]:
    row = np.asarray(found, np.float32)[None, None]
    visible = np.broadcast_to(np.asarray(visible), row.shape)
    return np.asarray(_chosen(row, visible, min(topk, row.shape[-1])))[0, 0].tolist()


scores = jax.jit(indexer.scores)


def most(q: IndexQueries, k: jax.Array) -> float:
    """The largest sum that a score can be, were all its terms positive."""
    return np.einsum("bwhi,bli,bwh->bwl", *map(np.abs, (q.q, k, q.weights))).max()


def test_the_best_are_chosen_in_order():
    assert chosen_of([1, 5, 3, 9, 2]) == [1, 2, 3]
    assert chosen_of([1, 5, 3, 9, 2], [True, False, True, True, True]) == [2, 3, 4]
    assert chosen_of([-1, -5], topk=3) == [0, 1]


def test_a_score_of_a_broken_key_is_no_number(draw):
    keys = np.array(draw.normal(B, ROWS, DIM))
    keys[:, 7] = np.nan
    found = np.asarray(scores(draw.asked(), jnp.asarray(keys)))
    assert np.isnan(found[..., 7]).all()
    assert np.isfinite(np.delete(found, 7, axis=-1)).all()


def test_of_equal_scores_the_first_ones_win():
    assert chosen_of([0, 7, 7, 0, 7, 7]) == [1, 2, 4]
    assert chosen_of([0.0] * 6) == [0, 1, 2]


def test_where_less_is_visible_nothing_is_chosen_beside_it():
    assert chosen_of([1, 5, 3], [False, True, False]) == [NOTHING, NOTHING, 1]
    mask = jax.jit(indexer.chosen_mask, static_argnums=1)(np.array([[[NOTHING, NOTHING, 1]]]), 3)
    assert mask.tolist() == [[[False, True, False]]]


def test_what_is_not_a_number_is_chosen_if_it_is_visible():
    assert chosen_of([np.nan, 5, 3, 9, 2]) == [0, 1, 3]
    assert chosen_of([np.nan, 5, 3, 9, 2], [False, True, True, True, True]) == [1, 2, 3]


def test_scores_are_the_formula(draw):
    q, k = draw.asked(), draw.normal(B, ROWS, DIM)
    want = np.einsum("bwhl,bwh->bwl", np.maximum(np.einsum("bwhi,bli->bwhl", q.q, k), 0), q.weights)
    near(scores(q, k), want, DIM + HEADS, size=most(q, k))


@pytest.mark.parametrize("size", apart([4, 8, 12, 32], 12))
def test_blocks_give_the_same_scores(draw, size):
    q, k = draw.asked(), draw.normal(B, ROWS, DIM)
    padded = np.pad(k, ((0, 0), (0, -ROWS % size), (0, 0)))

    @jax.jit
    def in_blocks(q, padded):
        def read(i):
            return jax.lax.dynamic_slice_in_dim(padded, i * size, size, axis=1)

        return indexer.scores_in_blocks(q, read, size, ROWS, -(-ROWS // size))

    near(in_blocks(q, padded), scores(q, k), DIM + HEADS, size=most(q, k))


def test_pages_are_chosen_from_like_a_whole_sequence(draw):
    q, where = draw.asked(), draw.view()
    latents, keys = draw.normal(B * COLUMNS, SIZE, CFG.row.width), draw.normal(B * COLUMNS, SIZE, DIM)
    # What no token sees may be anything.
    last, table = where.visible.end(), np.asarray(where.page_table)
    whole = np.asarray(keys)[table].reshape(B, ROWS, DIM)
    broken = np.where(np.arange(ROWS)[:, None] < np.asarray(last)[:, None, None], whole, np.nan)
    pages = np.array(keys)
    pages[table] = broken.reshape(B, COLUMNS, SIZE, DIM)

    @jax.jit
    def both(q, pages, whole):
        by_pages = latent(xla()).choose(q, paged(LayerCache(latents, pages), where), CFG)
        mask = where.visible.mask(W, ROWS)
        return by_pages, top_k_reference(indexer.masked(indexer.scores(q, whole), mask), TOPK)

    np.testing.assert_array_equal(*both(q, pages, whole))
    every = latent(xla()).choose(q, paged(LayerCache(latents, keys), where), choosing(ROWS))
    assert every is None, "all of it"


@pytest.mark.parametrize("fp8", [False, True])
def test_kernels_choose_what_xla_does(draw, fp8, monkeypatch):
    """The kernels' references are given pages, and what each token sees."""
    called = []

    def by_reference(run, *given, **options):
        called.append(run.__name__)
        return run(*given, **options | {"implementation": "xla"})

    monkeypatch.setattr(index_scores, "index_scores", partial(by_reference, index_scores.index_scores))
    monkeypatch.setattr(top_k, "top_k", partial(by_reference, top_k.top_k))
    slots, size, dim, where = 2, 32, 128, draw.view((20, 61))
    where = replace(where, page_table=jnp.asarray([[4, 1], [0, 3]]))
    q = IndexQueries(draw.half(slots, W, 8, dim), draw.normal(slots, W, 8))
    latents, keys = draw.normal(5, size, 16), draw.half(5, size, dim)

    @jax.jit
    def both(q, latents, keys):
        source = paged(LayerCache(latents, index_rows.pack(keys) if fp8 else keys), where)
        chosen = latent(mosaic_gpu()).choose(q, source, CFG)
        assert called == ["index_scores", "top_k"]
        latent(mosaic_gpu(kernels=frozenset())).choose(q, source, CFG)
        return chosen, latent(xla()).choose(q, source, CFG)

    np.testing.assert_array_equal(*both(q, latents, keys))
    wide = LayerCache(draw.normal(16, SIZE, 16), draw.normal(16, SIZE, DIM))
    plain = paged(wide, draw.view())
    jax.eval_shape(lambda asked: latent(mosaic_gpu()).choose(asked, plain, CFG), draw.asked())
    assert called == ["index_scores", "top_k", "top_k"], "what is not bfloat16 XLA scores"


@pytest.mark.parametrize("fp8", apart([False, True], True))
@pytest.mark.parametrize("on", apart([xla(), xla_cpu()], xla()))
def test_rows_read_one_by_one_give_what_a_mask_gives(draw, on, fp8):
    rank, w = TINY.kv_lora_rank, draw.ups()
    rows = draw.normal(B * COLUMNS, SIZE, CFG.row.width)
    empty = LayerCache(rows, draw.normal(B * COLUMNS, SIZE, DIM))
    cache = LayerCache(pack(rows, rank), empty.index) if fp8 else empty
    q, where = draw.queries(), draw.view()
    source = paged(cache, where)

    @jax.jit
    def attended(asked):
        chosen = latent(xla()).choose(asked, paged(empty, where), CFG)
        assert chosen is not None
        one_by_one = source.of(chosen)
        assert isinstance(one_by_one, Chosen)
        masked = paged(cache, where, indexer.chosen_mask(chosen, ROWS))
        return [latent(on).attend(q, w, rows, 0.3) for rows in (one_by_one, masked, source)]

    got, want, dense = map(np.asarray, attended(draw.asked()))
    # Queries to latents, scores, a sum over rows, latents to values.
    near(got, want, CFG.qk_nope_head_dim + CFG.row.width + ROWS + rank)
    assert np.abs(dense - got).max() > 0.01


def test_rows_that_tokens_share_are_read_once(draw):
    """Choices of more rows, token by token, than the pages have are a mask."""
    cache = LayerCache(draw.normal(B * COLUMNS, SIZE, CFG.row.width))
    chosen, where = jax.ShapeDtypeStruct((B, W, ROWS // W + 1), jnp.int32), draw.view()

    def kinds(chosen):
        assert isinstance(paged(cache, where).of(chosen), Paged)
        assert isinstance(paged(cache, where).of(chosen[..., 1:]), Chosen)

    jax.eval_shape(kinds, chosen)


@pytest.mark.rest
def test_kernels_attend_to_the_rows_of_each_token(draw, monkeypatch):
    """The kernel's reference reads pages, which hold rows that are not there first."""
    heads, rank, rope, count = 8, 512, 64, 128
    run, pages = mla_decode.mla_decode, []

    def by_reference(q, q_rope, given, *where, implementation, in_place, **options):
        pages.append(given.shape)
        return run(q, q_rope, given, *where, implementation="xla", **options)

    monkeypatch.setattr(mla_decode, "mla_decode", by_reference)
    q = Queries(draw.half(5, 1, heads, 32), draw.half(5, 1, heads, rope))
    w = Ups(draw.half(heads, 32, rank), draw.half(heads, 16, rank))
    rows = draw.half(2 * 5, 64, rank + rope)
    row = RowFormat(rank + rope, (rank, rank + rope), rank, 128)

    @partial(jax.jit, static_argnums=0)
    def attended(on: Backend, has: jax.Array) -> jax.Array:
        """Every slot has chosen the last rows, of two pages."""
        chosen = jnp.where(jnp.arange(count) >= count - has[:, None], jnp.arange(count), NOTHING)[:, None]
        where = PagedView(jnp.arange(10).reshape(5, 2), jnp.zeros((5, 1), int), chain(jnp.full(5, count), 1))
        source = Paged(LayerCache(rows), where, row).of(chosen)
        assert isinstance(source, Chosen)
        return latent(on).attend(q, w, source, 0.3).astype(jnp.float32)

    some = jnp.asarray([1, 63, 64, 100, count])
    want, got = (np.asarray(attended(on, some)) for on in (xla(), mosaic_gpu(strict=True)))
    assert pages == [(5 * 2, 64, rank + rope)]
    near(got, want, 2 * 4, jnp.bfloat16)  # either rounds queries, weights of rows, latents and values
    assert not np.asarray(attended(mosaic_gpu(strict=True), jnp.zeros_like(some))).any()


def test_kernels_that_must_attend_have_no_mask(draw):
    cache, only = LayerCache(draw.normal(9, SIZE, CFG.row.width)), jnp.ones((B, W, COLUMNS * SIZE), bool)
    rows = paged(cache, draw.view(), only)
    with pytest.raises(ConfigError, match=r"a choice among rows .* has no kernel; take kernels=auto"):
        latent(mosaic_gpu(strict=True)).attend(draw.queries(), draw.ups(), rows, 0.3)


def compiled_shapes(draw: Draw, topk: int) -> set[tuple[int, ...]]:
    """The shapes of all arrays in a compiled pass over one token of each slot."""
    where = replace(
        draw.view(), written=jnp.zeros((B, 1), jnp.int32), visible=chain(jnp.asarray([20, 29]), 1)
    )

    def run(q, asked, cache):
        mla, source = latent(xla()), paged(cache, where)
        return mla.attend(q, w, source.of(mla.choose(asked, source, choosing(topk))), 0.3)

    w = draw.ups()
    one = jax.tree.map(lambda x: x[:, :1], (draw.queries(), draw.asked()))
    pages = LayerCache(draw.normal(99, SIZE, CFG.row.width), draw.normal(99, SIZE, DIM))
    text = jax.jit(run).lower(*one, pages).compile().as_text() or ""
    return {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}


def test_a_token_reads_as_many_entries_as_it_chooses(draw):
    """At four times as many entries no array holds the latents of more than ``topk`` of a token's history."""

    def latents(shapes: set[tuple[int, ...]]) -> set[int]:
        """Latents of a slot that arrays hold, those of the whole cache aside."""
        width = CFG.row.width
        return {int(np.prod(s[:-1])) // B for s in shapes if s[-1] == width and 99 not in s}

    assert ROWS == 4 * TOPK
    assert max(latents(compiled_shapes(draw, TOPK))) == TOPK
    assert max(latents(compiled_shapes(draw, ROWS))) == ROWS, "dense attention reads them all"


def test_index_keys_in_eight_bits(draw):
    keys = np.asarray(draw.normal(5, DIM)) * np.array([1e-6, 1, 30, 500, 1e4], np.float32)[:, None]
    broken = np.where(np.arange(5 * DIM).reshape(5, DIM) == 0, np.float32(np.nan), keys)

    @jax.jit
    def back_and_forth(keys):
        packed = index_rows.pack(keys)
        return packed, index_rows.unpack(packed)

    (values, scales), back = jax.device_get(back_and_forth(keys))
    assert (values.dtype, scales.dtype) == (jnp.uint8, jnp.float32)
    assert values.nbytes + scales.nbytes == 5 * (DIM + 4)
    np.testing.assert_array_equal(np.log2(scales) % 1, 0)
    peak = np.abs(keys[1:]).max(axis=-1, keepdims=True)
    # e4m3 has three bits behind the first: a value is off by a sixteenth at most.
    assert (np.abs(back - keys)[1:] <= np.abs(keys[1:]) / 16 + peak * 2**-16).all()
    assert np.isnan(back_and_forth(broken)[1][0]).any()
