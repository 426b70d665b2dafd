"""The scheduler alone, without a device: who is admitted, who runs, and that everything comes back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.engine.request import Request, Status
from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.helpers import CONFIG, IDS, request, scheduler, submit


def test_first_come_first_served():
    s = scheduler()
    requests = [request() for _ in range(6)]
    assert submit(s, *requests) == requests[:4]
    assert [r.residence.slot for r in requests] == [0, 1, 2, 3, -1, -1]
    assert [r.status for r in requests] == [Status.PREFILL] * 4 + [Status.WAITING] * 2
    s.release(requests[2])
    assert s.admit() == [requests[4]]
    assert requests[4].residence.slot == 2


def test_lower_priority_numbers_come_first():
    s = scheduler(max_num_seqs=2)
    a, b, c, d = request(priority=1), request(), request(priority=-1), request()
    assert submit(s, a, b, c, d) == [c, b]
    s.release(c)
    s.release(b)
    assert s.admit() == [d, a]


def test_a_request_gets_pages_for_its_prompt_and_a_window_then_grows():
    s = scheduler()
    r = request(prompt=12, max_tokens=40)
    submit(s, r)
    assert len(r.residence.pages) == 1 == CONFIG.pages_for(12)
    s.prefilled([r], len(r.prompt))
    r.progress.rows_bound = 13
    assert not s.grow([r], 3)  # rows 12 to 15
    r.progress.rows_bound = 14
    assert s.grow([r], 3)
    assert len(r.residence.pages) == 2
    r.progress.rows_bound = 60
    s.grow([r], 3)
    assert len(r.residence.pages) == CONFIG.pages_for(52) == 4


def test_waits_for_pages_and_lets_nobody_pass():
    s = scheduler(num_pages=6)
    first, big, small = request(20, 9), request(70, 10), request()
    assert submit(s, first, big, small) == [first]
    assert s.admit() == []
    s.release(first)
    assert s.admit() == [big]  # a page is left, but the one before may still grow
    s.release(big)
    assert s.admit() == [small]


def test_whoever_is_served_last_gives_its_pages_to_the_others():
    s = scheduler(num_pages=6)
    a, b, c = request(10, 40, priority=1), request(10, 40), request(10, 40)
    assert submit(s, a, b, c) == [b, c, a]
    for r in (a, b, c):
        s.prefilled([r], len(r.prompt))
        r.progress.rows_bound = 11
    b.progress.rows_bound = c.progress.rows_bound = 43
    assert s.grow([a, b, c], 3)  # two more pages each for b and c, three were left
    assert [r.status for r in (a, b, c)] == [Status.WAITING, Status.RUNNING, Status.RUNNING]
    assert (a.residence.slot, a.residence.pages, a.residence.preemptions, s.preemptions) == (-1, [], 1, 1)
    assert s.slots == [b, c, None, None]
    later = request()
    assert submit(s, later) == []  # it must not pass the one that waits again, whatever its own priority
    a.progress.inflight = 1
    s.release(b)
    assert s.admit() == [later]  # the newest tokens of a are still on their way
    a.progress.inflight = 0
    a.progress.output = [7, 8]
    s.release(later)
    assert s.admit() == [a]
    assert (list(a.residence.tokens), a.residence.follows) == ([*a.prompt, 7], 8)


def test_the_last_in_turn_preempts_itself():
    s = scheduler(num_pages=4)
    a, b = request(10, 40), request(10, 40)
    submit(s, a, b)
    for r in (a, b):
        s.prefilled([r], len(r.prompt))
        r.progress.rows_bound = 11
    b.progress.rows_bound = 60
    assert s.grow([a, b], 3)
    assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)


def test_a_prompt_begins_with_the_pages_of_another():
    s = scheduler()
    a = request(40)
    submit(s, a)
    assert a.residence.prefilled == 0
    s.committed(a, 31)
    b = Request(next(IDS), a.prompt, SamplingParams(), 0, 4, 3, 44)
    assert submit(s, b) == [b]
    assert (b.residence.prefilled, b.residence.pages[:1]) == (16, a.residence.pages[:1])
    assert not set(b.residence.pages[1:]) & set(a.residence.pages)
    s.committed(a, 40)
    s.release(a)
    shorter = Request(next(IDS), a.prompt[:32], SamplingParams(), 0, 4, 3, 36)
    scored = Request(next(IDS), a.prompt, SamplingParams(prompt_logprobs=0), 0, 4, 3, 44)
    salted = Request(next(IDS), a.prompt, SamplingParams(), 0, 4, 3, 44, salt="mine")
    submit(s, shorter, scored, salted)
    assert shorter.residence.prefilled == 16  # its last token is computed: it gives the first logits
    assert scored.residence.prefilled == salted.residence.prefilled == 0
    s.release(b)
    again = Request(next(IDS), a.prompt, SamplingParams(), 0, 4, 3, 44)
    submit(s, again)
    assert again.residence.prefilled == 32


def test_requests_move_down_when_a_smaller_step_does():
    s = scheduler(max_num_seqs=8)
    requests = [request() for _ in range(6)]
    submit(s, *requests)
    bucket = lambda n: next(b for b in (1, 2, 4, 8) if b >= n)  # noqa: E731
    for gone in (0, 1):
        s.release(requests[gone])
    assert s.pack(bucket) == [(5, 0), (4, 1)]
    assert s.slots == [requests[5], requests[4], requests[2], requests[3], *[None] * 4]
    assert [r.residence.slot for r in requests[2:]] == [2, 3, 1, 0]
    assert s.pack(bucket) == []
    s.release(requests[5])
    assert s.pack(bucket) == []  # three need four slots
    waiting = [request() for _ in range(6)]
    submit(s, *waiting)
    s.release(requests[4])
    s.release(requests[2])
    assert s.waiting
    assert s.pack(bucket) == []  # who waits will fill the gaps


def test_without_a_prefix_cache_nothing_is_kept():
    s = scheduler(prefix_cache=False)
    a = request(40)
    submit(s, a)
    s.committed(a, 40)
    s.release(a)
    again = Request(next(IDS), a.prompt, SamplingParams(), 0, 4, 3, 44)
    submit(s, again)
    assert (again.residence.prefilled, s.pools[0].cached) == (0, 0)


def test_pages_that_gave_nan_are_not_found_again():
    s = scheduler()
    a = request(40)
    submit(s, a)
    s.committed(a, 40)
    s.broken(a)
    s.release(a)
    again = Request(next(IDS), a.prompt, SamplingParams(), 0, 4, 3, 44)
    submit(s, again)
    assert (again.residence.prefilled, s.pools[0].cached) == (0, 0)


def test_shards_fill_evenly_from_their_low_slots():
    s = scheduler(shards=2)
    requests = [request() for _ in range(4)]
    submit(s, *requests)
    assert [r.residence.slot for r in requests] == [0, 2, 1, 3]
    assert [s.shard_of(r.residence.slot) for r in requests] == [0, 1, 0, 1]
    assert requests[0].residence.pages == requests[1].residence.pages == [0]


def test_a_shard_without_pages_is_passed_over():
    s = scheduler(shards=2, num_pages=4)
    big, small = request(50, 4), request(1, 1)
    submit(s, big, small)
    assert [s.shard_of(r.residence.slot) for r in (big, small)] == [0, 1]
    another = request(50, 4)
    assert submit(s, another) == []


def test_prefills_the_oldest_of_each_shard_first():
    s = scheduler(shards=2)
    a, b, c, d = (request() for _ in range(4))
    submit(s, a, b, c, d)
    assert s.prefilling() == [[a, c], [b, d]]
    s.prefilled([a], 5)
    assert s.prefilling() == [[c], [b, d]]
    s.prefilled([b, d], 5)
    assert s.prefilling() == [[c], []]


def test_runs_what_may_still_emit():
    s = scheduler()
    a, b = request(max_tokens=3), request(max_tokens=3)
    submit(s, a, b)
    assert s.running() == []
    s.prefilled([a, b], 5)
    a.progress.output, b.progress.unread = [1], 1
    assert s.running() == [a, b]
    a.progress.unread = 2  # each holds a token at least: the third is on its way
    assert s.running() == [b]


def test_finishing_twice_or_unknown_requests_is_a_mistake_that_shows():
    s = scheduler()
    r = request()
    submit(s, r)
    s.release(r)
    assert s.pools[0].available == s.pools[0].pages
    other = request()
    submit(s, other)
    assert other.residence.slot == r.residence.slot
    for wrong in (r, request()):
        with pytest.raises(ValueError, match="not in"):
            s.release(wrong)
    assert s.slots[other.residence.slot] is other
    assert r.residence.pages == []


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
            s.enqueue(live[-1])
        elif action == "admit":
            s.admit()
        elif live and action == "run":
            r = data.draw(st.sampled_from(live))
            if r.status is not Status.WAITING:
                s.prefilled([r], len(r.prompt))
                r.progress.rows_bound = data.draw(st.integers(len(r.prompt) + 1, r.capacity))
                s.grow([r], 3)
        elif live:
            r = live.pop(data.draw(st.integers(0, len(live) - 1)))
            s.release(r)
        placed = [r for r in live if r.status is not Status.WAITING]
        assert {r.residence.slot: r for r in placed} == {i: r for i, r in enumerate(s.slots) if r}
        for shard in range(shards):
            held = [p for r in placed if s.shard_of(r.residence.slot) == shard for p in r.residence.pages]
            assert len(held) == len(set(held)) == 8 - s.pools[shard].available
    for r in live:
        s.release(r)
    assert not s.busy
    assert all(pool.available == 8 for pool in s.pools)


def test_while_held_only_what_has_begun_goes_on():
    s = scheduler(max_num_seqs=2)
    a, b, c = request(), request(), request()
    c = replace(c, siblings=[b, c])
    assert submit(s, a, b, c) == [a, b]
    a.progress.admitted_at = b.progress.admitted_at = 1.0
    s.held = True
    fresh, probe = request(priority=-1), replace(request(), holdable=False)
    assert submit(s, fresh, probe) == []  # no slot is free
    s.release(a)
    assert s.admit() == [c]  # of the same prompt as one that has begun
    s.release(b)
    assert s.admit() == [probe]
    for r in (c, probe):
        s.release(r)
    assert not s.busy
    assert s.live() == [fresh]
    s.held = False
    assert s.busy
    assert s.admit() == [fresh]
