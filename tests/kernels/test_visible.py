"""What a token sees, said compactly, is what a dense mask says; and what both attention kernels are told."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.mla_prefill import api as mla_prefill
from kernels_pallas.visible import MAX_AHEAD, Window, chain
from mtp_jax.decode.keys import MAX_DRAFTS
from mtp_jax.model import draft_module

ROWS = 80
# Few, as each is a program of its own.
WIDTHS = 1, 5, MAX_AHEAD + 1
SLOTS = 3


def array(values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def jitted(*static: int):
    """Compile a function once for each of the few widths and sizes."""
    return partial(jax.jit, static_argnums=static)


@jax.jit
def as_chain(starts, counts, first) -> Window:
    return chain(starts, counts, first)


@jitted(1, 2)
def blocks_of(window, width, size):
    """What a window shows of all rows, and of a block of rows at a time; the end of its rows."""
    starts = range(0, ROWS, size)
    return (
        window.mask(width, ROWS),
        window.seen(ROWS),
        jnp.concatenate([window.mask(width, size, start) for start in starts], axis=2),
        jnp.concatenate([window.seen(size, start) for start in starts], axis=1),
        window.end(),
    )


@jitted(1)
def told_to_decode(window, width):
    bits = window.bits(width, ROWS)
    return bits.first, bits.length, bits.end(), bits.seen_ahead(), bits.ancestors


@jitted(1)
def told_to_prefill(window, start):
    return mla_prefill.bounds(window.shifted(start), ROWS - start)


@jitted(0, 1)
def seen_by_draft(step, layers, lengths, active):
    return draft_module.seen_by_draft(step, layers, lengths, active).mask(1, ROWS)


def dense(starts, counts, first, parents) -> np.ndarray:
    """Row by row: a token sees what is before ``start``, and of the window itself and its ancestors."""
    mask = np.zeros((SLOTS, len(parents), ROWS), bool)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for token in range(min(count, len(parents))):
            seen = list(range(start))
            node = token
            while node >= 0:
                seen.append(start + node)
                node = parents[node]
            mask[b, token, [row for row in seen if first <= row < ROWS]] = True
    return mask


def bits_of(parents) -> list[int]:
    """Ancestors behind the root, whose row all see; the node itself is one."""
    found = [0]
    for node, parent in enumerate(parents[1:], start=1):
        found.append(found[parent] | 1 << node - 1)
    return found


@st.composite
def windows(draw, chains: bool | None = None):
    """(Window, its dense mask, tokens): a chain or a tree, padded, some slots idle, some past the cache."""
    is_chain = draw(st.booleans()) if chains is None else chains
    width = draw(st.sampled_from(WIDTHS))
    starts = draw(st.tuples(*[st.integers(0, ROWS + 2)] * SLOTS))
    counts = draw(st.tuples(*[st.integers(0, width)] * SLOTS))
    first = draw(st.integers(0, 5))
    if is_chain:
        parents = list(range(-1, width - 1))
        window = as_chain(array(starts), array(counts), np.int32(first))
        return window, dense(starts, counts, first, parents), width
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, width))]
    bits = array([bits_of(parents)] * SLOTS)
    whole = Window(array([first] * SLOTS), array([s + 1 for s in starts]), array(counts), bits)
    return whole, dense(starts, counts, first, parents), width


@settings(deadline=None, max_examples=150)
@given(windows(), st.sampled_from([13, 40]))
def test_windows_are_their_dense_masks(drawn, size):
    """Whole, and a block of rows at a time."""
    window, mask, width = drawn
    whole, any_whole, blocks, any_blocks, end = (np.asarray(x) for x in blocks_of(window, width, size))
    np.testing.assert_array_equal(whole, mask)
    np.testing.assert_array_equal(any_whole, mask.any(axis=1))
    np.testing.assert_array_equal(blocks[..., :ROWS], mask)
    np.testing.assert_array_equal(any_blocks[:, :ROWS], mask.any(axis=1))
    last = np.where(mask.any(axis=1), np.arange(1, ROWS + 1), 0).max(axis=1)
    assert (np.minimum(end, ROWS)[last > 0] == last[last > 0]).all()
    assert (end[np.asarray(window.count) == 0] == 0).all()


@settings(deadline=None, max_examples=100)
@given(windows())
def test_the_decode_kernel_is_told_the_same(drawn):
    """Four numbers for a slot and bits for a token. Padding sees what all see, which harms nothing."""
    window, mask, width = drawn
    first, length, end, seen, ancestors = (np.asarray(x) for x in told_to_decode(window, width))
    row = np.arange(ROWS)

    def by(bits: np.ndarray) -> np.ndarray:
        ahead = row - length.reshape(-1, *(1,) * (bits.ndim - 1))
        bit = (bits.astype(np.int64) >> np.clip(ahead, 0, 31)) & 1
        return (row >= first.reshape(-1, *(1,) * (bits.ndim - 1))) & ((ahead < 0) | (bit == 1))

    counts = np.arange(width) < np.asarray(window.count)[:, None]
    np.testing.assert_array_equal(by(ancestors[..., None])[counts], mask[counts])
    np.testing.assert_array_equal(by(seen[:, None]), mask.any(axis=1))
    some = mask.any(axis=(1, 2))
    assert (end[some] == np.where(mask.any(axis=1), row + 1, 0).max(axis=1)[some]).all()
    assert (end <= ROWS).all()
    assert (length <= ROWS).all()


@settings(deadline=None, max_examples=100)
@given(windows(chains=True), st.sampled_from([0, 13, 64]))
def test_the_prefill_kernel_is_told_the_same(drawn, start):
    """Of the whole cache, and of a block of its rows."""
    window, mask, width = drawn
    rows = ROWS - start
    count, begin, diagonal, end = np.asarray(told_to_prefill(window, start))[..., None, None]
    row, query = np.arange(rows), np.arange(width)[:, None]
    seen = (row >= begin) & (row <= diagonal + query) & (row < end) & (query < count)
    np.testing.assert_array_equal(seen, mask[..., start:])


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("step", [0, 1, 2, 5, MAX_DRAFTS - 1])
def test_drafts_see_the_rows_of_their_own_layer(layers, step):
    """Past the newest token: drafts before the layer's first own, and its own, every ``layers`` positions.

    Rows 0 to the layer's number never exist.
    """
    lengths, active, layer = [1, 7, 40], [True, True, False], step % layers
    got = np.asarray(seen_by_draft(step, layers, array(lengths), np.array(active)))
    for slot, (length, runs) in enumerate(zip(lengths, active, strict=True)):
        known = range(layer + 1, length + 1)
        before, own = range(1, min(layer, step) + 1), range(layer or layers, step + 1, layers)
        drafted = [length + k for k in (*before, *own) if length + k > layer]
        assert np.flatnonzero(got[slot, 0]).tolist() == (sorted({*known, *drafted}) if runs else [])


def test_known_tokens_see_the_rows_of_a_layer_up_to_their_own():
    positions = array([[4, 5, 6], [0, 1, -1], [-1, -1, -1]])
    got = jax.jit(lambda positions: draft_module.seen(1, positions).mask(3, 8))(positions)
    for slot, row in np.ndindex(3, 3):
        want = list(range(2, int(positions[slot, row]) + 1))
        assert np.flatnonzero(got[slot, row]).tolist() == want


def test_a_window_has_as_many_tokens_as_a_request_may_draft():
    assert MAX_DRAFTS == MAX_AHEAD
    with pytest.raises(ValueError, match="a window of 33 tokens, at most 32"):
        chain(array([0]), 33).bits(MAX_AHEAD + 2, ROWS)
