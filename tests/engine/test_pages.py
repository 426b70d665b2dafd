"""The page pool: pages are handed out once, shared only as cached prefixes, and come back."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.engine.pages import PagePool, extend_digests
from mtp_jax.errors import ConfigError


def held(pool: PagePool, count: int) -> list[int]:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def test_hands_out_the_lowest_pages_first():
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.available == 1


def test_takes_nothing_when_there_are_too_few():
    pool = PagePool(4)
    pages = held(pool, 3)
    assert pool.allocate(2) is None
    assert pool.available == 1
    pool.release(pages)
    assert pool.available == 4


def test_none_of_nothing():
    assert PagePool(1).allocate(0) == []


@pytest.mark.parametrize("released", [[2], [0, 0], [0, 3]])
def test_double_release_is_an_error_and_changes_nothing(released):
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(released)
    assert pool.available == 2


@pytest.mark.parametrize("count", [0, -1])
def test_needs_a_page(count):
    with pytest.raises(ConfigError, match=rf"num_pages = {count}; expected an integer from 1 to"):
        PagePool(count)


def test_a_registered_page_is_found_while_in_use_and_after():
    pool = PagePool(4)
    pages = held(pool, 3)
    for page, digest in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.register(page, digest)
    assert pool.match([b"a", b"b", b"x", b"c"]) == pages[:2]
    pool.release(pages)
    assert (pool.available, pool.cached) == (4, 3)
    assert pool.match([b"a", b"b", b"c"]) == pages
    pool.share(pages[:1])
    assert (pool.available, pool.cached) == (3, 2)
    pool.release(pages[:1])
    assert pool.cached == 3


def test_what_was_not_used_longest_goes_first_and_a_prefix_outlives_its_end():
    pool = PagePool(4)
    old, young = held(pool, 2), held(pool, 2)
    for pages, names in ((old, (b"o0", b"o1")), (young, (b"y0", b"y1"))):
        for page, name in zip(pages, names, strict=True):
            pool.register(page, name)
    pool.release(young)
    pool.release(old)
    for gone in (b"y1", b"y0", b"o1"):
        assert pool.match([gone])
        held(pool, 1)
        assert not pool.match([gone])
    assert pool.match([b"o0"])


def test_a_page_in_use_is_never_evicted():
    pool = PagePool(2)
    (page,) = held(pool, 1)
    pool.register(page, b"a")
    pool.release([page])
    pool.share([page])
    pool.share([page])
    held(pool, 1)
    assert pool.allocate(1) is None
    pool.release([page])
    assert pool.allocate(1) is None
    pool.release([page])
    assert pool.allocate(1) == [page]


def test_a_copy_of_a_known_page_stays_unknown_and_is_free_afterwards():
    pool = PagePool(3)
    pages = held(pool, 2)
    for page in pages:
        pool.register(page, b"same")
    assert pool.match([b"same"]) == pages[:1]
    pool.release(pages)
    assert pool.cached == 1


def test_forgetting():
    pool = PagePool(3)
    used, idle = held(pool, 1), held(pool, 1)
    pool.register(used[0], b"used")
    pool.register(idle[0], b"idle")
    pool.release(idle)
    pool.forget(used)
    assert not pool.match([b"used"])
    assert pool.match([b"idle"])
    pool.forget()
    assert not pool.match([b"idle"])
    assert (pool.available, pool.cached) == (2, 0)
    pool.release(used)
    assert sorted(held(pool, 3)) == [0, 1, 2]


def test_digests_are_sha256_over_salt_parent_and_tokens():
    digests: list[bytes] = []
    extend_digests(digests, "s", [1, 2, 3], 2)
    root = sha256(b"s").digest()
    assert digests == [sha256(root + np.array([1, 2], "<i4").tobytes()).digest()]
    extend_digests(digests, "s", [1, 2, 3, 4, 5], 2)
    assert digests[1] == sha256(digests[0] + np.array([3, 4], "<i4").tobytes()).digest()
    others: list[list[bytes]] = [[], [], []]
    extend_digests(others[0], "", [1, 2, 3, 4], 2)
    extend_digests(others[1], "s", [1, 3, 3, 4], 2)
    extend_digests(others[2], "s", [1, 2, 4, 3], 2)
    assert not set(digests) & (set(others[0]) | set(others[1]))
    assert others[2][0] == digests[0]
    assert others[2][1] != digests[1]


@given(st.data())
def test_no_page_is_lost_or_held_twice(data):
    """Random use: a page has as many holders as were given it; only a matched prefix has several."""
    pool = PagePool(9)
    holders: list[list[int]] = []
    known: dict[bytes, int] = {}
    for step in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["take", "register", "hit", "release", "forget"]))
        if action == "take":
            count = data.draw(st.integers(0, 5))
            free = 9 - len({p for pages in holders for p in pages})
            assert pool.available == free
            pages = pool.allocate(count)
            assert (pages is None) == (count > free)
            if pages is not None:
                assert not set(pages) & {p for mine in holders for p in mine}
                known = {d: p for d, p in known.items() if p not in pages}
                holders.append(pages)
        elif action == "register" and holders:
            pages = data.draw(st.sampled_from(holders))
            if pages and pages[0] not in known.values():
                known[b"%d" % step] = pages[0]
                pool.register(pages[0], b"%d" % step)
        elif action == "hit" and known:
            digest = data.draw(st.sampled_from(sorted(known)))
            assert pool.match([digest]) == [known[digest]]
            pool.share([known[digest]])
            holders.append([known[digest]])
        elif action == "release" and holders:
            pool.release(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        elif action == "forget":
            pool.forget()
            known = {}
    for pages in holders:
        pool.release(pages)
    assert pool.available == 9
