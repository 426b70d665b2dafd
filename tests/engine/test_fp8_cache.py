"""An FP8 cache changes the text a little, and never what speculation, batching or reuse make of it."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.api.propose import propose
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.errors import ConfigError
from mtp_jax.model.sharding import make_mesh
from tests.models import (
    GREEDY,
    TINY,
    accepted,
    make_engine,
    on_mesh,
    prepare,
    prompts,
    rigged,
    serve,
    tiny_params,
)

pytestmark = pytest.mark.rest
TWO_LAYERS = replace(TINY, num_nextn_predict_layers=2, nextn_moe=(True, False))
JOBS = [(p, GREEDY) for p in prompts(5)]


def fp8(cfg: Any = TINY, params: Any = None, **config: Any) -> Engine:
    return make_engine(params or tiny_params(cfg), cfg, kv_cache_dtype="fp8", **config)


def undrafted(jobs: Any = JOBS) -> list[Request]:
    """Each alone, without drafts, in the programs that draft."""
    engine = fp8(prefix_cache=False)
    prepare(engine, [engine.make_request(*jobs[0])])
    return [serve(engine, [job], compiled=True)[0] for job in at_depth(0, jobs)]


def at_depth(depth: int, jobs: Any = JOBS) -> Any:
    return [(prompt, replace(params, num_speculative_tokens=depth)) for prompt, params in jobs]


def test_speculation_and_batching_change_no_token():
    engine = fp8()
    together = serve(engine, JOBS)
    assert [r.progress.output for r in together] == [r.progress.output for r in undrafted()]
    alone = [serve(fp8(), [job])[0] for job in JOBS]
    assert [accepted(r) for r in together] == [accepted(r) for r in alone]
    assert sum(r.progress.speculation.accepted for r in together) > 5 * len(JOBS)
    state = local_runner(engine).state
    caches = [*state.trunk, *state.drafter.pages.cache]
    rows = engine.config.page_size * (engine.pages + 1)
    assert {sum(a.nbytes for a in jax.tree.leaves(c)) for c in caches} == {rows * TINY.row.fp8_bytes}


@pytest.mark.slow
def test_drafts_are_nearly_those_of_a_float32_cache():
    for prompt in prompts(3, shortest=20):
        want, got = (propose(engine, prompt, 3) for engine in (make_engine(), fp8()))
        distance = np.linalg.norm(got[2] - want[2]) / np.linalg.norm(want[2])
        assert 0 < distance < 0.05, distance
    exact = serve(make_engine(), JOBS)
    most = sum(r.progress.speculation.accepted for r in exact)
    assert sum(r.progress.speculation.accepted for r in serve(fp8(), JOBS)) > 0.85 * most


def test_a_prompt_goes_on_from_cached_pages():
    prompt = prompts(1, shortest=40)[0]
    (want,) = undrafted([(prompt, GREEDY)])
    engine = fp8()
    first, again = (serve(engine, [(prompt, GREEDY)])[0] for _ in range(2))
    assert (first.progress.cached_tokens, again.progress.cached_tokens) == (0, 32)
    assert first.progress.output == again.progress.output == want.progress.output
    assert accepted(first) == accepted(again)
    assert sum(accepted(again)) > 0


def test_preempted_requests_end_as_if_nothing_had_happened():
    jobs = [(p, replace(GREEDY, max_tokens=30)) for p in prompts(4, shortest=14)]
    engine = fp8(num_pages=6)
    requests, calm = serve(engine, jobs), undrafted(jobs)
    assert engine.stats().preemptions > 0
    assert [r.progress.output for r in requests] == [r.progress.output for r in calm]
    assert sum(r.progress.speculation.accepted for r in requests) > 0


@pytest.mark.slow
def test_two_nextn_layers():
    weights = rigged(TWO_LAYERS)
    jobs = JOBS[:3]
    drafted = serve(fp8(TWO_LAYERS, weights), jobs)
    plain = serve(fp8(TWO_LAYERS, weights), at_depth(0, jobs))
    assert [r.progress.output for r in drafted] == [r.progress.output for r in plain]
    assert all(r.progress.speculation.accepted > 0 for r in drafted)


@pytest.mark.slow
def test_eight_devices_compute_what_one_does():
    mesh = make_mesh(4, 2)
    params = on_mesh(tiny_params(), mesh)
    requests = serve(fp8(params=params, mesh=mesh, max_num_seqs=8), JOBS)
    assert [r.progress.output for r in requests] == [r.progress.output for r in undrafted()]
    assert sum(r.progress.speculation.accepted for r in requests) > len(JOBS)


def test_an_odd_rank_is_refused():
    cfg = replace(TINY, kv_lora_rank=15)
    with pytest.raises(ConfigError, match="kv_lora_rank = 15 is odd; use 'auto'"):
        fp8(cfg)
