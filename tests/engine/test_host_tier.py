"""Pages that went to the host's memory, or to files, and came back: text and acceptance as if computed anew.

The device has two pages more than a request needs, so that two further prompts drive one out.
"""

import itertools
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.model.config import IndexerConfig, ModelConfig
from mtp_jax.model.sharding import make_mesh
from mtp_jax.store.memory import MemoryStore
from tests.engine.files import in_files, known, written
from tests.engine.plain import widest
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    Told,
    accepted,
    finish,
    gqa,
    make_engine,
    on_mesh,
    prompts,
    rigged,
    serve,
    tiny_params,
)

SPARSE = replace(TINY, indexer=IndexerConfig(heads=4, dim=8, topk=8, shared=(False, False)))
TWO_LAYERS = replace(TINY, num_nextn_predict_layers=2, nextn_moe=(True, False))
SHORT = replace(GREEDY, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
LONG = [prompts(1, shortest=44, seed=seed)[0] for seed in range(4)]
BFLOAT16 = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_params())
GIB = 2**30
rest = pytest.mark.rest


def small(cfg: ModelConfig = TINY, pages: int = 1000, files: Path | None = None, **config) -> Engine:
    """Six pages on the device, of which a prompt and its answer take four; ``pages`` in the host's memory.

    files: the folder of further pages.
    """
    params = config.pop("params", None) or tiny_params(cfg)
    bytes_per_page = local_runner(make_engine(params, cfg, **config)).page_bytes
    budget = pages * bytes_per_page / GIB
    make = make_engine if config or cfg is not TINY else widest
    third = in_files(files) if files else {}
    engine = make(params, cfg, **{"num_pages": 6, "host_cache_gib": budget, **third, **config})
    return known(engine) if files else engine


def store(engine: Engine) -> MemoryStore:
    assert engine.tier
    assert isinstance(engine.tier.store, MemoryStore)
    return engine.tier.store


def each(engine: Engine, order: Sequence[int], params: SamplingParams = SHORT, **how: bool) -> list[Request]:
    """These prompts, one after the other. how: to compile, unless for small engines of the tiny model."""
    return [serve(engine, [(LONG[i], params)], **{"compiled": True, **how})[0] for i in order]


@cache
def told(i: int, cfg: ModelConfig = TINY) -> Told:
    return Reference(tiny_params(cfg), cfg).speculate(LONG[i], 12, 3)


def as_told(requests: Sequence[Request], order: Sequence[int], cfg: ModelConfig = TINY) -> None:
    for request, i in zip(requests, order, strict=True):
        want = told(i, cfg)
        assert (request.progress.output, accepted(request)) == (want.ids, want.accepted)
    assert sum(r.progress.speculation.accepted for r in requests) > len(requests)


def test_a_prompt_that_was_driven_out_comes_back():
    engine, order = small(), [0, 1, 2, 0, 1, 2]
    requests = each(engine, order)
    as_told(requests, order)
    assert [r.progress.cached_tokens for r in requests] == [0, 0, 0, 32, 32, 32]
    stats = engine.stats()
    assert stats.hits_by_tier["host"] > 0
    assert sum(stats.hits_by_tier.values()) == stats.prefix_hits == 96
    assert stats.tier.restored * 16 == stats.hits_by_tier["host"]
    assert stats.tier.pages == stats.tier.stored > 6
    assert stats.tier.bytes == stats.tier.pages * local_runner(engine).page_bytes
    assert stats.pages_used == 0


def test_files_are_kept_over_a_restart_and_shared(tmp_path):
    first, second = small(files=tmp_path), small(files=tmp_path)
    each(first, [0, 1])
    assert written(first) == 6  # two of each prompt, and one that its output filled
    requests = each(second, [0, 1, 0])
    as_told(requests, [0, 1, 0])
    assert [r.progress.cached_tokens for r in requests] == [32, 32, 32]
    stats = second.stats()
    assert stats.hits_by_tier == {"device": 32, "host": 0, "file": 64}
    assert (stats.tier.files.hits, stats.tier.files.missed, stats.tier.files.dropped) == (4, 0, {})
    assert stats.pages_used == 0
    each(second, [2])
    assert written(second) == 3
    assert each(first, [2])[0].progress.cached_tokens == 32
    shutil.rmtree(tmp_path)
    requests = each(small(files=tmp_path), [0, 1])
    as_told(requests, [0, 1])
    assert [r.progress.cached_tokens for r in requests] == [0, 0]


def test_without_it_nothing_comes_back():
    requests = each(widest(num_pages=6), [0, 1, 2, 0])
    assert [r.progress.cached_tokens for r in requests] == [0, 0, 0, 0]
    assert make_engine().stats().tier.pages == 0


def test_part_on_the_device_and_part_in_the_host():
    """The end of a prefix goes first."""
    engine = small()
    each(engine, [0, 1])
    serve(engine, [(LONG[2][:20], replace(SHORT, max_tokens=8))], compiled=True)
    requests = each(engine, [0])
    as_told(requests, [0])
    assert requests[-1].progress.cached_tokens == 32
    assert engine.stats().hits_by_tier == {"device": 16, "host": 16}


