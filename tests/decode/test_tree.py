"""Trees of drafts: lineages, the walk against a plain one, and whole steps against steps without drafts."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.decode import sampling, tree, verify
from mtp_jax.decode.bookkeeping import abstract_state
from mtp_jax.decode.keys import MAX_DRAFTS, Finish
from mtp_jax.decode.result import emit
from mtp_jax.decode.state import State, StateShape
from mtp_jax.errors import ConfigError
from mtp_jax.heads.build import build
from mtp_jax.model import trunk
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.cache import LayerCache, read_index, read_rows
from mtp_jax.model.config import IndexerConfig
from mtp_jax.model.nextn import NextNLayers
from mtp_jax.model.sharding import make_mesh
from mtp_jax.model.stack import Stack
from tests.decode.helpers import zeroed
from tests.decode.planted import COLUMNS, DEPTH, LENGTH, ROWS, SIZE, Planted, Told, World, beginnings, decode
from tests.models import TINY, gqa
from tests.rounding import largest_logit, near, of_model

INDEX = IndexerConfig(heads=4, dim=8, topk=12, shared=(False, True))
SPARSE = World(replace(TINY, indexer=INDEX, eos_token_ids=()))
FP8 = replace(SPARSE, fp8=True)
PLAIN = World(replace(TINY, eos_token_ids=()))
GQA = World(replace(gqa(), eos_token_ids=()))


def trees(rng: np.random.Generator, rows: int, drafts: int) -> np.ndarray:
    return np.stack([[rng.integers(0, i + 1) for i in range(drafts)] for _ in range(rows)]).astype(np.int32)


def way(parents: np.ndarray, node: int) -> list[int]:
    """The nodes from the root to this one."""
    return [*way(parents, parents[node - 1]), node] if node else [0]


@jax.jit
def lineage_and_depths(parents: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = tree.lineage(parents)
    return bits, tree.depths(bits)


@pytest.mark.parametrize("drafts", [0, 1, 6, MAX_DRAFTS])
def test_lineages(rng, drafts):
    parents = trees(rng, 20, drafts)
    parents[0] = np.arange(drafts)
    bits, depths = map(np.asarray, lineage_and_depths(parents))
    for row in range(20):
        ways = [way(parents[row], node) for node in range(drafts + 1)]
        assert bits[row].tolist() == [sum(1 << n - 1 for n in nodes if n) for nodes in ways]
        assert depths[row].tolist() == [len(nodes) - 1 for nodes in ways]


def test_a_tree_has_as_many_drafts_as_there_are_bits():
    with pytest.raises(ConfigError, match="a tree of 32 drafts; the most is 31"):
        tree.lineage(jnp.zeros((1, 32), jnp.int32))


@pytest.mark.parametrize("drafts", [1, 7, MAX_DRAFTS])
def test_the_walk_is_the_plain_one(rng, drafts):
    rows, vocab = 400, 2  # so few that siblings are often the same token
    parents, count = trees(rng, rows, drafts), rng.integers(0, drafts + 1, rows)
    tokens, target = rng.integers(-1, vocab, (rows, drafts)), rng.integers(-1, vocab, (rows, drafts + 1))
    given: list[Any] = [a.astype(np.int32) for a in (target, tokens, count, parents)]
    got = jax.tree.map(np.asarray, jax.jit(verify.walk)(*given))
    assert got.path is not None
    lengths = []
    for row in range(rows):
        path = [0]
        while True:
            at, wanted = path[-1], target[row, path[-1]]
            children = [
                i + 1 for i in range(count[row]) if parents[row, i] == at and tokens[row, i] == wanted >= 0
            ]
            if not children:
                break
            path.append(children[0])
        assert got.path[row, : len(path)].tolist() == path
        assert (got.accepted[row], got.token[row]) == (len(path) - 1, target[row, path[-1]])
        lengths.append(len(path))
    assert max(lengths) > min(3, drafts)


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_chain_is_a_tree(rng, drafts):
    rows = 200
    tokens, target = rng.integers(-1, 2, (rows, drafts)), rng.integers(-1, 2, (rows, drafts + 1))
    given: list[Any] = [a.astype(np.int32) for a in (target, tokens, rng.integers(0, drafts + 1, rows))]
    chain = np.tile(np.arange(drafts, dtype=np.int32), (rows, 1))
    greedy = jax.jit(verify.greedy)
    want, got = greedy(*given), greedy(*given, parents=chain)
    assert want.path is None
    np.testing.assert_array_equal(got.accepted, want.accepted)
    np.testing.assert_array_equal(got.token, want.token)
    index = np.arange(drafts + 1)
    kept = index <= np.asarray(got.accepted)[:, None]
    assert (np.where(kept, got.path, index) == index).all()


def test_a_node_counts_the_drafts_on_its_way(rng):
    vocab, drafts, rows = 5, 6, 8
    parents, window = trees(rng, rows, drafts), rng.integers(0, vocab, (rows, drafts + 1))
    before = rng.integers(0, 3, (rows, vocab))
    count = jax.jit(sampling.window_counts)
    got = np.asarray(count(before, window, lineage=lineage_and_depths(parents)[0]))
    for row in range(rows):
        for node in range(drafts + 1):
            seen = np.bincount(window[row, way(parents[row], node)[1:]], minlength=vocab)
            np.testing.assert_array_equal(got[row, node], before[row] + seen)
    chain = np.tile(np.arange(drafts, dtype=np.int32), (rows, 1))
    lineage, _ = lineage_and_depths(chain)
    np.testing.assert_array_equal(count(before, window, lineage=lineage), count(before, window))


def test_what_is_on_no_path_ends_nothing():
    """Results that are not finite, and stop tokens, of nodes beside the path; on it they do."""
    state = abstract_state(PLAIN.model, build(PLAIN.cfg), StateShape(4, 4, SIZE, 1)).slots
    s = zeroed(state)
    stops, many = s.sampling.stop_mask.copy(), np.full(4, 99)
    stops[2, 9] = stops[3, 8] = True
    s = s.replace(active=many > 0, remaining=many, sampling=replace(s.sampling, stop_mask=stops))
    path = np.tile([0, 2, 4, 0, 0], (4, 1))  # drafts 1 and 3
    verdict = verify.Verdict(*map(jnp.asarray, (np.full(4, 2), np.full(4, 7), path)))
    drafts = np.tile(np.array([9, 5, 9, 8], np.int32), (4, 1))
    healthy = np.array([[1, 0, 1, 0, 1], [1, 1, 1, 1, 0], [1] * 5, [1] * 5]).astype(bool)
    got = jax.jit(emit)(verdict, drafts, s, healthy)
    assert got.tokens[:, :3].tolist() == [[5, 8, 7], [5, 8, -1], [5, 8, 7], [5, 8, -1]]
    assert got.finish.tolist() == [Finish.RUNNING, Finish.NAN, Finish.RUNNING, Finish.STOP]


# Whole steps


@dataclass
class Run:
    """The same texts without drafts, and with trees; and a function that reads texts (``World.prefill``)."""

    plain: Told
    trees: Told
    state: State
    read: Any


@functools.cache
def run(world: World) -> Run:
    read = world.prefill()
    prompts = beginnings(world)
    state, first = read(prompts)
    begun = [[*p, int(t)] for p, t in zip(prompts, first, strict=True)]
    _, plain = decode(world, build(world.cfg), 0, state, begun)
    known = tuple(tuple([*text, *[0] * LENGTH][:LENGTH]) for text in plain.texts)
    planted = Planted(NextNLayers(world.cfg), texts=known)
    state, told = decode(world, planted, DEPTH, state, begun)
    return Run(plain, told, state, read)


def rows_of(world: World, cache: LayerCache, table: jax.Array) -> list[np.ndarray]:
    seen, row = jnp.ones((ROWS, LENGTH), bool), world.cfg.row
    found = [read_rows(cache, table, seen, jnp.float32, row.e4m3, row.block)]
    return [
        np.asarray(a)
        for a in (*found, *([] if cache.index is None else [read_index(cache, table, jnp.float32)]))
    ]


WORLDS = [
    pytest.param(SPARSE, id="sparse", marks=pytest.mark.rest),
    pytest.param(FP8, id="sparse-fp8", marks=pytest.mark.slow),
    pytest.param(PLAIN, id="plain", marks=pytest.mark.slow),
    pytest.param(GQA, id="gqa", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("world", WORLDS)
def test_trees_change_no_text(world):
    """Greedy rows and rows that draw, under penalties: a seed gives one text with and without trees."""
    found = run(world)
    assert found.trees.accepted > 0.15 * found.trees.drafted
    for row, (got, want) in enumerate(zip(found.trees.texts, found.plain.texts, strict=True)):
        size = min(len(got), len(want))
        assert size > LENGTH // 2
        assert got[:size] == want[:size], row
        count = min(map(len, (found.trees.logprobs[row], found.plain.logprobs[row])))
        trees, plain = (told.logprobs[row][:count] for told in (found.trees, found.plain))
        if world.fp8:  # rounding has moved a value over a boundary, one of all that a sum reads
            near(trees, plain, 1, jnp.float8_e4m3fn, size=(world.cfg.row.width * LENGTH) ** -0.5)
        else:
            size = largest_logit(world.params, world.cfg)
            near(trees, plain, of_model(world.cfg, LENGTH), size=size)


@pytest.mark.parametrize("world", WORLDS)
def test_rows_are_where_a_prefill_leaves_them(world):
    """Every layer has them. All accepted rows were elsewhere, as the first node is never right."""
    found = run(world)
    assert found.trees.accepted > 50
    slots, table = found.state.slots, found.state.slots.page_table
    lengths = np.asarray(slots.length)
    again, _ = found.read([text[:n] for text, n in zip(found.trees.texts, lengths, strict=True)])

    def close(got: np.ndarray, want: np.ndarray) -> None:
        if world.fp8:  # an element is rounded to 3 bits behind the first
            assert np.abs(got - want).max() <= 2**-3 * np.abs(want).max()
        else:
            near(got, want, of_model(world.cfg, LENGTH))

    caches = [(s.trunk, s.drafter.pages.cache) for s in (found.state, again)]
    for got, want in zip(*([*a, *b] for a, b in caches), strict=True):
        pairs = [rows_of(world, cache, table) for cache in (got, want)]
        for mine, other in zip(*pairs, strict=True):
            for row, n in enumerate(lengths):
                close(mine[row, :n], other[row, :n])
    close(*(np.asarray(s.drafter.slots.pending) for s in (found.state, again)))


@pytest.mark.slow
def test_rows_that_stay_where_they_are_would_show(monkeypatch):
    monkeypatch.setattr(trunk, "moved", lambda caches, *_: caches)
    found = run.__wrapped__(SPARSE)
    texts = zip(found.trees.texts, found.plain.texts, strict=True)
    assert any(got[: len(want)] != want[: len(got)] for got, want in texts)


@pytest.mark.rest
def test_rows_move_in_stacks_of_layers_and_on_meshes_as_in_layers(rng):
    pages, layers = COLUMNS + 1, 3

    def pages_of(width: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(pages, SIZE, width)))

    caches = [LayerCache((pages_of(4), pages_of(1)), pages_of(2)) for _ in range(layers)]  # FP8 rows are two
    stack = Stack(jax.tree.map(lambda *a: jnp.stack(a), *caches))
    table = jnp.asarray(rng.permutation(COLUMNS)[None], jnp.int32)
    source, target = jnp.array([[9, 11, 12, 14]]), jnp.array([[-1, 10, 11, 12]])
    on = SPARSE.model.on
    got = trunk.moved((stack, *caches), on, table, source, target)
    assert isinstance(got[0], Stack)
    for i, (cache, alone) in enumerate(zip(caches, got[1:], strict=True)):
        for before, after, mine in zip(*map(jax.tree.leaves, (cache, alone, got[0].tree)), strict=True):
            want = np.asarray(before)[np.asarray(table)[0]].reshape(-1, before.shape[-1])
            want[[10, 11, 12]] = want[[11, 12, 14]]
            np.testing.assert_array_equal(np.asarray(after)[np.asarray(table)[0]].reshape(want.shape), want)
            np.testing.assert_array_equal(mine[i][:-1], after[:-1])
    mesh = make_mesh(data=2, model=1)
    twice = jax.tree.map(lambda a: jnp.concatenate([a, -a]), caches[0])
    given = [jnp.concatenate([a, a]) for a in (table, source, target)]
    split = jax.jit(xla_cpu(mesh).move)(twice, *given)
    for a, b in zip(*map(jax.tree.leaves, (split, got[1])), strict=True):
        np.testing.assert_array_equal(a[:COLUMNS], b[:-1])
        np.testing.assert_array_equal(a[pages:-1], -b[:-1])
