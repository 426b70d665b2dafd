"""Pages between a store in memory and files: nothing waits for files, and no page is another's."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mtp_jax.store.file_tier import FilesOf, FileTier
from mtp_jax.store.memory import MemoryStore
from mtp_jax.store.page_files import PageFiles, PageKind, form_of
from mtp_jax.store.threads import FileThreads
from tests.store.helpers import page, same

FORM = form_of(page(0))
A, B, C = (bytes([i]) * 32 for i in range(3))


def tier(folder: Path, seconds: float = 600, memory: int = 1000) -> FileTier:
    made = FileTier(FilesOf(folder, 10**6, seconds), MemoryStore(memory), lambda: FORM)
    made.identity = lambda: "a model"
    return made


def kind(of: FileTier) -> PageKind:
    found = of.kind()
    assert found
    return found


def put(where: FileTier, digest: bytes, seed: int) -> None:
    """A page has come to the host's memory."""
    where._store.put(digest, page(seed))
    where.save(kind(where), digest)


def fetched(by: FileTier, *digests: bytes) -> int:
    """The number of pages that land, once all have come."""
    fetch = by.fetch(digests)
    fetch.ended.wait()
    return by.land(fetch)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Event]]:
    """Hold up a method of ``PageFiles``, as a folder that gives no answer does, until its event is set."""
    events: list[Event] = []

    def hold(name: str) -> Event:
        go, method = Event(), getattr(PageFiles, name)
        events.append(go)

        def waits(*args: Any) -> Any:
            go.wait()
            return method(*args)

        monkeypatch.setattr(PageFiles, name, waits)
        return go

    yield hold
    for event in events:
        event.set()


def test_pages_go_to_files_and_come_back_up_to_the_first_that_is_absent(tmp_path: Path):
    first, again = tier(tmp_path), tier(tmp_path)
    put(first, A, 0)
    put(first, B, 1)
    first.settle()
    assert fetched(again, A, B, C) == 2
    assert [same(p, page(i)) for i, p in enumerate(again._store.get([A, B]))] == [True, True]
    assert fetched(again, C, A) == 0
    assert fetched(again) == 0
    stats = again.stats()
    assert (stats.hits, stats.missed, stats.read_bytes, stats.dropped) == (2, 2, 240, {})
    assert (first.stats().written, first.stats().bytes) == (2, 240)


def test_the_ends_of_prefixes_are_the_first_to_go(tmp_path: Path):
    first, again = tier(tmp_path), tier(tmp_path, memory=36 * 2)
    again._readers = FileThreads(1, "files-read")  # so that it can be waited for
    for i, digest in enumerate((C, B, A)):
        put(first, digest, i)
    first.settle()
    assert fetched(again, A, B, C) == 2  # as many as the store has room for
    assert (A in again._store, B in again._store) == (True, True)
    again._readers.finish()
    time_of = {p.stem[:2]: p.stat().st_mtime_ns for p in tmp_path.glob("*/*.page")}
    assert time_of["02"] < time_of["01"] < time_of["00"]
    again._store.put(b"d", page(9))
    assert (A in again._store, B in again._store) == (True, False)


def test_other_weights_have_other_files(tmp_path: Path):
    first, again = tier(tmp_path), tier(tmp_path)
    put(first, A, 0)
    first.settle()
    for facts in ("another model", None):
        again.identity = lambda facts=facts: facts
        assert fetched(again, A) == 0
    again.identity = lambda: "a model"
    assert fetched(again, A) == 1


def test_a_page_of_weights_that_are_replaced_meanwhile_reaches_no_file_and_no_prompt(
    tmp_path: Path, held: Callable[[str], Event]
):
    one, go = tier(tmp_path), held("touch")
    put(one, A, 0)
    one.flushed()  # as ``HostTier.forget`` does
    one._store.forget()
    one._store.put(A, page(7))
    go.set()
    one.settle()
    assert one.stats().dropped == {"behind": 1}
    put(one, A, 7)
    one.settle()
    fetch = one.fetch([A])
    fetch.ended.wait()
    one.flushed()
    one._store.forget()
    assert (one.land(fetch), A in one._store) == (0, False)


def test_a_page_that_the_store_drops_first_is_counted_and_written_the_next_time(
    tmp_path: Path, held: Callable[[str], Event]
):
    one, go = tier(tmp_path), held("touch")
    put(one, A, 0)
    one._store.forget([A])
    go.set()
    one.settle()
    assert (one.stats().written, one.stats().dropped) == (0, {"behind": 1})
    put(one, A, 0)
    one.settle()
    assert one.stats().written == 1


def test_pages_with_numbers_that_are_not_finite_lose_their_files(tmp_path: Path):
    one = tier(tmp_path)
    put(one, A, 0)
    put(one, B, 1)
    one.forget([A])
    one.settle()
    assert (fetched(one, A), fetched(one, B)) == (0, 1)
    put(one, A, 0)  # computed anew
    one.settle()
    assert fetched(one, A) == 1


def test_a_prompt_waits_for_so_long_and_no_other_for_a_folder_that_gives_no_answer(
    tmp_path: Path, held: Callable[[str], Event]
):
    one = tier(tmp_path, seconds=0)
    put(one, A, 0)
    one.settle()
    go = held("read")
    late = one.fetch([A])
    assert (late.under_way, one.land(late)) == (False, 0)
    other = one.fetch([A])
    assert other.ended.is_set()
    assert one.land(other) == 0
    go.set()
    late.ended.wait()
    assert (one.land(late), one.stats().dropped) == (0, {"late": 1})
    assert fetched(one, A) == 1


def test_a_prompt_that_is_late_keeps_the_pages_that_have_come(tmp_path: Path, held: Callable[[str], Event]):
    one = tier(tmp_path, seconds=0)
    put(one, A, 0)
    put(one, B, 1)
    one.settle()
    fetch = one.fetch([A, B])
    while not fetch.found and not fetch.ended.is_set():
        time.sleep(0)
    assert one.land(fetch) >= 1
    assert A in one._store


def test_errors_of_any_kind_end_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = tier(tmp_path)
    with monkeypatch.context() as patch:
        for name in ("touch", "read"):
            patch.setattr(PageFiles, name, lambda *_: 1 / 0)
        put(one, A, 0)
        one.settle()
        assert fetched(one, A) == 0
    put(one, A, 0)
    one.settle()
    assert fetched(one, A) == 1


def test_threads_end_with_their_tier(tmp_path: Path):
    """And with them the memory of the store."""
    before = {*threading.enumerate()}
    one = tier(tmp_path)
    put(one, A, 0)
    one.settle()
    assert fetched(one, A) == 1
    threads, memory = {*threading.enumerate()} - before, weakref.ref(one._store)
    assert len(threads) == 5
    del one
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert memory() is None
