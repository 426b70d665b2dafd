"""The scheduler alone, without a device: who is admitted, who runs, and that everything comes back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.request import Request, SamplingParams, Status
from mtp_jax.engine.scheduler import Scheduler

CONFIG = EngineConfig(num_speculative_tokens=3, max_num_seqs=4, max_model_len=64, page_size=16)
IDS = itertools.count()


def request(prompt: int = 5, max_tokens: int = 4) -> Request:
    return Request(next(IDS), tuple(range(prompt)), SamplingParams(), 0, max_tokens, 3, prompt + max_tokens)


def scheduler(shards: int = 1, **config) -> Scheduler:
    return Scheduler(EngineConfig(**{**vars(CONFIG), **config}), shards)


def submit(s: Scheduler, *requests: Request) -> list[Request]:
    s.waiting.extend(requests)
    return s.admit()


def test_first_come_first_served():
    s = scheduler()
    requests = [request() for _ in range(6)]
    assert submit(s, *requests) == requests[:4]
    assert [r.slot for r in requests] == [0, 1, 2, 3, -1, -1]
    assert [r.status for r in requests] == [Status.PREFILL] * 4 + [Status.WAITING] * 2
    s.finish(requests[2], "stop")
    assert s.admit() == [requests[4]]
    assert requests[4].slot == 2


def test_a_request_gets_every_page_it_can_need_at_once():
    s = scheduler()
    r = request(prompt=20, max_tokens=9)  # 29 tokens and a window of 4: 33 rows
    submit(s, r)
    assert len(r.pages) == 3 == CONFIG.pages_for(29)


def test_waits_for_pages_and_lets_nobody_pass():
    s = scheduler(num_pages=6)
    big, small = request(40, 10), request()
    first = request(20, 9)
    assert submit(s, first, big, small) == [first]
    assert s.admit() == []
    s.finish(first, "length")
    assert s.admit() == [big, small]


def test_shards_fill_evenly_from_their_low_slots():
    s = scheduler(shards=2)
    requests = [request() for _ in range(4)]
    submit(s, *requests)
    assert [r.slot for r in requests] == [0, 2, 1, 3]
    assert [s.shard_of(r.slot) for r in requests] == [0, 1, 0, 1]
    assert requests[0].pages == requests[1].pages == [0]


def test_a_shard_without_pages_is_passed_over():
    s = scheduler(shards=2, num_pages=4)
    big, small = request(30, 20), request(1, 1)
    submit(s, big, small)
    assert [s.shard_of(r.slot) for r in (big, small)] == [0, 1]
    another = request(30, 20)
    assert submit(s, another) == []


def test_prefills_the_oldest_of_each_shard():
    s = scheduler(shards=2)
    a, b, c, d = (request() for _ in range(4))
    submit(s, a, b, c, d)
    assert s.prefilling() == [a, b]
    a.status = Status.RUNNING
    assert s.prefilling() == [c, b]
    b.status = d.status = Status.RUNNING
    assert s.prefilling() == [c, None]


def test_runs_what_may_still_emit():
    s = scheduler()
    a, b = request(max_tokens=3), request(max_tokens=3)
    submit(s, a, b)
    assert s.running() == []
    a.status = b.status = Status.RUNNING
    a.output, b.unread = [1], 1
    assert s.running() == [a, b]
    a.unread = 2  # each holds a token at least: the third is on its way
    assert s.running() == [b]


def test_finishing_twice_or_unknown_requests_is_a_mistake_that_shows():
    s = scheduler()
    r = request()
    submit(s, r)
    s.finish(r, "stop")
    with pytest.raises(ValueError, match="not in"):
        scheduler().finish(request(), "abort")
    assert s.allocator.free() == s.allocator.pages
    assert (r.finish_reason, r.finished, r.pages) == ("stop", True, [])


@given(st.data())
def test_pages_and_slots_always_come_back(data):
    """Any order of arrivals, progress and ends: nothing is held twice, nothing is lost."""
    shards = data.draw(st.sampled_from([1, 2]))
    s = scheduler(shards=shards, num_pages=8)
    live: list[Request] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["submit", "admit", "run", "finish"]))
        if action == "submit":
            live.append(request(data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))))
            s.waiting.append(live[-1])
        elif action == "admit":
            s.admit()
        elif live and action == "run":
            r = data.draw(st.sampled_from(live))
            r.status = Status.RUNNING if r.status is Status.PREFILL else r.status
        elif live:
            r = live.pop(data.draw(st.integers(0, len(live) - 1)))
            s.finish(r, "abort")
        placed = [r for r in live if r.status is not Status.WAITING]
        assert {r.slot: r for r in placed} == {i: r for i, r in enumerate(s.slots) if r}
        for shard in range(shards):
            held = [p for r in placed if s.shard_of(r.slot) == shard for p in r.pages]
            assert len(held) == len(set(held)) == 8 - s.allocator.free(shard)
    for r in live:
        s.finish(r, "abort")
    assert not s.busy
    assert all(s.allocator.free(shard) == 8 for shard in range(shards))
