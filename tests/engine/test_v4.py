"""An engine that serves a DeepSeek-V4: its drafts change no text, and its pages are whole, in all modes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.api.propose import propose
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench.synthetic import chain, rigged_params, with_noise
from mtp_jax.model import trunk
from mtp_jax.model.backend import xla
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import make_mesh
from tests import v4, v4_stages
from tests.engine.files import in_files, known, written
from tests.models import accepted, make_engine, on_mesh, serve, tiny_params
from tests.rounding import near, of_model

# A layer of each kind. Experts by token in the first.
LAYERS: dict[str, Any] = {"num_hidden_layers": 3, "compress_ratios": [4, 128, 0, 0], "num_hash_layers": 1}
STAGED = v4.v4_config(**v4.DSPARK | LAYERS | {"n_mtp_layers": 2, "dspark_target_layer_ids": [0, 1, 2]})
CFGS = {"mtp": v4.model(**LAYERS), "dspark": v4.staged(**STAGED)}
CFG = CFGS["mtp"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PAGE = 128
rest = pytest.mark.rest


@pytest.fixture(params=["mtp", pytest.param("dspark", marks=pytest.mark.slow)])
def cfg(request: pytest.FixtureRequest) -> ModelConfig:
    """The model with either of its drafters."""
    return CFGS[request.param]


def engine_of(cfg: ModelConfig, params: Params | None = None, **config: Any) -> Engine:
    sizes = {"page_size": PAGE, "max_model_len": 400, "max_num_seqs": 2, "prefill_chunk": 64}
    return make_engine(params, cfg, **{**sizes, "num_speculative_tokens": 3, **config})


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


@rest
def test_drafts_and_cached_pages_change_no_text(cfg: ModelConfig):
    """Two slots at a time, over borders of entries and pages; hits end before, at and behind a border."""
    engine = engine_of(cfg)
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


@rest
def test_the_synthetic_model_speaks_its_chain_and_drafts_it():
    """Every draft is accepted without noise, and some with noise; the text stays the chain."""
    params, following = rigged_params(CFG, 0.0), chain(CFG)
    engine, lengths = engine_of(CFG, params), []
    for noise in (0.0, 2.0):
        engine.flush_prefix_cache()
        local_runner(engine).take(with_noise(CFG, params, noise))
        requests = serve(engine, jobs(254, 119), exactly=not lengths, compiled=bool(lengths))
        for r in requests:
            assert r.progress.output == following[[r.prompt[-1], *r.progress.output[:-1]]].tolist()
        lengths.append(kept(requests) / sum(len(accepted(r)) for r in requests) + 1)
    assert lengths[0] > 3.5 > lengths[1] > 1.2


@pytest.mark.slow
def test_preemption_changes_nothing(cfg: ModelConfig):
    given = [(p, replace(o, max_tokens=140)) for p, o in jobs(120, 118)]
    engine = engine_of(cfg, num_pages=3)
    requests = serve(engine, given)
    alone = [serve(engine_of(cfg), [each])[0] for each in given]
    assert engine.stats().preemptions > 0
    assert told(requests) == told(alone)
    assert kept(requests) > 20


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 100, 256])
def test_chunks_of_prompts_change_nothing(cfg: ModelConfig, chunk: int):
    requests = serve(engine_of(cfg, prefill_chunk=chunk), jobs(254, 119))
    assert told(requests) == told(serve(engine_of(cfg), jobs(254, 119)))
    assert kept(requests) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{}, {"redundant_experts": 4, "expert_exchange": "all_to_all"}, {"micro_batches": 2}],
    ids=str,
)
def test_a_mesh_changes_nothing(cfg: ModelConfig, config: dict[str, Any]):
    """Slots and pages over two data shards; heads, groups of heads and experts over two more."""
    mesh = make_mesh(2, 2)
    params = on_mesh(tiny_params(cfg), mesh, cfg)
    sizes = {"page_size": PAGE, "max_model_len": 400, "max_num_seqs": 4, "prefill_chunk": 64}
    engine = make_engine(params, cfg, mesh, num_speculative_tokens=3, **sizes, **config)
    given = jobs(254, 119, 131, 70)
    requests = serve(engine, given)
    assert told(requests) == told(serve(engine_of(cfg, max_num_seqs=4), given))
    assert kept(requests) > 20


@pytest.mark.slow
def test_pages_that_went_to_the_host_and_to_files_come_back(cfg: ModelConfig, tmp_path: Path):
    sizes = {"max_num_seqs": 1, "num_pages": 4, "host_cache_gib": 0.01, **in_files(tmp_path)}
    engine, other = (known(engine_of(cfg, **sizes)) for _ in range(2))
    (first,) = serve(engine, jobs(300), exactly=True)
    for begin in (50, 60):
        serve(engine, [([begin, *text()[:299]], GREEDY)], exactly=True)
    (back,) = serve(engine, jobs(300), compiled=True)
    assert engine.stats().hits_by_tier["host"] == back.progress.cached_tokens == 256
    assert told([back]) == told([first])
    assert kept([back]) > 5
    assert written(engine) > 0
    (fetched,) = serve(other, jobs(300), exactly=True)
    assert other.stats().hits_by_tier["file"] == fetched.progress.cached_tokens == 256
    assert told([fetched]) == told([first])
    assert kept([fetched]) > 5


@pytest.mark.slow
def test_a_request_that_moves_takes_its_slot_along(cfg: ModelConfig):
    """The shorter of two requests ends first, in the first slot; the other one moves there."""
    engine = engine_of(cfg)
    given = [*jobs(119, max_tokens=4), *jobs(254, 254)[1:]]
    requests = serve(engine, given)
    alone = [serve(engine_of(cfg), [each])[0] for each in given]
    assert told(requests) == told(alone)
    assert kept(requests) > 5


RANKED = {"adaptive_depth": True, "adaptive_verification": True}


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"kv_cache_dtype": "fp8"}, {"suffix_drafts": True}, RANKED], ids=str)
def test_other_modes_change_no_text(cfg: ModelConfig, config: dict[str, Any]):
    engine = engine_of(cfg, **config)
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
    ],
)
def test_options_that_do_not_go_with_entries_are_refused(config: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        engine_of(CFG, **config)


@partial(jax.jit, static_argnames="cfg")
def forward(params: Params, tokens: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Logits of a text, and the streams that its stages read side by side, by a pass without a cache."""
    taps = cfg.drafter.taps if cfg.drafter else ()
    found = trunk.forward_traced(params, cfg, tokens, xla(experts="dense"), taps)
    return trunk.logits(params, found.hidden)[0], jnp.concatenate([found.taps[k] for k in taps], axis=-1)[0]


