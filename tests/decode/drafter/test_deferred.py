"""Deferred NextN entries are, once written, what each step would have written."""

from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.drafter.recursive import DEFERRED
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.engine.engine import Engine
from tests.models import GREEDY, TINY, make_engine, prepare, prompts
from tests.rounding import near, of_model

TWO_LAYERS = replace(TINY, num_nextn_predict_layers=2, nextn_moe=(True, False))
PLAIN = replace(GREEDY, max_tokens=44, num_speculative_tokens=0)


def kept(engine: Engine) -> list[np.ndarray]:
    """What drafts will read of each slot in use: its NextN entries, boundary and pending hidden states."""
    runner = local_runner(engine)
    runner.flushed()
    state = runner.state
    own = state.drafter
    caches, boundary = (
        [np.asarray(p) for p in jax.tree.leaves(own.pages.cache)],
        np.asarray(own.pages.boundary),
    )
    size, found = caches[0].shape[1], []
    for slot, length in enumerate(np.asarray(state.slots.length).tolist()):
        if engine.scheduler.slots[slot] is None:
            continue
        table, rows = np.asarray(state.slots.page_table[slot]), np.arange(length)
        # Layer k's rows 0 to k do not exist.
        found += [c[table[rows // size], rows % size][k + 1 :] for k, c in enumerate(caches)]
        found += [boundary[table[: length // size]], np.asarray(own.slots.pending[slot])]
    return found


@pytest.mark.parametrize("cfg", [TINY, pytest.param(TWO_LAYERS, marks=pytest.mark.slow)], ids=["one", "two"])
def test_one_pass_writes_what_each_step_would(cfg):
    """Some rows end on the way, and pages fill up."""
    late, eager = (make_engine(cfg=cfg) for _ in range(2))
    most = 0
    for engine in (late, eager):
        requests = [
            engine.make_request(p, replace(PLAIN, max_tokens=44 - 9 * i)) for i, p in enumerate(prompts(4))
        ]
        prepare(engine, requests)
        for r in requests:
            engine.submit(r)
    while not requests[2].finished:
        late.step()
        eager.step()
        local_runner(eager).flushed()
        most = max(most, int(np.asarray(local_runner(late).state.drafter.slots.count).max()))
    assert most > 8
    assert int(np.asarray(local_runner(late).state.drafter.slots.count).max()) > 1
    for a, b in zip(kept(late), kept(eager), strict=True):
        near(a, b, of_model(cfg, tokens=64))
    assert sum(a.size for a in kept(late)) > 1000


def test_more_steps_than_there_is_room_for():
    engine = make_engine()
    request = engine.make_request(prompts(1)[0], replace(PLAIN, max_tokens=3 * DEFERRED))
    prepare(engine, [request])
    engine.submit(request)
    counts = []
    while not request.finished:
        engine.step()
        counts.append(int(np.asarray(local_runner(engine).state.drafter.slots.count)[0]))
    assert max(counts) == DEFERRED
    falls = sum(b < a for a, b in pairwise(counts))
    assert 2 <= falls <= 3


@pytest.mark.rest
def test_a_step_without_drafts_runs_nothing_of_nextn():
    lower = local_runner(make_engine()).programs.lowering.program
    keys = [StepKey(1, depth, 1, SamplingMode()) for depth in (0, 1)]
    plain, drafting = (lower(k).as_text(debug_info=True) for k in keys)
    assert "/nextn_0/" in drafting
    assert "/nextn_0/" not in plain
