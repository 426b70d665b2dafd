"""The page allocator: pages are handed out once, per shard, and come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.engine.pages import PageAllocator
from mtp_jax.errors import ConfigError


def test_hands_out_the_lowest_pages_first():
    pages = PageAllocator(4)
    assert pages.allocate(3) == [0, 1, 2]
    assert pages.free() == 1


def test_takes_nothing_when_there_are_too_few():
    pages = PageAllocator(4)
    held = pages.allocate(3)
    assert pages.allocate(2) is None
    assert pages.free() == 1
    assert held is not None
    pages.release(held)
    assert pages.free() == 4


def test_none_of_nothing():
    assert PageAllocator(1).allocate(0) == []


def test_shards_are_apart():
    pages = PageAllocator(2, shards=3)
    assert pages.allocate(2, 1) == [0, 1]
    assert [pages.free(s) for s in range(3)] == [2, 0, 2]
    assert pages.allocate(1, 1) is None
    pages.release([1], 1)
    assert [pages.free(s) for s in range(3)] == [2, 1, 2]


@pytest.mark.parametrize("released", [[2], [0, 0], [0, 3]])
def test_double_release_is_an_error_and_changes_nothing(released):
    pages = PageAllocator(4)
    pages.allocate(2)
    with pytest.raises(ValueError, match="released twice"):
        pages.release(released)
    assert pages.free() == 2


@pytest.mark.parametrize("count", [0, -1])
def test_needs_a_page(count):
    with pytest.raises(ConfigError, match=rf"num_pages = {count}; expected at least 1"):
        PageAllocator(count)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 5)), max_size=60))
def test_no_page_is_ever_held_twice(steps):
    pages = PageAllocator(9, shards=2)
    held: list[tuple[int, list[int]]] = []
    for take, shard, count in steps:
        if take:
            got = pages.allocate(count, shard)
            assert (got is None) == (count > 9 - sum(len(p) for s, p in held if s == shard))
            held += [] if got is None else [(shard, got)]
        elif held:
            owner, given_back = held.pop(count % len(held))
            pages.release(given_back, owner)
        for s in range(2):
            mine = [p for owner, group in held if owner == s for p in group]
            assert len(set(mine)) == len(mine)
            assert pages.free(s) == 9 - len(mine)
            assert all(0 <= p < 9 for p in mine)
