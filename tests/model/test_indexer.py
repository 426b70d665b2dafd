"""What sparse attention chooses, how choices are read from pages, and how few entries that touches."""

import re
from dataclasses import replace
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
from mtp_jax.errors import ConfigError
from mtp_jax.model import indexer
from mtp_jax.model.backend import MosaicGpu, Xla, XlaCpu, selection
from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.config import IndexerConfig
from mtp_jax.model.indexer import NOTHING, IndexQueries
from mtp_jax.model.mla import Queries
from mtp_jax.model.visible import chain
from tests.models import TINY

B, W, HEADS, DIM, SIZE, COLUMNS, TOPK = 2, 3, 4, 8, 4, 8, 8
ROWS = SIZE * COLUMNS
CFG = replace(TINY, indexer=IndexerConfig(HEADS, DIM, TOPK, shared=(False, False)))
RNG = np.random.default_rng(3)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def asked() -> IndexQueries:
    return IndexQueries(normal(B, W, HEADS, DIM), normal(B, W, HEADS))


def view(lengths: Any = (20, 29), form: Any = "absorbed") -> PagedView:
    start = jnp.asarray(lengths)
    table = jnp.asarray(RNG.permutation(B * COLUMNS).reshape(B, COLUMNS))
    written = start[:, None] + jnp.arange(W)
    return PagedView(table, written, chain(start, jnp.full(B, W)), form)


def chosen_of(found: Any, visible: Any = True, topk: int = 3) -> list[int]:
    row = jnp.asarray(found, jnp.float32)[None, None]
    return indexer.choose(row, jnp.broadcast_to(jnp.asarray(visible), row.shape), topk)[0, 0].tolist()


def test_the_best_are_chosen_in_order():
    assert chosen_of([1, 5, 3, 9, 2]) == [1, 2, 3]
    assert chosen_of([1, 5, 3, 9, 2], [True, False, True, True, True]) == [2, 3, 4]
    assert chosen_of([-1, -5], topk=3) == [0, 1]


def test_a_score_of_a_broken_key_is_no_number():
    keys = normal(B, ROWS, DIM).at[:, 7].set(jnp.nan)
    found = jax.jit(indexer.scores)(asked(), keys)
    assert np.isnan(found[..., 7]).all()
    assert np.isfinite(np.delete(found, 7, axis=-1)).all()


def test_of_equal_scores_the_first_ones_win():
    assert chosen_of([0, 7, 7, 0, 7, 7]) == [1, 2, 4]
    assert chosen_of([0.0] * 6) == [0, 1, 2]


def test_where_less_is_visible_nothing_is_chosen_beside_it():
    assert chosen_of([1, 5, 3], [False, True, False]) == [NOTHING, NOTHING, 1]
    mask = indexer.chosen_mask(jnp.asarray([[[NOTHING, NOTHING, 1]]]), 3)
    assert mask.tolist() == [[[False, True, False]]]


def test_what_is_not_a_number_is_chosen_if_it_is_visible():
    assert chosen_of([np.nan, 5, 3, 9, 2]) == [0, 1, 3]
    assert chosen_of([np.nan, 5, 3, 9, 2], [False, True, True, True, True]) == [1, 2, 3]


def test_scores_are_the_formula():
    q, k = asked(), normal(B, ROWS, DIM)
    want = np.einsum("bwhl,bwh->bwl", np.maximum(np.einsum("bwhi,bli->bwhl", q.q, k), 0), q.weights)
    np.testing.assert_allclose(indexer.scores(q, k), want, atol=1e-5)