@pytest.mark.slow
def test_stages_draft_and_are_accepted_as_their_formulas_say():
    cfg, engine = CFGS["dspark"], engine_of(CFGS["dspark"], max_num_seqs=1, num_speculative_tokens=4)
    plain, ((prompt, options),) = v4_stages.Stages(STAGED, v4.by_name(cfg, tiny_params(cfg))), jobs(140)
    begin, tokens = len(prompt), 20
    (request,) = serve(
        engine, [(prompt, replace(options, max_tokens=tokens + 4, num_speculative_tokens=0))], exactly=True
    )
    text = [*prompt, *request.progress.output]
    logits, streams = map(np.asarray, forward(tiny_params(cfg), jnp.asarray([text]), cfg))
    assert logits[begin - 1 : -1].argmax(-1).tolist() == request.progress.output
    first, ids, chosen_by = propose(engine, prompt, 4)
    drafts, by = plain.drafts(first, plain.context(streams[:begin]))
    assert ids.tolist() == drafts
    near(chosen_by, by, of_model(cfg, len(prompt) + 4))
    for depth in (4, 1, 3):
        newest, counts = begin, []
        while newest < begin + tokens - 1:
            drafts, _ = plain.drafts(text[newest], plain.context(streams[:newest]))
            same = np.equal(drafts[:depth], text[newest + 1 : newest + 1 + depth])
            counts.append(int(np.cumprod(same).sum()))
            newest += counts[-1] + 1
        (request,) = serve(
            engine, [(prompt, replace(options, max_tokens=tokens, num_speculative_tokens=depth))]
        )
        assert request.progress.cached_tokens == PAGE
        assert accepted(request) == counts
        assert 0 < sum(counts) < depth * len(counts)
