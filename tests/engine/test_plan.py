"""What is launched next, decided without a device; test_overlap.py follows whole runs."""

from mtp_jax.engine.depth import DepthController
from mtp_jax.engine.plan import Admit, Planner, Read
from mtp_jax.engine.request import Status
from mtp_jax.engine.scheduler import Scheduler
from tests.engine.device import Device
from tests.engine.test_scheduler import request, scheduler, submit


def planner(s: Scheduler) -> Planner:
    return Planner(s.config, s, Device(s.config), DepthController(3))


def test_no_step_is_planned_while_every_row_may_have_ended():
    """A step in vain costs more than waiting for what is on its way."""
    s = scheduler()
    (r,) = submit(s, request(max_tokens=4))
    r.status, r.output, r.unread, r.rows_bound = Status.RUNNING, [0], 1, 5 + 4
    assert s.running() == [r]
    assert list(planner(s).turn([])) == [Admit(), Read(0)]
