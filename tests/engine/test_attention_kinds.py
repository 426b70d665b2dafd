"""Attention that is not dense MLA, in the engine: one text, whatever is computed together, cached or drafted.

Tokens and acceptance are compared with the plain loop, which recomputes each token's choice, keys and values.
"""

from dataclasses import replace
from functools import cache

import jax
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.model.config import IndexerConfig, ModelConfig
from mtp_jax.model.sharding import make_mesh
from tests.engine.plain import same_scores
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    Told,
    accepted,
    gqa,
    make_engine,
    on_mesh,
    prompts,
    serve,
    tiny_params,
)

# Every prompt is longer than ``topk`` or grows beyond it, and a layer shares what the one before it chose.
INDEX = IndexerConfig(heads=4, dim=8, topk=8, shared=(False, True))
SPARSE = replace(TINY, indexer=INDEX)
SHARING = replace(SPARSE, indexer=replace(INDEX, interleaved=True, share_drafts=True))
GQA = gqa()
PROMPTS = prompts(6)
pytestmark = pytest.mark.rest  # golden models of each kind are decoded in every run

each_kind = pytest.mark.parametrize("cfg", [SPARSE, GQA], ids=["sparse", "gqa"])
# What a kind of attention has little to do with.
one_kind = pytest.mark.parametrize(
    "cfg", [SPARSE, pytest.param(GQA, marks=pytest.mark.slow)], ids=["sparse", "gqa"]
)


def engine_of(cfg: ModelConfig, **config) -> Engine:
    return make_engine(tiny_params(cfg), cfg, **config)


@cache
def reference(cfg: ModelConfig) -> Reference:
    return Reference(tiny_params(cfg), cfg)


def told(cfg: ModelConfig, i: int, depth: int = 3) -> Told:
    return reference(cfg).speculate(PROMPTS[i], 24, depth)


def jobs(count: int = len(PROMPTS), depth: int = 3):
    return [(p, replace(GREEDY, num_speculative_tokens=depth)) for p in PROMPTS[:count]]


def as_told(cfg: ModelConfig, requests: list[Request], depth: int = 3) -> None:
    for i, request in enumerate(requests):
        want = told(cfg, i, depth or 3)
        assert request.progress.output == want.ids
        if depth:
            assert accepted(request) == want.accepted
    assert not depth or sum(r.progress.speculation.accepted for r in requests) > len(requests)


@pytest.mark.slow
def test_sparse_attention_is_not_dense():
    dense = replace(SPARSE, indexer=replace(INDEX, topk=64))
    assert told(dense, 0).ids != told(SPARSE, 0).ids


@each_kind
def test_together(cfg):
    """With drafts and without, side by side."""
    requests = serve(
        engine_of(cfg), [job for pair in zip(jobs(), jobs(depth=0), strict=True) for job in pair]
    )
    as_told(cfg, requests[::2])
    as_told(cfg, requests[1::2], 0)


@each_kind
@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_alone(cfg, depth):
    as_told(cfg, serve(engine_of(cfg), jobs(1, depth), exactly=True), depth)


@each_kind
@pytest.mark.slow
def test_five_drafts(cfg):
    as_told(cfg, serve(engine_of(cfg, num_speculative_tokens=5), jobs(depth=5)), 5)


@one_kind
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"page_size": 4, "prefill_chunk": 5}, {"page_size": 32, "prefill_chunk": 3}], ids=str
)
def test_pages_and_chunks(cfg, sizes):
    as_told(cfg, serve(engine_of(cfg, **sizes), jobs()))


@each_kind
def test_a_cached_prefix_gives_the_same_text(cfg):
    """Pages hold index keys, or keys and values."""
    engine, prompt, want = engine_of(cfg), PROMPTS[-1], told(cfg, 5)
    serve(engine, [(prompt, GREEDY)])
    (again,) = serve(engine, [(prompt, GREEDY)])
    assert again.progress.cached_tokens == 16
    assert (again.progress.output, accepted(again)) == (want.ids, want.accepted)


@each_kind
def test_preempted_requests(cfg):
    engine = engine_of(cfg, num_pages=6)
    as_told(cfg, serve(engine, jobs()))
    assert engine.stats().preemptions > 0


@each_kind
@pytest.mark.slow
@pytest.mark.parametrize("data", [4, 1])
def test_eight_devices_compute_what_one_does(cfg, data):
    """They choose the same entries; each has two of four groups of heads, or one of a group's two heads."""
    mesh = make_mesh(data, 8 // data)
    params = on_mesh(tiny_params(cfg), mesh, cfg)
    as_told(cfg, serve(make_engine(params, cfg, mesh, max_num_seqs=8), jobs()))


@pytest.mark.slow
def test_drafts_that_share_a_choice_change_no_token():
    engine = engine_of(SHARING)
    requests, plain = serve(engine, jobs()), serve(engine, jobs(depth=0), compiled=True)
    assert [r.progress.output for r in requests] == [r.progress.output for r in plain]
    assert sum(r.progress.speculation.accepted for r in requests) > len(requests)


LATENT = TINY.row.fp8_bytes
INDEXED = LATENT + INDEX.dim + 4
# Four heads of eight keys and as many values, and a scale for each head of either.
PAIRS = 64 + 8 * 4


@pytest.mark.parametrize(
    ("cfg", "row_bytes"),
    [(SPARSE, [INDEXED, LATENT, INDEXED]), (GQA, [PAIRS] * (GQA.num_hidden_layers + 1))],
    ids=["sparse", "gqa"],
)
def test_an_fp8_cache_holds_all_in_eight_bits(cfg, row_bytes):
    engine = engine_of(cfg, kv_cache_dtype="fp8")
    state = local_runner(engine).state
    rows = engine.config.page_size * (engine.pages + 1)
    caches = (*state.trunk, *state.drafter.pages.cache)
    assert [sum(a.nbytes for a in jax.tree.leaves(c)) for c in caches] == [rows * n for n in row_bytes]
    assert GQA.row.fp8_bytes == PAIRS


@each_kind
@pytest.mark.slow
def test_speculation_over_an_fp8_cache_changes_no_token(cfg):
    requests = serve(engine_of(cfg, kv_cache_dtype="fp8"), jobs())
    engine = engine_of(cfg, kv_cache_dtype="fp8")
    alone = [serve(engine, [job], compiled=True)[0] for job in jobs(depth=0)]
    assert [r.progress.output for r in requests] == [r.progress.output for r in alone]
    assert sum(r.progress.speculation.accepted for r in requests) > len(requests)


@one_kind
@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_sampled_text_depends_on_its_seed_alone(cfg, depth):
    sampled = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=0)
    params = replace(sampled, num_speculative_tokens=depth)
    (alone,) = serve(engine_of(cfg, verifier="coupled"), [(PROMPTS[5], sampled)])
    beside = serve(engine_of(cfg, verifier="coupled"), [*jobs(3), (PROMPTS[5], params)])[-1]
    assert beside.progress.output == alone.progress.output
    same_scores(beside, alone, cfg)
    assert alone.progress.speculation.accepted > 0
