"""An engine that serves a DeepSeek-V4: its drafts change no text, and its pages are whole, in all modes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.model.sharding import make_mesh
from tests import v4
from tests.models import accepted, make_engine, on_mesh, serve, tiny_params

# A layer of each kind. Experts by token in the first.
CFG = v4.model(num_hidden_layers=3, compress_ratios=[4, 128, 0, 0], num_hash_layers=1)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PAGE = 128


def engine_of(**config: Any) -> Engine:
    sizes = {"page_size": PAGE, "max_model_len": 400, "max_num_seqs": 2, "prefill_chunk": 64}
    return make_engine(cfg=CFG, **{**sizes, "num_speculative_tokens": 3, **config})


@cache
def text() -> list[int]:
    return np.random.default_rng(3).integers(2, CFG.vocab_size, 340).tolist()


def jobs(*lengths: int, depth: int = 3, **params: Any) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of these lengths, of which no two begin alike."""
    options = replace(GREEDY, num_speculative_tokens=depth, **params)
    return [([2 + i, *text()[: n - 1]], options) for i, n in enumerate(lengths)]


def told(requests: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
    return [(r.progress.output, accepted(r)) for r in requests]


def kept(requests: Sequence[Request]) -> int:
    return sum(map(sum, map(accepted, requests)))


def test_drafts_and_cached_pages_change_no_text():
    """Two slots at a time, over borders of entries and pages; hits end before, at and behind a border."""
    engine = engine_of()
    given = jobs(254, 119)
    drafted = serve(engine, given, exactly=True)
    assert kept(drafted) > 10
    assert any(n < 3 for r in drafted for n in accepted(r))
    engine.flush_prefix_cache()
    plain = serve(engine, [(p, replace(o, num_speculative_tokens=0)) for p, o in given], compiled=True)
    assert [r.progress.output for r in drafted] == [r.progress.output for r in plain]
    for length, cached in ((127, 0), (128, 0), (129, 128), (131, 128), (256, 128), (257, 256), (300, 256)):
        engine.flush_prefix_cache()
        longer = jobs(length)
        cold = serve(engine, longer, compiled=True)
        hit = serve(engine, longer, compiled=True)
        assert [r.progress.cached_tokens for r in (*cold, *hit)] == [0, cached]
        assert told(hit) == told(cold)


@pytest.mark.slow
def test_preemption_changes_nothing():
    given = [(p, replace(o, max_tokens=140)) for p, o in jobs(120, 118)]
    engine = engine_of(num_pages=3)
    requests = serve(engine, given)
    alone = [serve(engine_of(), [each])[0] for each in given]
    assert engine.stats().preemptions > 0
    assert told(requests) == told(alone)
    assert kept(requests) > 20


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 100, 256])
def test_chunks_of_prompts_change_nothing(chunk: int):
    requests = serve(engine_of(prefill_chunk=chunk), jobs(254, 119))
    assert told(requests) == told(serve(engine_of(), jobs(254, 119)))
    assert kept(requests) > 10


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    """Slots and pages over two data shards; heads, groups of heads and experts over two more."""
    mesh = make_mesh(2, 2)
    params = on_mesh(tiny_params(CFG), mesh, CFG)
    sizes = {"page_size": PAGE, "max_model_len": 400, "max_num_seqs": 4, "prefill_chunk": 64}
    engine = make_engine(params, CFG, mesh, num_speculative_tokens=3, **sizes)
    given = jobs(254, 119, 131, 70)
    requests = serve(engine, given)
    assert told(requests) == told(serve(engine_of(max_num_seqs=4), given))
    assert kept(requests) > 20


@pytest.mark.slow
def test_pages_that_went_to_the_host_come_back():
    engine = engine_of(max_num_seqs=1, num_pages=4, host_cache_gib=0.01)
    (first,) = serve(engine, jobs(300), exactly=True)
    for begin in (50, 60):
        serve(engine, [([begin, *text()[:299]], GREEDY)], exactly=True)
    (back,) = serve(engine, jobs(300), compiled=True)
    assert engine.stats().hits_by_tier["host"] == back.progress.cached_tokens == 256
    assert told([back]) == told([first])
    assert kept([back]) > 5


@pytest.mark.slow
def test_a_request_that_moves_takes_its_slot_along():
    """The shorter of two requests ends first, in the first slot; the other one moves there."""
    engine = engine_of()
    given = [*jobs(119, max_tokens=4), *jobs(254, 254)[1:]]
    requests = serve(engine, given)
    alone = [serve(engine_of(), [each])[0] for each in given]
    assert told(requests) == told(alone)
    assert kept(requests) > 5


RANKED = {"adaptive_depth": True, "adaptive_verification": True}


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"kv_cache_dtype": "fp8"}, {"suffix_drafts": True}, RANKED], ids=str)
def test_other_modes_change_no_text(config: dict[str, Any]):
    engine = engine_of(**config)
    drafted = serve(engine, jobs(254, 119))
    engine.flush_prefix_cache()
    plain = serve(engine, jobs(254, 119, depth=0))
    assert [r.progress.output for r in drafted] == [r.progress.output for r in plain]
    assert kept(drafted) > 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"page_size": 64}, "page_size = 64; expected a multiple of 128, such as 128"),
        ({"page_size": 200}, "such as 256"),
        ({"tree": "3x3x7", "num_speculative_tokens": 7, "verifier": "coupled"}, "consecutive tokens"),
        ({"micro_batches": 2}, "micro_batches = 2"),
    ],
)
def test_options_that_do_not_go_with_entries_are_refused(config: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        engine_of(**config)
