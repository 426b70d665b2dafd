"""MLA over the paged cache: both forms, against attention without a cache, whatever the pages are."""

import functools
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoint import load
from mtp_jax.model import trunk
from mtp_jax.model.attention import cpu as cpu_attention
from mtp_jax.model.attention.pages import by_loop, by_scatter
from mtp_jax.model.attention.source import Paged, Whole
from mtp_jax.model.backend import Backend, xla, xla_cpu
from mtp_jax.model.cache import Entries, LayerCache, PagedView, Views, empty_cache, read_rows
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layers import rope_angles
from mtp_jax.model.mla import Form, Queries, Ups
from mtp_jax.model.params import Attention, Layer
from mtp_jax.model.sight import Sight
from mtp_jax.model.visible import chain
from tests.golden import expected, model_dir
from tests.model.kinds import latent
from tests.models import TINY, apart, rigged
from tests.rounding import error, near, of_model

B, T, SIZE = 2, 11, 4  # slots, tokens, rows per page
COLUMNS = 4
NO_LOW_RANK = replace(TINY, q_lora_rank=None)
HALF_SPLIT = replace(TINY, rope_interleave=False)
CONFIGS = {"low rank": TINY, "no low rank": NO_LOW_RANK, "half-split rope": HALF_SPLIT}


@functools.cache
@jax.ensure_compile_time_eval()  # a test may ask first while it traces a program
def block(name: str) -> tuple[Layer, np.ndarray, np.ndarray]:
    """Weights, inputs [B, T, D] and what attention without a cache makes of them."""
    cfg = CONFIGS[name]
    p = rigged(cfg).layers[0]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, cfg.hidden_size)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))

    @jax.jit
    def whole(x: jax.Array) -> jax.Array:
        return attention(p, cfg, x, rope_angles(cfg, positions), None, (), xla())[0]

    out = whole(x)
    return p, np.asarray(x), np.asarray(out)


def terms(cfg: ModelConfig = TINY) -> int:
    """Sums that follow each other: queries, latents, keys, scores, rows, values, outputs."""
    n, nope, rope, v = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    queries = cfg.hidden_size + (cfg.q_lora_rank or 0)
    return queries + cfg.hidden_size + cfg.kv_lora_rank + nope + rope + 4 * COLUMNS + cfg.kv_lora_rank + n * v


def weights() -> Attention:
    p = block("low rank")[0].attention
    assert isinstance(p, Attention)
    return p


def attention(
    p: Layer, cfg: ModelConfig, x: Any, angles: Any, cache: Any, views: Views, on: Backend
) -> tuple[Any, Any]:
    """What the attention of a block adds to x."""
    sight = Sight(angles, views)
    x, q, rows, cache = on.before_attention(p, cfg, x, sight, cache)
    context, cache, _ = on.attend(p.attention, cfg, q, rows, cache, sight)
    return on.after_attention(p, cfg, jnp.zeros_like(x), context, views), cache


@functools.cache
def compiled(name: str, form: Form, on: Backend):
    def run(x, positions, cache, view):
        cfg: ModelConfig = CONFIGS[name]
        angles, views = rope_angles(cfg, jnp.maximum(positions, 0)), (replace(view, form=form),)
        return attention(block(name)[0], cfg, x, angles, cache, views, on)

    return jax.jit(run)


def ups() -> Ups:
    return Ups(weights().k_up, weights().v_up)


def view_of(table: np.ndarray, positions: np.ndarray) -> PagedView:
    """Every window token sees the rows up to its own position."""
    start, count = positions[:, 0], (positions >= 0).sum(axis=1)
    seen = chain(jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32))
    return PagedView(jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32), seen)


def rows_of(cache: LayerCache, view: PagedView) -> np.ndarray:
    """Every row of the slots' pages as attention reads it."""
    return np.asarray(_rows(cache, view))


@jax.jit
def _rows(cache: LayerCache, view: PagedView) -> jax.Array:
    seen = view.visible.seen(view.page_table.shape[1] * SIZE)
    return read_rows(cache, view.page_table, seen, jnp.float32, TINY.kv_lora_rank)


BACKENDS = {"xla": xla(), "xla_cpu": xla_cpu()}
WINDOWS = [(name, form, kind) for name in CONFIGS for form in get_args(Form) for kind in BACKENDS]
# Every form and every backend once; the others are further pairs of them.
FAST = ("low rank", "naive", "xla_cpu"), ("low rank", "absorbed", "xla"), ("half-split rope", "naive", "xla")


@pytest.mark.parametrize(("name", "form", "kind"), apart(WINDOWS, *FAST))
def test_windows_through_the_cache_equal_one_pass_without(name, form, kind):
    """Windows of 3 with garbage behind them, NaN everywhere else, pages in any order."""
    _, x, want = block(name)
    rng = np.random.default_rng(2)
    table = rng.permutation(B * COLUMNS).reshape(B, COLUMNS)
    pages = jnp.full((B * COLUMNS + 1, SIZE, CONFIGS[name].row.width), jnp.nan, jnp.float32)
    cache = LayerCache(pages)
    width, got = 3, np.zeros_like(want)
    for start in range(0, T, width):
        real = min(width, T - start)
        positions = np.full((B, width), -1)
        positions[:, :real] = np.arange(start, start + real)
        window = np.zeros((B, width, x.shape[-1]), np.float32)
        window[:, :real] = x[:, start : start + real]
        out, cache = compiled(name, form, BACKENDS[kind])(
            window, jnp.asarray(positions), cache, view_of(table, positions)
        )
        got[:, start : start + real] = np.asarray(out)[:, :real]
    near(got, want, terms(CONFIGS[name]))


