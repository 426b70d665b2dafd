"""The store of pages in memory: a budget, an order in which pages go, and checksums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.store.memory import MemoryStore
from mtp_jax.store.page import checksum, join, size, split
from tests.store.helpers import page, same


def filled(budget: int, *names: bytes) -> MemoryStore:
    store = MemoryStore(budget)
    for i, name in enumerate(names):
        store.put(name, page(i))
    return store


def test_what_is_put_is_got_up_to_the_first_that_is_absent():
    store = filled(1000, b"a", b"b", b"c")
    assert [same(p, page(i)) for i, p in enumerate(store.get([b"a", b"b", b"x", b"c"]))] == [True, True]
    assert store.get([b"x", b"a"]) == []
    assert (b"b" in store, b"x" in store, len(store), store.held) == (True, False, 3, 108)


def test_the_budget_holds_and_the_ends_of_prefixes_go_first():
    store = filled(3 * 36, b"end", b"middle", b"start")
    store.put(b"other", page(7))
    assert (b"end" in store, b"middle" in store, len(store)) == (False, True, 3)
    assert len(store.get([b"start", b"middle"])) == 2
    store.put(b"more", page(8))
    assert b"other" not in store
    store.put(b"yet more", page(9))
    assert (b"middle" in store, b"start" in store) == (False, True)
    assert (store.held, store.stored, store.dropped) == (108, 6, {"room": 3})


def test_a_page_that_is_used_or_put_again_stays():
    store = filled(2 * 36, b"a", b"b")
    store.used([b"a", b"unknown"])
    store.put(b"c", page(2))
    assert b"b" not in store
    store.put(b"a", page(0))
    store.put(b"d", page(3))
    assert (b"a" in store, b"c" in store) == (True, False)


def test_a_page_larger_than_the_budget_drives_nothing_out():
    store = MemoryStore(40)
    store.put(b"a", page(0))
    store.put(b"b", (*page(1), np.zeros(10)))
    assert (b"a" in store, b"b" in store, store.dropped) == (True, False, {"room": 1})


@pytest.mark.parametrize("array", range(len(DTYPES)))
def test_a_damaged_page_is_dropped_and_counted(array):
    store = filled(1000, b"a", b"b", b"c")
    (hurt,) = store.get([b"b"])
    hurt[array].reshape(-1).view(np.uint8)[1] ^= 64
    assert len(store.get([b"a", b"b", b"c"])) == 1
    assert (b"b" in store, store.held, store.dropped) == (False, 72, {"damaged": 1})
    assert len(store.get([b"c"])) == 1


def test_forgetting():
    store = filled(1000, b"a", b"b", b"c")
    store.forget([b"b", b"unknown"])
    assert (len(store), store.held) == (2, 72)
    store.forget()
    assert (len(store), store.held, store.dropped) == (0, 0, {})


def test_pages_are_split_and_joined_and_each_has_its_own_memory():
    pages = [page(i) for i in range(5)]
    data = join(pages)
    assert [a.shape for a in data] == [(5, 2, 2)] * 4
    again = split(data)
    assert all(same(a, b) for a, b in zip(again, pages, strict=True))
    assert all(array.base is None for p in again for array in p)
    assert size(again[0]) == 36


def test_the_checksum_sees_the_order_of_arrays():
    a, b = np.zeros(4, np.uint8), np.ones(4, np.uint8)
    assert checksum((a, b)) != checksum((b, a))
    assert checksum((np.ones((3, 2))[:, 0],)) == checksum((np.ones(3),))


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "used", "forget"]), st.integers(0, 9)), max_size=60))
def test_bytes_are_those_of_the_pages(actions):
    """Any use: never above the budget, and a page that is found is the one that was put."""
    store = MemoryStore(4 * 36)
    for action, i in actions:
        name = bytes([i])
        if action == "put":
            store.put(name, page(i))
            assert name in store
        elif action == "get":
            found = store.get([name])
            assert len(found) == (name in store)
            assert all(same(p, page(i)) for p in found)
        elif action == "used":
            store.used([name])
        else:
            store.forget([name])
        assert store.held == 36 * len(store) <= store.budget
