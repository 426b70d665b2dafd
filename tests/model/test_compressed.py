"""Compressed attention over a paged cache: the numbers of a pass over the whole sequence.

Windows have rejected drafts, and begin and end anywhere, over borders of entries of 4 and 128 tokens and of
pages. Caches begin filled with NaN: nothing is read before it is written.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mtp_jax.model import trunk
from mtp_jax.model.backend import xla, xla_cpu
from mtp_jax.model.cache import Cache, PagedView, WindowCache, empty_cache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.sight import Sight
from mtp_jax.model.trunk import Caches, Model
from mtp_jax.model.visible import chain
from tests import v4
from tests.rounding import near, of_model

# One layer of each kind; experts are few, as they are not the subject.
CONFIG = v4.v4_config(
    num_hidden_layers=3,
    compress_ratios=[4, 128, 0, 0],
    n_routed_experts=2,
    index_head_dim=24,
    hidden_size=32,
    hc_sinkhorn_iters=3,
)
SIZE, WIDEST, SLOTS, COLUMNS = 128, 5, 3, 3
ON = xla_cpu()


@cache
def model() -> tuple[ModelConfig, Params]:
    found = v4.loaded(CONFIG, v4.v4_tensors(CONFIG), num_nextn_layers=0)
    return found.config, found.params


@cache
def text() -> np.ndarray:
    return np.random.default_rng(5).integers(2, CONFIG["vocab_size"], (2, 300))


@cache
def whole() -> np.ndarray:
    """Hidden states [2, 300, D] of a pass over whole sequences."""
    cfg, params = model()
    return np.asarray(jax.jit(lambda p: trunk.forward(p, cfg, jnp.asarray(text()), ON))(params))


def empty(fp8: bool = False) -> Caches:
    cfg, _ = model()

    def one(layer: int) -> Cache:
        pages = empty_cache(SLOTS * COLUMNS + 1, SIZE, cfg, layer, jnp.float32, fp8=fp8)
        return xla().kind(cfg).cache(pages, cfg, layer, SLOTS, WIDEST)

    def broken(a: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(
            np.full(a.shape, np.nan if jnp.issubdtype(a.dtype, jnp.floating) else 255, a.dtype)
        )

    return jax.tree.map(broken, jax.eval_shape(lambda: tuple(map(one, range(cfg.num_hidden_layers)))))


# Pages lie in no order; the sequences are in slots 2 and 0, and slot 1 is idle.
TABLE = jnp.array([[4, 1, 7], [8, 0, 3]])
SLOT = jnp.array([2, 0])


def step(params: Params, caches: Caches, tokens, start, count) -> tuple[np.ndarray, Caches]:
    """A pass over windows [2, W] from ``start`` on, of which ``count`` tokens are written."""
    hidden, caches = _step(params, caches, tokens, start, count)
    return np.asarray(hidden), caches


@partial(jax.jit, donate_argnums=1)
def _step(params: Params, caches: Caches, tokens, start, count) -> tuple[jax.Array, Caches]:
    cfg, _ = model()
    index = jnp.arange(tokens.shape[1])
    positions = start[:, None] + index
    written = jnp.where(index < count[:, None], positions, -1)
    view = PagedView(TABLE, written, chain(start, count), slot=SLOT)
    out = trunk.run(params, Model(cfg, ON), tokens, positions, caches, (view,))
    return out.hidden, out.caches


def in_use(caches: Caches, length: np.ndarray) -> list[np.ndarray]:
    """Everything that a later token may read, of sequences of these lengths."""
    found = []
    for slot, (table, tokens) in enumerate(zip(np.asarray(TABLE), length, strict=True)):
        whole = table[: tokens // SIZE]
        for layer, ratio in zip(caches, CONFIG["compress_ratios"], strict=False):
            assert isinstance(layer, WindowCache)
            for pages in jax.tree.leaves((layer.pages.rows, layer.pages.inputs)):
                found.append(np.asarray(pages)[whole])
            for pages in jax.tree.leaves(layer.pages.entries):
                rows = np.asarray(pages)[table].reshape(COLUMNS * SIZE // ratio, -1)
                found.append(rows[: tokens // ratio])
            # A slot has values of the page's tokens: of the window, and of an entry that is not whole yet.
            window, entry = tokens - (CONFIG["sliding_window"] - 1), tokens
            if ratio:
                entry = tokens // ratio * ratio - (ratio if ratio == 4 else 0)
            for values, first in ((layer.slots.rows, window), (layer.slots.inputs, entry)):
                at = np.arange(max(first, tokens // SIZE * SIZE), tokens)
                for own in jax.tree.leaves(values):
                    found.append(np.asarray(own)[int(SLOT[slot])][at % own.shape[1]])
    return found


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rejected_drafts_leave_no_trace(fp8: bool):
    """States and hidden states equal the same of windows without drafts bit for bit, and whole passes nearly.

    FP8 rows are other rows, so that other entries are chosen now and then.
    """
    cfg, params = model()
    rng, drafted, plain = np.random.default_rng(1), empty(fp8), empty(fp8)
    length, steps = np.array([0, 0]), 0
    while (length < 290).any():
        kept = rng.integers(1, WIDEST + 1, 2)
        kept[length + kept > 300] = 0
        if steps % 7 == 3:
            kept[steps % 2] = 0  # this slot is idle
        index = length[:, None] + np.arange(WIDEST)
        tokens = np.take_along_axis(text(), np.minimum(index, 299), axis=1)
        wrong = np.where(np.arange(WIDEST) < kept[:, None], tokens, (tokens + 1) % CONFIG["vocab_size"])
        got, drafted = step(params, drafted, wrong, length, np.where(kept > 0, WIDEST, 0))
        same, plain = step(params, plain, tokens, length, kept)
        for row, (begin, some) in enumerate(zip(length, kept, strict=True)):
            np.testing.assert_array_equal(got[row, :some], same[row, :some])
            want = whole()[row, begin : begin + some]
            if not fp8:
                near(got[row, :some], want, of_model(cfg, 300), size=np.abs(whole()).max())
            elif some:
                assert np.abs(got[row, :some] - want).mean() < 0.3
        length, steps = length + kept, steps + 1
        if steps % 8 == 0 or (length >= 290).all():
            for a, b in zip(in_use(drafted, length), in_use(plain, length), strict=True):
                assert np.isfinite(a.astype(np.float32)).all()
                np.testing.assert_array_equal(a, b)
    assert steps > 80


@pytest.mark.slow
@pytest.mark.parametrize("widths", [[1], [3], [7], [64], [129], [128, 45]], ids=str)
def test_chunks_with_any_borders_are_one_pass(widths: list[int]):
    """The second sequence lags behind, so that borders fall elsewhere in it."""
    cfg, params = model()
    caches, length, got = empty(), np.array([0, -5]), np.zeros_like(whole())
    turn = 0
    while length.min() < 290:
        width = widths[turn % len(widths)]
        start = np.maximum(length, 0)
        count = np.clip(length + width - start, 0, 300 - start)
        index = np.minimum(start[:, None] + np.arange(width), 299)
        tokens = np.take_along_axis(text(), index, axis=1)
        hidden, caches = step(params, caches, tokens, start, count)
        for row in range(2):
            got[row, start[row] : start[row] + count[row]] = hidden[row, : count[row]]
        length, turn = np.maximum(length + width, start + count), turn + 1
        length = np.where(start + count >= 300, 300, length)
    near(got[:, :290], whole()[:, :290], of_model(cfg, 300))


def rows_read(columns: int) -> dict[int, int]:
    """Rows of the cache that a step of one token and slot reads in a layer of each ratio.

    Counted in the traced program: results of gathers as wide as a row. Index keys are narrower.
    """
    cfg, params = model()
    width, counts = CONFIG["head_dim"], {}

    def walk(jaxpr) -> int:
        found = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "gather" and eqn.outvars[0].aval.shape[-1:] == (width,):
                found += eqn.outvars[0].aval.size // width
            for sub in jaxprs_in_params(eqn.params):
                found += walk(sub)
        return found

    def given(layer: int) -> Any:
        table, one = jnp.zeros((1, columns), jnp.int32), jnp.ones(1, jnp.int32)
        where = PagedView(table, jnp.zeros((1, 1), jnp.int32), chain(one, one), slot=one)
        pages = empty_cache(columns + 1, SIZE, cfg, layer, jnp.float32)
        x, angles = jnp.zeros((1, 1, 4, 32)), jnp.zeros((1, 1, 2, 2, 4))
        return x, Sight(angles, (where,)), xla().kind(cfg).cache(pages, cfg, layer, 1, 1)

    for layer, ratio in enumerate(CONFIG["compress_ratios"][:3]):
        jaxpr = jax.make_jaxpr(lambda p, x, sight, own: trunk.attended(p, Model(cfg, ON), x, sight, own))(
            params.layers[layer], *jax.eval_shape(partial(given, layer))
        )
        counts[ratio] = walk(jaxpr.jaxpr)
    return counts


@pytest.mark.rest
def test_a_step_reads_the_window_and_entries_not_the_context():
    """After 8,000 tokens: the window, by slot and by page before; chosen entries, or all of 128 tokens."""
    window, topk = CONFIG["sliding_window"] - 1, CONFIG["index_topk"]
    assert rows_read(63) == {0: 2 * window, 4: 2 * window + topk, 128: 2 * window + 63}
    assert rows_read(126) == {0: 2 * window, 4: 2 * window + topk, 128: 2 * window + 126}