def queries(rng: np.random.Generator, width: int) -> Queries:
    n, nope, r = TINY.num_attention_heads, TINY.qk_nope_head_dim, TINY.qk_rope_head_dim
    parts = (jnp.asarray(rng.normal(size=(B, width, n, d)), jnp.float32) for d in (nope, r))
    return Queries(next(parts), next(parts))


def test_both_forms_of_both_backends_agree_under_any_mask(rng):
    q = queries(rng, 3)
    rows = jnp.asarray(rng.normal(size=(B, 9, TINY.row.width)), jnp.float32)
    mask = rng.random((B, 3, 9)) < 0.6
    mask[0, 1] = False

    @jax.jit
    def by_all(q, rows, mask):
        return [
            latent(on).attend(q, ups(), Whole(rows, mask, form=form), 0.3)
            for on in (xla(), xla_cpu())
            for form in get_args(Form)
        ]

    every = by_all(q, rows, mask)
    for got in every:
        near(got, every[0], terms())
        np.testing.assert_array_equal(np.asarray(got)[0, 1], 0)  # a window token that sees nothing


@pytest.mark.parametrize(
    "on", [pytest.param(xla(), marks=pytest.mark.rest), xla_cpu()], ids=["xla", "xla_cpu"]
)
def test_the_two_forms_have_the_same_derivatives(on, rng):
    q, w = queries(rng, 3), ups()
    rows = jnp.asarray(rng.normal(size=(B, 9, TINY.row.width)), jnp.float32)
    mask = rng.random((B, 3, 9)) < 0.6
    mask[0, 1] = False
    weigh = jnp.asarray(rng.normal(size=(B, 3, *w.v.shape[:2])), jnp.float32)

    def total(form, q, w, rows):
        return (latent(on).attend(q, w, Whole(rows, jnp.asarray(mask), form=form), 0.3) * weigh).sum()

    @jax.jit
    def both(*given):
        return [
            jax.tree.leaves(jax.grad(functools.partial(total, form), (0, 1, 2))(*given)) for form in forms
        ]

    forms = get_args(Form)
    for a, b in zip(*both(q, w, rows), strict=True):
        assert np.abs(b).max() > 0.1
        near(a, b, 2 * terms() + B * 3 * TINY.num_attention_heads)  # there and back, summed over all queries


@pytest.mark.parametrize("form", apart(get_args(Form), "absorbed"))
@pytest.mark.parametrize("columns", apart([4, 5], 5))
def test_blocks_of_the_cache_equal_all_of_it(monkeypatch, columns, form, rng):
    """Blocks have two pages, the last has one. Rows that no token sees are NaN. An idle slot gives zeros.

    How many blocks another slot needs changes nothing, to the bit.
    """
    monkeypatch.setattr(cpu_attention, "_BLOCK", 2 * SIZE)
    q = queries(rng, 3)
    table = rng.permutation(B * columns).reshape(B, columns)
    rows = rng.normal(size=(B * columns + 1, SIZE, TINY.row.width)).astype(np.float32)

    @jax.jit
    def attended(cache, view):
        source = Paged(cache, replace(view, form=form), TINY.row)
        return latent(xla_cpu()).attend(q, ups(), source, 0.3)

    @jax.jit
    def plainly(seen, view):
        whole = Whole(seen, view.visible.mask(3, columns * SIZE), form=form)
        return latent(xla()).attend(q, ups(), whole, 0.3)

    found = {}
    for others in (-1, 2, SIZE, 3 * SIZE, columns * SIZE - 3):
        ends = np.array([SIZE + 1, others])
        positions = np.where(ends[:, None] < 0, -1, ends[:, None] + np.arange(3))
        view = view_of(table, positions)
        pages = rows.copy()
        for slot in range(B):
            pages[table[slot]] = np.where(
                (np.arange(columns * SIZE) <= positions[slot].max()).reshape(columns, SIZE, 1),
                pages[table[slot]],
                np.nan,
            )
        cache = LayerCache(jnp.asarray(pages))
        got = np.asarray(attended(cache, view))
        near(got, plainly(jnp.asarray(rows_of(cache, view)), view), terms())
        found[others] = got
    np.testing.assert_array_equal(found[-1][1], 0)
    for got in found.values():
        np.testing.assert_array_equal(got[0], found[-1][0])


