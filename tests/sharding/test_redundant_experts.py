"""Experts in several slots, placed anew while serving: the tokens stay, and nothing is compiled."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import LLM, SamplingParams
from mtp_jax.api.local import local_runner
from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.decode.launches import ReadExperts
from mtp_jax.engine import balance
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.errors import ConfigError
from mtp_jax.model.expert_slots import moe_layers, move, slots_of, with_slots
from mtp_jax.model.params import Moe, Params, param_specs
from mtp_jax.model.placement import copies_of, first_placement
from mtp_jax.model.sharding import make_mesh, param_sharding
from tests.decode.helpers import compilations as compilations
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    accepted,
    finish,
    gqa,
    make_engine,
    on_mesh,
    prepare,
    prompts,
    tiny_params,
)

CFG = gqa(replace(TINY, first_k_dense_replace=0, n_group=1, topk_group=1), qk_norm=False, bias=False)
"""Two MoE layers, behind the attention that compiles fastest."""
SPARE, DEPTH = 8, 1
TOKENS = 24
SHORT = replace(GREEDY, max_tokens=TOKENS, logprobs=None)


@functools.cache
def skewed() -> Params:
    """Half of the choices are experts 0 and 1, which lie on one device."""
    params = tiny_params(CFG)
    layers = [
        replace(p, mlp=replace(p.mlp, bias=p.mlp.bias.at[:2].add(0.3))) if isinstance(p.mlp, Moe) else p
        for p in params.layers
    ]
    return replace(params, layers=tuple(layers))


def engine_on(**options: Any) -> Engine:
    mesh = make_mesh(2, 2)
    given = {"redundant_experts": SPARE, "expert_rebalance": 4, "num_speculative_tokens": DEPTH, **options}
    return make_engine(with_slots(on_mesh(skewed(), mesh, CFG), SPARE, mesh), CFG, mesh, **given)


def complete(engine: Engine, seed: int = 6) -> list[Request]:
    requests = [engine.make_request(p, SHORT) for p in prompts(4, seed=seed)]
    for request in requests:
        engine.submit(request)
    finish(engine)
    return requests


def check(requests: list[Request]) -> None:
    """They are what one device without slots gives."""
    told = Reference(skewed(), CFG)
    for r in requests:
        want = told.speculate(r.prompt, TOKENS, DEPTH)
        assert (r.progress.output, accepted(r)) == (want.ids, want.accepted)
        assert sum(want.accepted) > 0


def experts_of(engine: Engine) -> balance.ExpertStats:
    found = engine.stats().experts
    assert found is not None
    return found


@pytest.mark.parametrize("exchange", ["gather", pytest.param("all_to_all", marks=pytest.mark.slow)])
def test_tokens_stay_before_during_and_after_a_rebalance(exchange, monkeypatch, compilations):
    monkeypatch.setattr(balance, "MOVES", 1)  # moves go on over many launches
    engine = engine_on(expert_exchange=exchange)
    prepare(engine, [engine.make_request([3, 4], SHORT)])
    assert engine.balancer is not None
    first = engine.balancer.placed.copy()
    compilations.clear()
    requests = complete(engine)
    before = experts_of(engine)
    while experts_of(engine).readings < 4:
        requests += complete(engine, seed=experts_of(engine).readings)
    assert not compilations
    after, placed = experts_of(engine), engine.balancer.placed
    assert 0 < before.moves < after.moves
    assert (placed != first).any()
    check(requests)
    for moe, plain, now in zip(
        moe_layers(local_runner(engine).params), moe_layers(skewed()), placed, strict=True
    ):
        assert {*now.tolist()} == {*range(CFG.n_routed_experts)}
        np.testing.assert_array_equal(np.asarray(moe.gate_up), np.asarray(plain.gate_up)[now])
        np.testing.assert_array_equal(np.asarray(moe.down), np.asarray(plain.down)[now])
        np.testing.assert_array_equal(np.asarray(moe.copies), copies_of(now, 8, moe.copies.shape[1]))


def test_counts_are_those_of_the_choices():
    """Every committed token and every draft of a window is a choice of two experts in each layer."""
    engine = engine_on(expert_rebalance=0)
    prepare(engine, [engine.make_request([3, 4], SHORT)])
    runner = local_runner(engine)
    runner.do(ReadExperts())
    requests = complete(engine)
    load, over = runner.do(ReadExperts()).read()
    assert load.shape == (2, CFG.n_routed_experts)
    windows = sum(len(accepted(r)) * (1 + DEPTH) for r in requests)
    assert load.sum(axis=1).tolist() == [load[0].sum()] * 2
    assert 0 < load[0].sum() <= 2 * (sum(len(r.prompt) for r in requests) + windows)
    assert load[:, :2].sum() > 0.3 * load.sum()
    assert over.tolist() == [0, 0]
    assert runner.do(ReadExperts()).read()[0].sum() == 0
    assert experts_of(engine).moves == 0


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3fn"])
def test_an_expert_is_copied_bit_by_bit_between_any_devices(kind):
    mesh = make_mesh(4, 2)
    where = param_sharding(moe_layers(param_specs(TINY))[0].down, mesh)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(16, 4, 6)).astype(jnp.dtype(kind))
    weights[3, 0, 0] = -0.0
    run = jax.jit(functools.partial(move, mesh=mesh), donate_argnums=0)
    table = jnp.zeros((8, 2), jnp.int32)
    for source, target in ((3, 15), (0, 1), (15, 0)):
        put = jax.device_put(weights, where)
        (moved, _), copies = run((put, jax.device_put(weights, where)), table, source, target)
        want = weights.copy()
        want[target] = weights[source]
        assert np.asarray(moved).tobytes() == want.tobytes()
        assert copies.shape == table.shape


def test_rows_take_the_copies_of_an_expert_in_turn():
    placed = np.array([0, 1, 2, 3, 1, 1])
    copies = jnp.asarray(copies_of(placed, 4, 3))
    ids = jnp.asarray([[1, 0], [1, 3], [1, -1], [1, 4]])
    found = np.asarray(slots_of(copies, ids, jnp.arange(4)))
    assert found.tolist() == [[1, 0], [4, 3], [5, -1], [1, -1]]
    assert first_placement(4, 6).tolist() == [0, 1, 2, 3, 0, 1]


def test_what_cannot_be_is_refused():
    mesh = make_mesh(2, 2)
    params = on_mesh(tiny_params(CFG), mesh, CFG)
    with pytest.raises(ConfigError, match="11 slots do not divide over 4 devices; add 1"):
        with_slots(params, 3, mesh)
    with pytest.raises(ConfigError, match="redundant_experts = 4 with one device"):
        make_engine(redundant_experts=4)
    dense = replace(TINY, n_routed_experts=0, n_shared_experts=0)
    with pytest.raises(ConfigError, match="no routed experts"):
        with_slots(tiny_params(dense), 4, mesh)
    assert with_slots(params, 0, mesh) is params
    spread = with_slots(params, 4, mesh)
    assert with_slots(spread, 4, mesh) is spread
    assert moe_layers(spread)[0].down.shape[0] == 12


@pytest.fixture
def from_files(tmp_path) -> LLM:
    save_checkpoint(tmp_path, CFG, skewed(), "float32")
    sizes: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_model_len": 60,
        "num_speculative_tokens": DEPTH,
        "seed": 0,
    }
    slots: dict[str, Any] = {"redundant_experts": SPARE, "expert_rebalance": 2}
    return LLM(tmp_path, mesh=make_mesh(2, 2), compile_cache=None, **sizes, **slots)


def test_what_needs_the_weights_as_they_were_loaded_is_refused(from_files):
    llm = from_files
    for what, refused in (
        ("an update of the weights", lambda: llm.update_weights({})),
        ("a release of weights", llm.release_memory),
    ):
        with pytest.raises(ConfigError, match=f"{what}.*redundant_experts = 8 moves experts; set it to 0"):
            refused()
    with pytest.raises(ConfigError, match="moves experts"):
        llm.score([3, 4, 5])


@pytest.mark.slow
def test_a_model_from_files(from_files):
    llm, prompt = from_files, prompts(1)[0]
    outputs = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert outputs[0].outputs[0].token_ids == Reference(skewed(), CFG).speculate(prompt, 20).ids
    assert outputs[0].speculation.acceptance_length > 1
    assert experts_of(llm.engine).moves > 0


def test_old_experts_are_deleted_where_they_are_consumed():
    mesh = make_mesh(2, 2)
    params = jax.tree.map(jnp.copy, on_mesh(tiny_params(CFG), mesh, CFG))
    with_slots(params, 4, mesh, consume=True)
    assert all(moe.down.is_deleted() for moe in moe_layers(params))
    assert not params.embed.is_deleted()