@pytest.mark.parametrize("size", [4, 8, 12, 32])
def test_blocks_give_the_same_scores(size):
    q, k = asked(), normal(B, ROWS, DIM)
    padded = jnp.pad(k, ((0, 0), (0, -ROWS % size), (0, 0)))

    def read(i):
        return jax.lax.dynamic_slice_in_dim(padded, i * size, size, axis=1)

    got = indexer.scores_in_blocks(q, read, size, ROWS, -(-ROWS // size))
    np.testing.assert_allclose(got, indexer.scores(q, k), atol=1e-5)


def test_pages_are_chosen_from_like_a_whole_sequence():
    q, where = asked(), view()
    latents, keys = normal(B * COLUMNS, SIZE, CFG.latent_dim), normal(B * COLUMNS, SIZE, DIM)
    # What no token sees may be anything.
    last = where.visible.end()
    whole = keys[where.page_table].reshape(B, ROWS, DIM)
    broken = jnp.where(jnp.arange(ROWS)[:, None] < last[:, None, None], whole, jnp.nan)
    pages = keys.at[where.page_table].set(broken.reshape(B, COLUMNS, SIZE, DIM))
    got = Xla().choose(q, LayerCache(latents, pages), where, TOPK)
    want = indexer.choose(indexer.scores(q, whole), where.visible.mask(W, ROWS), TOPK)
    np.testing.assert_array_equal(got, want)
    assert Xla().choose(q, LayerCache(latents, keys), where, ROWS) is None, "all of it"


@pytest.mark.parametrize("fp8", [False, True])
def test_kernels_choose_what_xla_does(fp8, monkeypatch):
    """The kernels' references are given pages, and what each token sees."""
    called = []

    def by_reference(run, *given, **options):
        called.append(run.__name__)
        return run(*given, **options | {"implementation": "xla"})

    monkeypatch.setattr(index_scores, "index_scores", partial(by_reference, index_scores.index_scores))
    monkeypatch.setattr(top_k, "top_k", partial(by_reference, top_k.top_k))
    slots, size, dim, where = 2, 32, 128, view((20, 61))
    where = replace(where, page_table=jnp.asarray([[4, 1], [0, 3]]))
    q = IndexQueries(normal(slots, W, 8, dim).astype(jnp.bfloat16), normal(slots, W, 8))
    keys = normal(5, size, dim).astype(jnp.bfloat16)
    cache = LayerCache(normal(5, size, 16), index_rows.pack(keys) if fp8 else keys)
    got = MosaicGpu().choose(q, cache, where, TOPK)
    assert called == ["index_scores", "top_k"]
    np.testing.assert_array_equal(got, Xla().choose(q, cache, where, TOPK))
    MosaicGpu(kernels=frozenset()).choose(q, cache, where, TOPK)
    MosaicGpu().choose(asked(), LayerCache(normal(16, SIZE, 16), normal(16, SIZE, DIM)), view(), TOPK)
    assert called == ["index_scores", "top_k", "top_k"], "what is not bfloat16 XLA scores"


def queries() -> Queries:
    heads = TINY.num_attention_heads
    return Queries(normal(B, W, heads, TINY.qk_nope_head_dim), normal(B, W, heads, TINY.qk_rope_head_dim))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("on", [Xla(), XlaCpu()], ids=["Xla", "XlaCpu"])
def test_rows_read_one_by_one_give_what_a_mask_gives(on, fp8, monkeypatch):
    heads, nope, rank = TINY.num_attention_heads, TINY.qk_nope_head_dim, TINY.kv_lora_rank
    k_up, v_up = normal(heads, nope, rank), normal(heads, TINY.v_head_dim, rank)
    rows = normal(B * COLUMNS, SIZE, CFG.latent_dim)
    empty = LayerCache(rows, normal(B * COLUMNS, SIZE, DIM))
    cache = LayerCache(pack(rows, rank), empty.index) if fp8 else empty
    q, where = queries(), view()
    chosen = Xla().choose(asked(), empty, where, TOPK)
    results = []
    for gathers in (True, False):
        monkeypatch.setattr(selection, "gathers", lambda *_, gathers=gathers: gathers)
        run = jax.jit(partial(on.attend_chosen, scale=0.3))
        results.append(run(q, k_up, v_up, cache, where, chosen=chosen))
    np.testing.assert_allclose(*results, atol=1e-5)
    dense = on.attend_pages(q, k_up, v_up, cache, where, 0.3)
    assert np.abs(dense - results[0]).max() > 0.01


def test_kernels_attend_to_the_rows_of_each_token(monkeypatch):
    """The kernel's reference reads pages, which hold rows that are not there first."""
    heads, rank, rope, count = 8, 512, 64, 128
    run, pages = mla_decode.mla_decode, []

    def by_reference(q, q_rope, given, *where, implementation, in_place, **options):
        pages.append(given.shape)
        return run(q, q_rope, given, *where, implementation="xla", **options)

    monkeypatch.setattr(mla_decode, "mla_decode", by_reference)
    parts = Queries(normal(5, 1, heads, 32), normal(5, 1, heads, rope)), normal(heads, 32, rank)
    given = *parts, normal(heads, 16, rank), normal(5, count, rank + rope)
    q, k_up, v_up, rows = jax.tree.map(lambda x: x.astype(jnp.bfloat16), given)
    there = jnp.arange(count) >= count - jnp.asarray([1, 63, 64, 100, count])[:, None]
    want = Xla().attend_own(q, k_up, v_up, rows, there, 0.3).astype(jnp.float32)
    got = MosaicGpu(strict=True).attend_own(q, k_up, v_up, rows, there, 0.3).astype(jnp.float32)
    assert pages == [(5 * 2, 64, rank + rope)]
    np.testing.assert_allclose(got, want, atol=0.02 * float(jnp.abs(want).max()))  # bfloat16 keeps 8 bits
    nothing = MosaicGpu(strict=True).attend_own(q, k_up, v_up, rows, jnp.zeros_like(there), 0.3)
    assert not nothing.any()


def test_kernels_that_must_attend_have_no_mask():
    heads, nope, rank = TINY.num_attention_heads, TINY.qk_nope_head_dim, TINY.kv_lora_rank
    k_up, v_up = normal(heads, nope, rank), normal(heads, TINY.v_head_dim, rank)
    cache, only = LayerCache(normal(9, SIZE, CFG.latent_dim)), jnp.ones((B, W, COLUMNS * SIZE), bool)
    with pytest.raises(ConfigError, match=r"a choice among rows .* has no kernel: --kernels auto"):
        MosaicGpu(strict=True).attend_pages(queries(), k_up, v_up, cache, view(), 0.3, only)


def compiled_shapes(topk: int) -> set[tuple[int, ...]]:
    """The shapes of all arrays in a compiled pass over one token of each slot."""
    heads, nope, rank = TINY.num_attention_heads, TINY.qk_nope_head_dim, TINY.kv_lora_rank
    where = replace(view(), written=jnp.zeros((B, 1), jnp.int32), visible=chain(jnp.asarray([20, 29]), 1))

    def run(q, asked, cache):
        chosen = Xla().choose(asked, cache, where, topk)
        return Xla().attend_chosen(q, *ups, cache, where, 0.3, chosen)

    ups = normal(heads, nope, rank), normal(heads, TINY.v_head_dim, rank)
    one = jax.tree.map(lambda x: x[:, :1], (queries(), asked()))
    pages = LayerCache(normal(99, SIZE, CFG.latent_dim), normal(99, SIZE, DIM))
    text = jax.jit(run).lower(*one, pages).compile().as_text() or ""
    return {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}


def test_a_token_reads_as_many_entries_as_it_chooses():
    """At four times as many entries no array holds the latents of more than ``topk`` of a token's history."""

    def latents(shapes: set[tuple[int, ...]]) -> set[int]:
        """Latents of a slot that arrays hold, those of the whole cache aside."""
        width = CFG.latent_dim
        return {int(np.prod(s[:-1])) // B for s in shapes if s[-1] == width and 99 not in s}

    assert ROWS == 4 * TOPK
    assert max(latents(compiled_shapes(TOPK))) == TOPK
    assert max(latents(compiled_shapes(ROWS))) == ROWS, "dense attention reads them all"


def test_index_keys_in_eight_bits():
    keys = normal(5, DIM) * jnp.asarray([1e-6, 1, 30, 500, 1e4])[:, None]
    values, scales = index_rows.pack(keys)
    assert (values.dtype, scales.dtype) == (jnp.uint8, jnp.float32)
    assert values.nbytes + scales.nbytes == 5 * (DIM + 4)
    np.testing.assert_array_equal(jnp.log2(scales) % 1, 0)
    back = index_rows.unpack((values, scales))
    peak = np.abs(keys[1:]).max(axis=-1, keepdims=True)
    # e4m3 has three bits behind the first: a value is off by a sixteenth at most.
    assert (np.abs(back - keys)[1:] <= np.abs(keys[1:]) / 16 + peak * 2**-16).all()
    assert np.isnan(index_rows.unpack(index_rows.pack(keys.at[0, 0].set(jnp.nan)))[0]).any()
