"""Compiled programs run once before requests do, over empty slots: that changes nothing."""

import jax
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.engine.depth_policy import DepthPolicy
from mtp_jax.engine.engine import Engine
from tests.engine.device import on_device
from tests.engine.plain import widest
from tests.models import GREEDY, accepted, prompts, serve


def arrays(engine: Engine) -> list[np.ndarray]:
    """All that the device keeps, but for the pages that nobody's rows go to."""
    state = local_runner(engine).state
    pages = [np.asarray(a)[: engine.pages] for a in jax.tree.leaves((state.trunk, state.drafter.pages))]
    return [*pages, *map(np.asarray, jax.tree.leaves(state.slots))]


def test_nothing_is_left_of_it():
    engine, jobs = widest(), [(p, GREEDY) for p in prompts(2)]
    first, again = (serve(engine, jobs, compiled=True) for _ in range(2))
    engine.flush_prefix_cache()
    before = arrays(engine)
    keys = [k for k in engine.runner.keys if isinstance(k, StepKey)]
    engine._warm.clear()
    engine.warm_up(keys)
    assert engine._warm == set(keys)
    for a, b in zip(before, arrays(engine), strict=True):
        np.testing.assert_array_equal(a, b)
    third = serve(engine, jobs, compiled=True)
    assert (
        [r.progress.output for r in third]
        == [r.progress.output for r in again]
        == [r.progress.output for r in first]
    )
    assert [accepted(r) for r in third] == [accepted(r) for r in first]
    assert sum(sum(accepted(r)) for r in first) > 0


# Its first run is not measured; then it runs for the length of two probes at each depth, 1 and 3.
@pytest.mark.parametrize(("adaptive", "runs"), [(False, 1), (True, 1 + 2 * 2 * DepthPolicy().block)])
def test_every_program_as_often_as_needed_and_never_beside_requests(adaptive, runs):
    engine, device = on_device(adaptive_depth=adaptive)
    key = StepKey(1, 3, 1, SamplingMode())
    engine.runner.compile([key])
    engine.warm_up([key])
    engine.warm_up([key])
    assert device.launched == runs
    request = engine.make_request(prompts(1)[0], GREEDY)
    engine.submit(request)
    other = StepKey(2, 3, 1, SamplingMode())
    engine.runner.compile([other])
    engine.warm_up([other])
    assert device.launched == runs
