"""Experts and router: every way to run the experts agrees with plain numpy, as does the router."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.router import reference
from kernels_pallas.router.rule import Rule
from mtp_jax.model import moe
from mtp_jax.model.backend import Backend, xla, xla_cpu
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.experts import cpu as cpu_experts
from mtp_jax.model.experts import cpu_router
from mtp_jax.model.experts.plain import OwnExperts, rule_of
from mtp_jax.model.moe import Routing
from mtp_jax.model.params import Mlp, Moe
from tests.compiling import AS_FOR_USERS
from tests.models import TINY, apart
from tests.rounding import near

E, D, WIDTH, K = 8, 16, 12, 3
GATE_UP, DOWN = (
    np.random.default_rng(i).normal(size=shape).astype(np.float32) / 4
    for i, shape in enumerate([(E, 2, WIDTH, D), (E, D, WIDTH)])
)


def routed(on: Backend, gate_up: jax.Array, down: jax.Array, x: jax.Array, r: Routing) -> jax.Array:
    return on.experts.routed(OwnExperts(gate_up, down), x, r)


WAYS = {
    "by_pair": cpu_experts.by_pair,
    "by_visit": functools.partial(routed, xla()),
    "sparse": functools.partial(routed, xla_cpu()),
    "dense": functools.partial(moe.dense, product=xla().products.product),
}
ROWS = (1, 5, 200)  # 200 rows of one expert take several tiles


def by_way(way: str, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    return WAYS[way](jnp.asarray(GATE_UP), jnp.asarray(DOWN), x, Routing(ids, weights))


@jax.jit
def by_all(x: jax.Array, ids: jax.Array, weights: jax.Array) -> dict[str, jax.Array]:
    return {way: by_way(way, x, ids, weights) for way in WAYS}


def run(way: str, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(by_all(x, ids, weights)[way])


def plain(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    gate_up: np.ndarray = GATE_UP,
    down: np.ndarray = DOWN,
) -> np.ndarray:
    """All experts of all rows in float64, of which each row takes its own; other ids contribute nothing."""
    gate, up = np.einsum("eghi,ti->gteh", gate_up, x.astype(np.float64), optimize=True)
    every = np.einsum("eoh,teh->teo", down, gate / (1 + np.exp(-gate)) * up, optimize=True)
    inside = (ids >= 0) & (ids < len(down))
    chosen = every[np.arange(len(x))[:, None], np.where(inside, ids, 0)]
    return np.einsum("tk,tko->to", np.where(inside, weights, 0), chosen)


def agree(got: Any, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, *experts: np.ndarray) -> None:
    """Assert that rounding explains the distance from ``plain``.

    The largest partial sum is at most the sum of absolute values; an activation is at most its gate times up.
    """
    gate_up, down = experts or (GATE_UP, DOWN)
    gate, up = np.einsum("eghi,ti->gteh", np.abs(gate_up), np.abs(x), optimize=True)
    size = (
        np.einsum("eoh,teh->teo", np.abs(down), gate * up, optimize=True).max()
        * np.abs(weights).sum(axis=1).max()
    )
    want = plain(x, ids, weights, gate_up, down)
    near(got, want, sum(down.shape[1:]) + ids.shape[1], size=size)


def draw(rows: int, seed: int, pool: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random rows, different experts for each from ``pool``, and weights."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(pool)[:K] for _ in range(rows)]).astype(np.int32)
    return rng.normal(size=(rows, D)).astype(np.float32), ids, rng.random((rows, K)).astype(np.float32)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.sampled_from(ROWS),
    seed=st.integers(0, 2**20),
    # From "all rows to the same experts, the others empty" to "any experts".
    pool=st.integers(K, E).flatmap(lambda n: st.permutations(range(E)).map(lambda p: sorted(p[:n]))),
    outside=st.booleans(),
)
def test_every_way_agrees_with_the_formula(rows, seed, pool, outside):
    """``outside``: some ids belong to other devices."""
    x, ids, weights = draw(rows, seed, pool)
    if outside:
        ids = ids - E // 2
    for way, got in by_all(x, ids, weights).items():
        if way != "dense" or not outside:
            agree(got, x, ids, weights)


@pytest.mark.parametrize("way", ["by_pair", "by_visit"])
@pytest.mark.parametrize("rows", ROWS)
def test_all_rows_to_one_expert(way, rows):
    """The same expert in every place, which no router does: the largest load an expert can have."""
    x, ids, weights = draw(rows, 1, list(range(E)))
    ids[:] = 5
    agree(run(way, x, ids, weights), x, ids, weights)


@pytest.mark.parametrize("way", ["by_pair", "by_visit"])
def test_no_expert_at_all(way):
    x, ids, weights = draw(5, 1, list(range(E)))
    np.testing.assert_array_equal(run(way, x, ids * 0 - 1, weights), np.zeros((5, D)))


@pytest.mark.parametrize("way", ["by_pair", "by_visit"])
@pytest.mark.parametrize("rows", apart([5, 200], 200))
@pytest.mark.parametrize("neighbours", ["others", "nan"])
def test_batch_invariance(way, rows, neighbours):
    """A row's bits do not depend on its neighbours, not even on broken ones."""
    x, ids, weights = draw(rows, 2, list(range(E)))
    other_x, other_ids, other_weights = draw(rows, 3, [1, 4, 6])
    if neighbours == "nan":
        other_x[:], other_weights[:] = np.nan, np.nan
    alone = run(way, x, ids, weights)
    keep = rows // 2
    for a, b in ((x, other_x), (ids, other_ids), (weights, other_weights)):
        a[:keep], a[keep + 1 :] = b[:keep], b[keep + 1 :]
    np.testing.assert_array_equal(run(way, x, ids, weights)[keep], alone[keep])


