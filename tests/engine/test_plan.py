"""What is launched next, decided without a device; test_overlap.py follows whole runs."""

import pytest

from mtp_jax.engine.depth import DepthController
from mtp_jax.engine.plan import Admit, Planner, Read
from mtp_jax.engine.request import Status
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.timings import Timings
from tests.engine.device import Device
from tests.engine.test_scheduler import request, scheduler, submit


def planner(s: Scheduler) -> Planner:
    return Planner(s.config, s, Device(s.config), DepthController(3), Timings())


@pytest.mark.parametrize(
    ("left", "prompts", "held"),
    [
        ((9, 20, 20), 1, 0),  # too far away
        ((3, 20, 20), 1, 1),  # three steps of one slot: as much as a step of the three rows
        ((2, 20, 20), 1, 2),
        ((2, 20, 20), 2, 0),  # two slots, twice the cost
        ((1, 1, 20), 2, 1),
        ((1, 1), 4, 0),  # as many as one prefill takes
        ((1,) + (20,) * 11, 1, 8),  # no longer than eight steps
        ((), 2, 0),
    ],
)
def test_prompts_wait_for_ends_that_are_near(left, prompts, held):
    """No longer than the slots may idle, counting what has been waited; the rows here make no progress."""
    s = scheduler(max_num_seqs=16)
    plan = planner(s)
    rows, new = [request(max_tokens=30) for _ in left], [request() for _ in range(prompts)]
    submit(s, *rows, *new)
    for r, n in zip(rows, left, strict=True):
        r.status, r.output, r.unread = Status.RUNNING, [0] * (29 - n), 1
    waits = [plan.holds_prefill() for _ in range(held + 1)]
    assert waits == [True] * held + [False]
    if held:
        new[0].begun = True
        assert not plan.holds_prefill(), "what has begun goes on"


def test_slots_are_filled_before_a_few_of_them_step():
    s = scheduler()
    plan = planner(s)
    requests = [request() for _ in range(3)]
    submit(s, *requests)
    assert plan.prefill_chunks() == 4
    requests[0].status = Status.RUNNING
    assert plan.prefill_chunks() == 4
    requests[1].status = Status.RUNNING
    assert plan.prefill_chunks() == 1


def test_no_step_is_planned_while_every_row_may_have_ended():
    """A step in vain costs more than waiting for what is on its way."""
    s = scheduler()
    (r,) = submit(s, request(max_tokens=4))
    r.status, r.output, r.unread, r.rows_bound = Status.RUNNING, [0], 1, 5 + 4
    assert s.running() == [r]
    assert list(planner(s).turn([])) == [Admit(), Read(0)]