@rest
@pytest.mark.parametrize("cfg", [pytest.param(SPARSE, marks=pytest.mark.slow), gqa()], ids=["sparse", "gqa"])
def test_pages_hold_index_keys_and_keys_and_values(cfg, tmp_path):
    engine, order = small(cfg, files=tmp_path), [0, 1, 2, 0]
    requests = each(engine, order, compiled=False)
    as_told(requests, order, cfg)
    assert engine.stats().hits_by_tier["host"] > 0
    written(engine)
    again = small(cfg, files=tmp_path)
    as_told(each(again, [0, 1], compiled=False), [0, 1], cfg)
    assert again.stats().hits_by_tier["file"] == 64


@rest
@pytest.mark.parametrize(
    ("cfg", "config", "params"),
    [
        pytest.param(SPARSE, {"kv_cache_dtype": "fp8"}, SHORT, id="sparse-fp8"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.slow)
            for name, case in {
                "fp8": (TINY, {"kv_cache_dtype": "fp8"}, SHORT),
                "sampled": (TINY, {}, SAMPLED),
                "without-drafts": (TINY, {"num_speculative_tokens": 0}, SHORT),
                "suffix": (TINY, {"suffix_drafts": True}, SHORT),
                "bfloat16": (TINY, {"dtype": "bfloat16", "params": BFLOAT16}, SHORT),
                "two-layers": (TWO_LAYERS, {"params": rigged(TWO_LAYERS)}, SHORT),
            }.items()
        ),
    ],
)
def test_as_if_computed_anew(cfg, config, params, tmp_path):
    """Against the engine itself without any cache of prefixes. The last answer is of a server that is new."""
    order = [0, 1, 2, 0, 1]
    engine, again = (small(cfg, files=tmp_path, **config) for _ in range(2))
    got = each(engine, order[:-1], params, exactly=True)
    written(engine)
    got += each(again, order[-1:], params, exactly=True)
    assert again.stats().hits_by_tier["file"] == 32
    anew = {**config, "prefix_cache": False, "verifier": engine.config.verifier}
    bare = make_engine(anew.pop("params", None) or tiny_params(cfg), cfg, **anew)
    want = each(bare, order, params, exactly=True)
    assert [(r.progress.output, accepted(r)) for r in got] == [(r.progress.output, accepted(r)) for r in want]
    assert [r.progress.cached_tokens for r in got] == [0, 0, 0, 32, 32]
    assert engine.stats().hits_by_tier["host"] > 0
    assert config.get("num_speculative_tokens") == 0 or sum(
        r.progress.speculation.accepted for r in got
    ) > len(got)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(2, 1), (2, 4)])
def test_pages_come_back_to_any_data_shard(data, model):
    mesh = make_mesh(data, model)
    engine = small(params=on_mesh(tiny_params(), mesh), mesh=mesh)
    order = [0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0]
    both = [(LONG[i], SHORT) for i in order]
    requests = [r for i in range(0, len(both), 2) for r in serve(engine, both[i : i + 2])]
    as_told(requests, order)
    stats = engine.stats()
    assert stats.hits_by_tier["host"] > 0
    assert {engine.scheduler.shard_of(r.residence.slot) for r in requests} == {0, 1}
    assert stats.prefix_hits == 8 * 32


def test_preempted_requests_find_their_pages_again():
    """The first to come is preempted by the second, and what it leaves is driven out by the third."""
    engine, requests = small(), []
    for prompt, tokens, priority in zip(prompts(3, shortest=20)[::-1], (26, 26, 12), (1, 0, 0), strict=True):
        params = replace(GREEDY, max_tokens=tokens)
        requests.append(engine.make_request(prompt[-tokens:], params, priority=priority))
    for request in requests:
        engine.submit(request)
        engine.step()
    finish(engine)
    alone = [serve(widest(), [(r.prompt, r.params)], compiled=True)[0] for r in requests]
    stats = engine.stats()
    assert [r.progress.output for r in requests] == [r.progress.output for r in alone]
    assert [accepted(r) for r in requests] == [accepted(r) for r in alone]
    assert sum(r.progress.speculation.accepted for r in requests) > len(requests)
    assert requests[0].residence.preemptions > 0
    assert stats.tier.restored > 0
    assert stats.prefix_hits == 0  # of their prompts, when they came


def test_salts_do_not_share():
    engine, seen = small(), []
    for salt, i in (("", 0), ("mine", 0), ("", 1), ("", 0), ("mine", 0)):
        request = engine.make_request(LONG[i], SHORT, cache_salt=salt)
        engine.submit(request)
        finish(engine)
        seen.append(request.progress.cached_tokens)
        as_told([request], [i])
    assert seen == [0, 0, 0, 32, 32]
    assert engine.stats().hits_by_tier["host"] > 32