def test_by_pair_does_not_depend_on_the_number_of_rows():
    """So that a verified window has the bits of plain decoding."""
    x, ids, weights = draw(5, 5, [1, 4, 6])
    by_pair = jax.jit(functools.partial(by_way, "by_pair"), compiler_options=AS_FOR_USERS)  # bits count
    together = by_pair(x, ids, weights)
    for t in range(5):
        alone = np.asarray(by_pair(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]))
        np.testing.assert_array_equal(alone[0], np.asarray(together)[t])


@pytest.mark.parametrize(
    ("hidden", "width"), apart([(384, 96), (2048, 48), (200, 9), (200, 257)], (200, 257))
)
def test_by_pair_in_slices_of_any_width(hidden, width, rng):
    """16 lanes, 32 where there would be too many slices, few where the width is odd, or all of a prime."""
    gate_up = rng.normal(size=(E, 2, width, hidden)).astype(np.float32) / np.sqrt(np.float32(hidden))
    down = rng.normal(size=(E, hidden, width)).astype(np.float32) / np.sqrt(np.float32(width))
    x = rng.normal(size=(2, hidden)).astype(np.float32)
    ids, weights = np.array([[0, 3], [7, 3]]), np.array([[0.5, 1.0], [2.0, 0.25]], np.float32)
    routing = Routing(jnp.asarray(ids), jnp.asarray(weights))
    got = jax.jit(cpu_experts.by_pair)(*map(jnp.asarray, (gate_up, down, x)), routing)
    agree(got, x, ids, weights, gate_up, down)


@pytest.mark.parametrize(("width", "pairs"), [(WIDTH, 8), (8192, 4)])
def test_pairs_apart_while_that_is_the_faster_way(width, pairs, monkeypatch):
    """On a CPU: up to 8 pairs per expert if its weights take at most a MiB, up to 4 of a larger one."""
    monkeypatch.setattr(cpu_experts, "by_pair", lambda *given: jnp.ones_like(given[2]))
    monkeypatch.setattr(moe, "by_visit", lambda *given: jnp.zeros_like(given[2]))
    own = OwnExperts(jnp.zeros((E, 2, width, D)), jnp.zeros((E, D, width)))
    for rows, one in ((E * pairs, 1), (E * pairs + 1, 0)):
        r = Routing(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1)))
        assert xla_cpu().experts.routed(own, jnp.zeros((rows, D)), r)[0, 0] == one


@pytest.mark.rest
def test_low_precision_rows_are_summed_in_float32():
    x, ids, weights = draw(5, 4, list(range(E)))
    gate_up, down, rows = (jnp.asarray(a, jnp.bfloat16) for a in (GATE_UP, DOWN, x))
    routing, want = Routing(jnp.asarray(ids), jnp.asarray(weights)), plain(x, ids, weights)

    @jax.jit
    def low(*given):
        return [way(*given) for way in WAYS.values()]

    for got in low(gate_up, down, rows, routing):
        assert got.dtype == jnp.bfloat16
        # Weights and rows, gate and up, the activation, its product with a weight, the result.
        near(got, want, 7, jnp.bfloat16)


# The router


def plain_route(x, router, bias, cfg) -> tuple[np.ndarray, np.ndarray]:
    """Equations 12-16 of arXiv 2412.19437 with groups, row by row in float64. Returns (ids, weights)."""
    ids, weights = [], []
    for row in x.astype(np.float64):
        scores = 1 / (1 + np.exp(-(router.astype(np.float64) @ row)))
        choice = scores + bias.astype(np.float64)
        groups = choice.reshape(cfg.n_group, -1)
        best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: cfg.topk_group]
        allowed = np.isin(np.arange(len(choice)) // groups.shape[1], best)
        chosen = np.argsort(-np.where(allowed, choice, -np.inf))[: cfg.num_experts_per_tok]
        w = scores[chosen]
        if cfg.norm_topk_prob:
            w = w / (w.sum() + 1e-20)
        ids.append(chosen)
        weights.append(w * cfg.routed_scaling_factor)
    return np.stack(ids), np.stack(weights)


ROUTERS = {
    "groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "one group": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    "all groups": {"n_group": 4, "topk_group": 4, "num_experts_per_tok": 5},
    "not normalised": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "everything": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 16},
}


