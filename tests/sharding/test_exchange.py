"""Rows reach the experts of other devices by an all-to-all, or a gather where it has no room: one result."""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.quantised import Quantised, quantise
from mtp_jax.errors import ConfigError
from mtp_jax.model.backend import xla, xla_cpu
from mtp_jax.model.config import IndexerConfig
from mtp_jax.model.experts import exchange as exchanges
from mtp_jax.model.experts.exchange import Exchange, by_gather, exchange_of, reached, shards_of_a_host
from mtp_jax.model.params import Moe, Params
from mtp_jax.model.products.e4m3 import Operand
from mtp_jax.model.products.stream import summed
from mtp_jax.model.sharding import make_mesh, partition, sharded
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    accepted,
    chosen_logprobs,
    gqa,
    make_engine,
    on_mesh,
    prompts,
    serve,
    tiny_params,
)
from tests.rounding import near, of_model

# V3's, of which rows reach few devices.
V3 = replace(
    TINY, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, moe_intermediate_size=2048
)
B, W = 8, 24


def moe_of(params: Params) -> Moe:
    layer = params.layers[1].mlp
    assert isinstance(layer, Moe)
    return layer


# Terms of the sums from a row to what experts make of it, with the choices' weights.
TERMS = 2 * TINY.hidden_size + TINY.moe_intermediate_size + TINY.num_experts_per_tok + TINY.n_shared_experts


def skewed_bias(skewed: bool) -> np.ndarray:
    """The bias of the choice; skewed: all rows choose experts 0 and 1."""
    bias = np.array(moe_of(tiny_params()).bias)
    bias[:2] += 100.0 * skewed
    return bias


@functools.cache
def reference(skewed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, what experts make of them)."""
    x = np.random.default_rng(0).normal(size=(B, W, TINY.hidden_size)).astype(np.float32)
    layer = replace(moe_of(tiny_params()), bias=skewed_bias(skewed))
    return x, np.asarray(_dense(layer, x))


@jax.jit
def _dense(layer: Moe, x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, map(summed, xla(experts="dense").experts.moe(layer, TINY, x)[0]))


@functools.cache
def program(data: int, model: int, exchange: Exchange) -> tuple[Moe, Callable[..., tuple[jax.Array, Any]]]:
    """The layer on a mesh, and the function that applies it to rows."""
    mesh = make_mesh(data, model)
    on = xla_cpu(mesh, exchange=exchange)

    def run(p: Moe, x: jax.Array, counts: jax.Array) -> tuple[jax.Array, Any]:
        y, routing = on.experts.moe(p, TINY, x, counts)
        return functools.reduce(jnp.add, map(summed, y)), routing

    return moe_of(on_mesh(tiny_params(), mesh)), jax.jit(run)


def run(data: int, model: int, exchange: Exchange, skewed: bool, counts: np.ndarray) -> tuple[Any, Any]:
    layer, given = program(data, model, exchange)
    y, r = given(replace(layer, bias=skewed_bias(skewed)), reference(skewed)[0], counts)
    return np.asarray(y), r


@pytest.mark.parametrize(
    ("data", "model", "domain"),
    [
        (4, 2, 2),
        *(pytest.param(*m, marks=pytest.mark.rest) for m in ((8, 1, 1), (8, 1, 4), (4, 2, 1))),
    ],
)
def test_both_ways_give_what_dense_experts_give(data, model, domain):
    """With room for the choices, and without; the second time they are skewed."""
    shard = B * W // data
    for skewed, room, over in ((False, 9.0, 0), (True, 9.0, 0), (True, 0.01, 1)):
        exchange = Exchange(data, domain, room)
        assert (exchange.capacity(shard, TINY, neighbours=True) < shard) == (room < 1)
        y, r = run(data, model, exchange, skewed, np.ones((B, W), bool))
        near(y, reference(skewed)[1], TERMS)
        assert int(r.over) == over
        assert r.ids.shape == (B, W, TINY.num_experts_per_tok)


def test_rows_that_do_not_count_take_no_room():
    counts, exchange = np.zeros((B, W), bool), Exchange(8, 1, 0.01)
    counts[:, 0] = True
    y, r = run(8, 1, exchange, True, counts)
    near(y[counts], reference(True)[1][counts], TERMS)
    assert int(r.over) == 0
    assert (np.asarray(r.ids)[~counts] == -1).all()


@pytest.mark.parametrize("domain", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_rows_in_e4m3_travel_with_their_scales(domain):
    """As a Hopper GPU's kernels take them. Each device returns its rows times the weights of its experts."""
    mesh, exchange = make_mesh(4, 2), Exchange(4, domain, 1.0)
    rng, count = np.random.default_rng(0), 12
    x = rng.normal(size=(4 * count, 256)).astype(np.float32)
    ids = np.argsort(rng.random((4 * count, 8)))[:, :2].astype(np.int32)
    weights = rng.random((4 * count, 2)).astype(np.float32)

    def local(x, ids, weights):
        rows = quantise(x).padded(8)
        rows = Operand(rows.values, rows.scale)
        own = jax.lax.axis_index(("data", "model"))

        def run(rows, ids, weights):
            given = Operand.of_rows_first(*rows).flat()
            assert isinstance(given, Quantised)
            return given.expand() * jnp.where(ids == own, weights, 0).sum(axis=1, keepdims=True)

        given = rows.rows_first(count), ids, weights
        wanted = exchange.wanted(ids, 8 // exchange.domains)
        parts = exchange.by_all_to_all(*given, wanted, count, run), by_gather(run, *given)
        return [jax.lax.psum(part, "model") for part in parts]

    slots = partition("slots")
    found = jax.jit(sharded(local, mesh, (slots, slots, slots), [slots, slots]))(x, ids, weights)
    want = np.asarray(jax.jit(lambda x: quantise(x).expand())(x)) * weights.sum(axis=1, keepdims=True)
    for y in found:  # scales, two weights, and the sum over two devices
        near(y, want, 4)


ONE_LAYER = gqa(replace(TINY, nextn_moe=(True,), num_hidden_layers=1, first_k_dense_replace=0))
# Its second layer attends to what the first one chose.
INDEX = IndexerConfig(heads=4, dim=8, topk=8, shared=(False, True))
SPARSE = replace(TINY, nextn_moe=(True,), indexer=INDEX)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("cfg", "batches", "room"),
    [
        pytest.param(SPARSE, 2, 1.5, id="sparse"),
        pytest.param(ONE_LAYER, 2, 1.5, id="batches", marks=pytest.mark.slow),
        pytest.param(ONE_LAYER, 1, 1.5, id="whole", marks=pytest.mark.slow),
        pytest.param(ONE_LAYER, 1, 1e-6, id="gathered", marks=pytest.mark.slow),
        pytest.param(ONE_LAYER, 2, 1e-6, id="batches gathered", marks=pytest.mark.slow),
    ],
)
def test_an_engine_serves_the_same_tokens(cfg, batches, room, monkeypatch):
    """Prompts and drafts of an MoE NextN layer, too; with room for one row nearly all are gathered."""
    params, mesh = tiny_params(cfg), make_mesh(4, 2)
    if room < 1:
        monkeypatch.setattr(Exchange, "capacity", lambda *_, **__: 1)
    options: dict[str, Any] = {"expert_exchange": "all_to_all", "expert_room": room, "max_num_seqs": 8}
    options |= {"micro_batches": batches, "num_speculative_tokens": 2}
    engine = make_engine(on_mesh(params, mesh, cfg), cfg, mesh, **options)
    jobs = [(p, replace(GREEDY, max_tokens=12)) for p in prompts(5)]
    reference, kept = Reference(params, cfg), 0
    for got in serve(engine, jobs):
        told = reference.speculate(got.prompt, 12, 2)
        assert (got.progress.output, accepted(got)) == (told.ids, told.accepted)
        kept += sum(told.accepted)
        ids = [*got.prompt, *got.progress.output]
        rows = reference.logprobs(ids)[len(got.prompt) - 1 : -1]
        terms, largest = of_model(cfg, len(ids)) + cfg.vocab_size, float(np.abs(reference.logits(ids)).max())
        near(chosen_logprobs(got), rows[range(12), got.progress.output], terms, size=largest)
    assert kept > len(jobs)