def test_flushing_forgets_what_is_on_its_way_too():
    engine = small()
    each(engine, [0, 1])
    assert engine.tier
    engine.flush_prefix_cache()
    assert (len(store(engine)), store(engine).held) == (0, 0)
    requests = each(engine, [0, 1])
    assert [r.progress.cached_tokens for r in requests] == [0, 0]
    as_told(requests, [0, 1])


@pytest.mark.parametrize("hurt", [0, 1])
def test_a_damaged_page_is_computed_anew_and_counted(hurt):
    """One of the two pages of a prefix: what lies behind a damaged one is of no use."""
    engine = small()
    (first, _, _) = each(engine, [0, 1, 2])
    kept = store(engine)
    page, _ = kept._kept[first.residence.digests[hurt]]
    page[-1].flags.writeable = True
    page[-1].reshape(-1).view(np.uint8)[7] ^= 1
    (again,) = each(engine, [0])
    as_told([again], [0])
    assert again.progress.cached_tokens == 16 * hurt
    assert engine.stats().tier.dropped == {"damaged": 1}
    requests = each(engine, [1, 2, 0])  # it was filed again
    as_told(requests, [1, 2, 0])
    assert requests[-1].progress.cached_tokens == 32
    assert engine.stats().tier.dropped == {"damaged": 1}


def test_a_page_with_numbers_that_are_not_finite_is_given_to_nobody():
    engine = small()
    (first, _, _) = each(engine, [0, 1, 2])
    kept = store(engine)
    digest = first.residence.digests[0]
    page, _ = kept._kept[digest]
    kept.forget([digest])
    kept.put(digest, tuple(np.full_like(a, np.nan) for a in page))
    (broken,) = each(engine, [0])
    assert broken.progress.finish_reason == "error"
    (again,) = each(engine, [0])
    assert again.progress.cached_tokens == 0
    as_told([again], [0])


def test_no_more_bytes_than_the_budget():
    engine = small(pages=3)
    order = [0, 1, 2, 3, 2, 3]
    requests = each(engine, order)
    as_told(requests, order)
    stats = engine.stats()
    assert stats.tier.pages == 3
    assert stats.tier.bytes <= store(engine).budget
    assert stats.tier.dropped["room"] == stats.tier.stored - 3 > 0


def test_what_nobody_can_use_is_refused():
    with pytest.raises(ConfigError, match="host_cache_gib = 1 with prefix_cache = False: without"):
        make_engine(host_cache_gib=1, prefix_cache=False)
    with pytest.raises(ConfigError, match="holds no page, which takes"):
        make_engine(host_cache_gib=1e-9)
    with pytest.raises(ConfigError, match="this computer has"):
        make_engine(host_cache_gib=2**19)


def soak(seed: int, rounds: int) -> None:
    """Random prompts that share beginnings, few pages on either side, damage, flushes and aborts.

    Every answer is the one that the same request has on its own, and every page comes back.
    """
    draw = random.Random(seed)
    engine, alone = small(pages=9), widest(prefix_cache=False)
    stems = [draw.choices(range(2, 40), k=34) for _ in range(4)]
    answers: dict[tuple[tuple[int, ...], int], tuple[list[int], list[int]]] = {}
    damaged = 0
    for _ in range(rounds):
        jobs = []
        for _ in range(draw.randint(1, 6)):
            stem = draw.choice(stems)[: draw.choice((5, 17, 33, 34))]
            ends = draw.choices(range(2, 40), k=draw.choice((0, 1, 2)))
            params = replace(GREEDY, max_tokens=draw.choice((1, 4, 12)))
            jobs.append((tuple(stem + ends[:1]), params))
        requests = [engine.make_request(p, params) for p, params in jobs]
        aborted = draw.choice(requests) if draw.random() < 0.2 else None
        for request in requests:
            engine.submit(request)
        for step in itertools.count():
            if aborted and step == 3:
                engine.abort(aborted)
            if not engine.busy:
                break
            engine.step()
        for request in requests:
            key = request.prompt, request.max_tokens
            if key not in answers:
                (want,) = serve(alone, [(request.prompt, request.params)], compiled=True)
                answers[key] = want.progress.output, accepted(want)
            if request is not aborted:
                assert (request.progress.output, accepted(request)) == answers[key]
        assert engine.stats().pages_used == 0
        kept = store(engine)
        assert kept.held <= kept.budget
        assert engine.tier
        if draw.random() < 0.1:
            engine.flush_prefix_cache()
        elif draw.random() < 0.2 and (digests := list(kept._kept)):
            page, _ = kept._kept[draw.choice(digests)]
            page[0].reshape(-1).view(np.uint8)[0] ^= 1
            damaged += 1
    stats = engine.stats()
    assert stats.hits_by_tier["host"] > 0
    assert stats.hits_by_tier["device"] > 0
    assert stats.tier.dropped["room"] > 0
    assert 0 < stats.tier.dropped["damaged"] <= damaged
    assert stats.drafts > rounds
    assert stats.accepted_tokens > rounds


@rest
def test_soak():
    soak(seed=1, rounds=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_long_soak(seed):
    soak(seed, rounds=1000)
