"""What is launched next, decided without a device; test_overlap.py follows whole runs."""

from dataclasses import replace

from mtp_jax.engine.buckets import Buckets
from mtp_jax.engine.depth import DepthController
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.turns import AdmitWaiting, ReadOldest, Turns
from tests.engine.device import Device, on_device
from tests.engine.helpers import request, scheduler, submit
from tests.models import GREEDY, prepare, prompts


def turns(s: Scheduler) -> Turns:
    return Turns(Buckets(s.config, s.shards), s, Device(s.config), DepthController(3))


def test_no_step_is_planned_while_every_row_may_have_ended():
    """A step in vain costs more than waiting for what is on its way."""
    s = scheduler()
    (r,) = submit(s, request(max_tokens=4))
    s.prefilled([r], 5)
    r.progress.output, r.progress.unread, r.progress.rows_bound = [0], 1, 5 + 4
    assert s.running() == [r]
    assert list(turns(s).next([])) == [AdmitWaiting(), ReadOldest(0)]


def test_one_depth_is_chosen_over_the_rows_of_all_shards(monkeypatch):
    """Those of one shard allow one draft, those of the other three: what the step gains counts over both."""
    engine, _ = on_device(shards=2, max_num_seqs=4, adaptive_depth=True, num_speculative_tokens=3)
    jobs = [
        (p, replace(GREEDY, num_speculative_tokens=n)) for p, n in zip(prompts(4), (1, 3) * 2, strict=True)
    ]
    requests = [replace(engine.make_request(*job), fixed_depth=False) for job in jobs]
    prepare(engine, requests)
    asked, keys = [], []
    choose = engine.depth.choose

    def seen(given, depths, price=None):
        asked.append(sorted(depths))
        keys.append(choose(given, depths, price))
        return keys[-1]

    monkeypatch.setattr(engine.depth, "choose", seen)
    for r in requests:
        engine.submit(r)
    while engine.busy:
        engine.step()
    by_shard = [
        {r.depth for r in requests if engine.scheduler.shard_of(r.residence.slot) == i} for i in range(2)
    ]
    assert by_shard == [{1}, {3}]
    assert [1, 1, 3, 3] in asked
    assert {k.slots for k in keys} == {4}