def test_prefill_takes_the_form_with_fewer_operations():
    """Per head and cached row: naive (h + v) C once and h + R + v per token, absorbed 2 C + R per token."""
    cfg = replace(TINY, kv_lora_rank=192, qk_nope_head_dim=64, v_head_dim=64)
    h, v, c, r = cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    forms = [latent(xla_cpu()).prefill_form(cfg, w) for w in range(1, 300)]
    fewer = [w * (2 * c + r) <= (h + v) * c + w * (h + r + v) for w in range(1, 300)]
    assert forms == ["absorbed" if few else "naive" for few in fewer]
    assert len(set(forms)) == 2, "there is nothing to choose in this model"


@pytest.mark.parametrize("form", ["naive", "absorbed"])
def test_large_scores_do_not_overflow(form, rng):
    q = queries(rng, 1)
    rows = jnp.asarray(rng.normal(size=(B, 5, TINY.row.width)), jnp.float32)
    for on in (xla(), xla_cpu()):
        run = jax.jit(
            lambda q, rows, mask, on=on: latent(on).attend(q, ups(), Whole(rows, mask, form=form), 1e4)
        )
        out = run(q, rows, np.ones((B, 1, 5), bool))
        assert np.isfinite(out).all()


@pytest.mark.parametrize("write", [by_scatter, by_loop])
def test_rows_are_written_where_they_are_asked_for_and_nowhere_else(write, rng):
    table = np.array([[2, 0], [1, 4]])
    pages = rng.normal(size=(6, SIZE, 3)).astype(np.float32)  # page 5 is for rows nobody wants
    positions = np.array([[3, 4, -1], [-1, 6, 0]])
    rows = rng.normal(size=(2, 3, 3)).astype(np.float32)
    got = jax.jit(write)(jnp.asarray(pages), jnp.asarray(rows), jnp.asarray(table), jnp.asarray(positions))
    want = pages.copy()
    want[2, 3], want[0, 0], want[4, 2], want[1, 0] = rows[0, 0], rows[0, 1], rows[1, 1], rows[1, 2]
    np.testing.assert_array_equal(np.asarray(got)[:5], want[:5])


def test_read_rows_hides_what_no_window_token_may_see():
    table = np.array([[1, 0]])
    pages = np.full((3, SIZE, 2), np.nan, np.float32)
    pages[1] = 7
    positions = np.array([[1, 2]])
    rows = rows_of(LayerCache(jnp.asarray(pages)), view_of(table, positions))
    np.testing.assert_array_equal(rows[0, :3], 7)
    np.testing.assert_array_equal(rows[0, 3:], 0)


@pytest.mark.rest
@pytest.mark.parametrize("form", ["naive", "absorbed"])
def test_distance_of_an_fp8_cache(form):
    """A golden checkpoint through the cache.

    e4m3 keeps three bits behind the first: every latent moves by a sixteenth at most, and so, by about
    1 / sqrt(3) of it, does the output of attention, which is smaller than the stream that it is added to.
    """
    found, want = load(model_dir("rigged"), dtype="float32"), expected("rigged")
    cfg, tokens = found.config, jnp.asarray(want["input_ids"])[None]
    count = tokens.shape[1]
    columns = -(-count // SIZE)
    positions = np.arange(count)[None]
    view = view_of(np.arange(columns)[None], positions)

    @jax.jit
    def logits(cache):
        layers = (cache,) * cfg.num_hidden_layers
        views = (replace(view, form=form),)
        traced = trunk.run(found.params, trunk.Model(cfg, xla_cpu()), tokens, view.written, layers, views)
        return trunk.logits(found.params, traced.hidden)[0]

    plain, fp8 = (
        logits(empty_cache(columns + 1, SIZE, cfg, 0, jnp.float32, fp8=kind)) for kind in (False, True)
    )
    near(plain, want["logits"], of_model(cfg, count))
    off = np.linalg.norm(fp8 - want["logits"], axis=-1) / np.linalg.norm(want["logits"], axis=-1)
    assert off.max() < 2**-4 * np.sqrt(cfg.num_hidden_layers / 3)
    assert off.mean() > error(of_model(cfg, count)), "rounding alone"


def test_fp8_rows_are_written_alike_everywhere(rng):
    """By a loop on a CPU, by a scatter on a GPU; what is read back is what was packed."""
    table, positions = np.array([[2, 0], [1, 4]]), np.array([[3, 4, -1], [-1, 6, 0]])
    cfg = replace(TINY, kv_lora_rank=6, qk_rope_head_dim=4)

    @jax.jit
    def written(given):
        empty = empty_cache(6, SIZE, cfg, 0, jnp.float32, fp8=True)
        rows = empty.stored(Entries(given), cfg.row)
        return *(write(empty, rows, jnp.asarray(table), jnp.asarray(positions)) for write in ways), rows

    ways = by_loop, by_scatter
    looped, scattered, rows = jax.device_get(written(rng.normal(size=(2, 3, 10)).astype(np.float32)))
    for a, b, row in zip(*map(jax.tree.leaves, (looped, scattered, rows)), strict=True):
        np.testing.assert_array_equal(a[:5], b[:5])
        np.testing.assert_array_equal(a[2, 3], row[0, 0])
        np.testing.assert_array_equal(a[0, 0], row[0, 1])
        np.testing.assert_array_equal(a[4, 2], row[1, 1])