@functools.partial(jax.jit, static_argnums=(0, 2))
def route(on: Backend, p: Moe, cfg: ModelConfig, x: jax.Array) -> Routing:
    assert p.bias is not None
    logits = on.products.exactly(x.reshape(-1, x.shape[-1]), p.router)
    return on.experts.choose_experts(logits, p.bias, rule_of(cfg))


@pytest.mark.parametrize("name", apart(ROUTERS, "groups", "not normalised", "everything"))
@pytest.mark.parametrize("shift", [0.0, -5.0, 3.0])
def test_router(name, shift, rng):
    """``shift`` moves every bias: scores that are all negative must still beat the groups left out."""
    cfg = replace(TINY, n_routed_experts=16, num_experts_per_tok=2)
    cfg = replace(cfg, **ROUTERS[name])
    x = rng.normal(size=(2, 30, cfg.hidden_size)).astype(np.float32)
    router = (rng.normal(size=(16, cfg.hidden_size)) / 3).astype(np.float32)
    bias = (rng.normal(size=16) * 0.3 + shift).astype(np.float32)
    p = Moe(jnp.asarray(router), jnp.asarray(bias), None, None, None)
    got = jax.device_get(route(xla(), p, cfg, jnp.asarray(x)))
    ids, weights = plain_route(x.reshape(60, -1), router, bias, cfg)
    np.testing.assert_array_equal(got.ids, ids)
    # Scores are sums over the hidden state; a weight is a quotient of one by the sum of the chosen scores.
    scores = np.abs(x).reshape(60, -1) @ np.abs(router).T
    near(got.weights, weights, cfg.hidden_size, size=scores.max() * weights.max())


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("counts", apart([True, False], True))
def test_choice_by_comparisons(name, counts, rng):
    """The same ids and weights as by ``top_k``: of few values, so that many scores are equal."""
    cfg = replace(TINY, **{"n_routed_experts": 16, **ROUTERS[name]})
    logits = rng.integers(-2, 3, size=(40, 16)).astype(np.float32)
    bias = (rng.integers(-1, 2, size=16) / 8).astype(np.float32)
    counted = rng.random(40) < 0.7 if counts else None

    @jax.jit
    def both(logits, bias, counted):
        return [way(logits, bias, rule_of(cfg), counted) for way in (cpu_router.choose, reference.choose)]

    got, want = both(logits, bias, counted)
    np.testing.assert_array_equal(got[0], want[0])
    near(got[1], want[1], cfg.num_experts_per_tok + 2)  # the sum of the chosen, a quotient, a factor


def test_choice_of_a_row_of_nan():
    """It is reported elsewhere; here it must choose experts that there are, and leave other rows alone."""
    logits = np.zeros((2, 16), np.float32)
    logits[0] = np.nan
    choose = jax.jit(cpu_router.choose, static_argnums=2)
    ids, weights = map(np.asarray, choose(logits, np.zeros(16, np.float32), Rule(4, 4, 2)))
    assert np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < 16))
    np.testing.assert_array_equal(ids[1], range(4))
    assert np.isfinite(weights[1]).all()


def test_router_computes_in_float32_whatever_the_model_does(rng):
    p = Moe(jnp.asarray(rng.normal(size=(8, 32)), jnp.float32), jnp.zeros(8), None, None, None)
    low = rng.normal(size=(1, 9, 32)).astype(jnp.bfloat16)
    got, want = (route(xla_cpu(), p, TINY, jnp.asarray(x)) for x in (low, low.astype(np.float32)))
    assert got.weights.dtype == jnp.float32
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.weights, want.weights)


@pytest.mark.parametrize("shared", apart([True, False], True))
def test_the_shared_expert_comes_beside_the_routed_ones(shared, rng):
    cfg = replace(TINY, hidden_size=D, n_routed_experts=E)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)

    mlp = Mlp(array(2, WIDTH, D), array(D, WIDTH)) if shared else None
    p = Moe(array(E, D), array(E), jnp.asarray(GATE_UP), jnp.asarray(DOWN), mlp)
    x = array(2, 3, D)
    got, routing = jax.jit(xla().experts.moe, static_argnums=1)(p, cfg, x)
    assert len(got) == 1 + shared
    ids, weights = np.asarray(routing.ids).reshape(6, -1), np.asarray(routing.weights).reshape(6, -1)
    rows, got = np.asarray(x).reshape(6, D), [np.asarray(part).reshape(6, D) for part in got]
    agree(got[0], rows, ids, weights)
    if mlp:
        all_rows = np.zeros((6, 1), int), np.ones((6, 1))
        agree(got[1], rows, *all_rows, np.asarray(mlp.gate_up)[None], np.asarray(mlp.down)[None])
