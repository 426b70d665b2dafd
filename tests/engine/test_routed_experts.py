"""Experts that an engine returns are the choices of a plain pass over the same text, of every kept token."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.keys import StepKey
from mtp_jax.engine.config import Dtype
from mtp_jax.engine.request import Request
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.model import trunk
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.expert_slots import with_slots
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import make_mesh
from tests import v4
from tests.models import (
    GREEDY,
    TINY,
    accepted,
    finish,
    gqa,
    make_engine,
    on_mesh,
    prompts,
    serve,
    tiny_params,
)

CFG = gqa(replace(TINY, first_k_dense_replace=0, num_experts_per_tok=3), qk_norm=False, bias=False)
"""Two MoE layers, behind the attention that compiles fastest."""
ASKING = replace(GREEDY, logprobs=None, routed_experts=True)
KEEPING: dict[str, Any] = {"return_routed_experts": True}
rest = pytest.mark.rest


@functools.partial(jax.jit, static_argnames="cfg")
def _routing(params: Params, cfg: ModelConfig, tokens: jax.Array) -> list[jax.Array]:
    return [r.ids[0] for r in trunk.forward_traced(params, cfg, tokens).routing]


def told(tokens: Sequence[int], cfg: ModelConfig = CFG, longest: int = 64) -> np.ndarray:
    """The choices of all tokens but the last, by a pass without a cache."""
    row = np.zeros((1, longest), np.int32)
    row[0, : len(tokens)] = tokens
    return np.stack(_routing(tiny_params(cfg), cfg, row), axis=1)[: len(tokens) - 1]


def returned(request: Request) -> np.ndarray:
    read = request.progress.routed_experts
    assert read is not None
    return read()[: len(request.prompt) + len(request.progress.output) - 1]


def check(requests: Sequence[Request], cfg: ModelConfig = CFG, longest: int = 64) -> None:
    for r in requests:
        want = told([*r.prompt, *r.progress.output], cfg, longest)
        assert returned(r).dtype == np.uint8
        np.testing.assert_array_equal(returned(r), want)
    assert sum(map(sum, map(accepted, requests))) > 5


def test_drafts_hits_and_preemption():
    """Three requests, pages for one and a half, and then a prompt that begins in the cache."""
    engine = make_engine(None, CFG, num_pages=5, max_num_seqs=2, **KEEPING)
    given = prompts(3, shortest=9)
    found = serve(engine, [(p, ASKING) for p in given])
    check(found)
    assert engine.stats().preemptions > 0
    again = [*given[2], *found[2].progress.output][:39]
    engine.flush_prefix_cache()
    quietly = replace(ASKING, routed_experts=False)
    quiet, hit = (serve(engine, [(again, p)], compiled=True)[0] for p in (quietly, ASKING))
    assert quiet.progress.routed_experts is None
    assert hit.progress.cached_tokens >= 32
    check([hit])


def test_an_engine_that_nobody_asks_keeps_nothing():
    engine, keeping = make_engine(None, CFG), make_engine(None, CFG, **KEEPING)
    plain, more = local_runner(engine), local_runner(keeping)
    assert plain.state.routed is None
    assert more.page_bytes == plain.page_bytes + 16 * 2 * 3
    with pytest.raises(RequestError, match=r"routed_experts = True, but the .*--return-routed-experts"):
        engine.make_request([3, 4], ASKING)
    with pytest.raises(ConfigError, match="return_routed_experts = True, but the model has no routed exp"):
        make_engine(None, replace(CFG, n_routed_experts=0), **KEEPING)


def test_a_request_that_is_aborted_has_the_experts_so_far():
    engine = make_engine(None, CFG, max_num_seqs=2, **KEEPING)
    read, waits = (engine.make_request(prompts(1, shortest=40)[0], ASKING) for _ in range(2))
    for request in (read, waits):
        engine.submit(request)
    engine.abort(waits)
    engine.step()
    engine.abort(read)
    assert waits.progress.routed_experts is None
    assert read.progress.output == []
    np.testing.assert_array_equal(returned(read), told(read.prompt)[:16])  # a chunk
    finish(engine)


V4 = v4.model(num_hidden_layers=3, compress_ratios=[4, 128, 0, 0], num_hash_layers=1)
MESHES: dict[str, dict[str, Any]] = {
    "gathered": {"expert_exchange": "gather"},
    "exchanged": {"expert_exchange": "all_to_all", "micro_batches": 2},
    "copies": {"redundant_experts": 8, "expert_rebalance": 4},
}


@rest
@pytest.mark.parametrize("kind", [*MESHES, "trees", "ranked", "host tier", "v4"])
def test_further_engines(kind: str):
    cfg, config, longest = CFG, dict(KEEPING), 64
    params: Params | None = None
    jobs = [(p, ASKING) for p in prompts(4, shortest=9)]
    if kind in MESHES:
        mesh = make_mesh(2, 2)
        config |= {"mesh": mesh, **MESHES[kind]}
        params = with_slots(on_mesh(tiny_params(cfg), mesh, cfg), config.get("redundant_experts", 0), mesh)
    elif kind == "trees":
        config |= {"tree": "3x3x7", "num_speculative_tokens": 7, "verifier": "coupled"}
    elif kind == "ranked":
        config |= {"adaptive_depth": True, "adaptive_verification": True}
    elif kind == "v4":
        cfg, longest = V4, 256
        config |= {"page_size": 128, "max_model_len": 256, "prefill_chunk": 64}
        jobs = [([2 + n, *p], ASKING) for n, p in enumerate(prompts(3, shortest=120, vocab=V4.vocab_size))]
    elif kind == "host tier":
        config |= {"host_cache_gib": 1.0, "num_pages": 5}
    engine, ranked = make_engine(params, cfg, **config), list[StepKey]()
    if kind == "ranked":

        def some(keys: Sequence[StepKey], *_: Any) -> StepKey:
            ranked.append(next((k for k in keys if k.kept), keys[-1]))
            return ranked[-1]

        engine.depth.choose = some  # type: ignore[method-assign]
    first = serve(engine, jobs)
    check(first, cfg, longest)
    again = serve(
        engine, [([*p, *r.progress.output][: longest - 24], a) for (p, a), r in zip(jobs, first, strict=True)]
    )
    check(again, cfg, longest)
    assert sum(r.progress.cached_tokens for r in again) > 16
    assert any(k.kept for k in ranked) == (kind == "ranked")
    assert (engine.tier is not None and engine.tier.restored > 0) == (kind == "host tier")
    assert (engine.balancer is not None and engine.balancer.stats().moves > 0) == (kind == "copies")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("float32", 10), ("bfloat16", 5000)])
def test_a_hundred_thousand_choices(dtype: Dtype, most: int):
    """Sets of experts are equal but for near ties, which are some of bfloat16's choices, and hardly any.

    ``-s`` prints their number.
    """
    cfg = replace(CFG, num_hidden_layers=4, n_routed_experts=16, num_experts_per_tok=4, dtype=dtype)
    params = jax.tree.map(lambda a: a.astype(dtype) if a.dtype == "float32" else a, tiny_params(cfg))
    config = {"max_num_seqs": 8, "max_model_len": 256, "prefill_chunk": 64, "dtype": dtype, **KEEPING}
    engine = make_engine(params, cfg, **config)
    drawn = np.random.default_rng(4).integers(2, cfg.vocab_size, (32, 100)).tolist()
    requests = serve(engine, [(p, replace(ASKING, max_tokens=100)) for p in drawn])
    choices = wrong = 0
    for r in requests:
        row = np.zeros((1, 256), np.int32)
        row[0, :200] = [*r.prompt, *r.progress.output]
        want = np.stack(_routing(params, cfg, row), axis=1)[:199]
        found = returned(r)
        choices += found.size
        wrong += sum(len({*a} - {*b}) for a, b in zip(_rows(found), _rows(want), strict=True))
    print(f"{dtype}: {wrong} of {choices} choices differ")
    assert choices > 10**5
    assert wrong <= most
    assert sum(map(sum, map(accepted, requests))) > 1000


def _rows(choices: np.ndarray) -> list[list[int]]:
    return choices.reshape(-1, choices.shape[-1]).tolist()