def test_room_follows_what_even_choices_need():
    """V3's rows reach 3.6 of 8 devices, 7.2 of 64."""
    assert [round(reached(V3, n, True), 2) for n in (8, 16, 64, 128)] == [3.6, 5.25, 7.18, 7.58]
    assert round(reached(V3, 8, False), 2) == 5.25
    rng = np.random.default_rng(0)
    for devices, rows in ((8, 128), (16, 64), (64, 128)):
        exchange = Exchange(devices, 1, 1.5)
        groups = np.argsort(rng.random((devices, rows, 8)))[..., :4]
        scores = rng.random((devices, rows, 4, 32))
        best = np.argsort(scores.reshape(devices, rows, -1))[..., :8]
        ids = np.take_along_axis(groups, best // 32, axis=-1) * 32 + best % 32
        wanted = jax.jit(jax.vmap(lambda i, e=exchange, n=devices: e.wanted(i, 256 // n).sum(0).max()))
        most = int(wanted(ids).max())
        assert most <= exchange.capacity(rows, V3, neighbours=True) < rows


@pytest.mark.parametrize(
    ("shards", "size"),
    [
        ([[0, 0]] * 4, 4),
        ([[0], [0], [1], [1]], 2),
        ([[0, 0], [1, 1]], 1),
        ([[0], [1], [0], [1]], 1),  # not neighbours
        ([[0, 1], [2, 3]], 1),  # shards of several hosts
        ([[0], [0], [0], [1]], 1),  # not alike
    ],
)
def test_hosts_are_domains(shards, size):
    devices = np.array([[SimpleNamespace(process_index=h) for h in shard] for shard in shards])
    assert shards_of_a_host(devices) == size


def test_between_hosts_rows_go_where_their_experts_are(monkeypatch):
    mesh = make_mesh(4, 2)
    assert exchange_of("auto", 1.5, mesh) is None
    assert exchange_of("all_to_all", 1.5, mesh) == Exchange(4, 1, 1.5)
    monkeypatch.setattr(exchanges, "shards_of_a_host", lambda _: 2)
    assert exchange_of("auto", 1.5, mesh) == Exchange(4, 2, 1.5)
    assert exchange_of("gather", 1.5, mesh) is None


def test_one_shard_has_nothing_to_exchange():
    for mesh in (None, make_mesh(1, 8)):
        assert exchange_of("auto", 1.5, mesh) is None
        with pytest.raises(ConfigError, match="data axis is 2 or more"):
            exchange_of("all_to_all", 1.5, mesh)
    with pytest.raises(ConfigError, match="expert_exchange = 'all_to_all' with no mesh"):
        make_engine(expert_exchange="all_to_all")
    with pytest.raises(ConfigError, match="expert_exchange = 'best'"):
        make_engine(expert_exchange="best")
