"""Windows and a chunk in one step: what each would have given alone, and every weight is read once."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.sharding import Mesh

from kernels_pallas.grouped_matmul.layout import group_rows
from mtp_jax.decode.arrays import Chunk
from mtp_jax.decode.bookkeeping import abstract_state, empty_state
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.keys import ACCEPTED, COUNT, DRAFTED, EXTRA_COLUMNS, FINISH, Finish, SamplingMode, StepKey
from mtp_jax.decode.result import StepResult
from mtp_jax.decode.state import State, StateShape
from mtp_jax.decode.step import Step
from mtp_jax.heads.build import build
from mtp_jax.model import trunk
from mtp_jax.model.attention.cpu import CpuLatent
from mtp_jax.model.attention.source import Paged
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.cache import PagedView
from mtp_jax.model.config import MlaConfig, ModelConfig
from mtp_jax.model.experts.cpu import CpuExperts
from mtp_jax.model.parts import join, split
from mtp_jax.model.sharding import make_mesh
from mtp_jax.model.trunk import Model
from mtp_jax.model.visible import chain
from tests.models import TINY, on_mesh, prompts, tiny_params
from tests.rounding import largest_logit, near, of_model

SLOTS, DEPTH, PAGES, SIZE, TOKENS = 4, 3, 3, 16, 16
DRAFTER = build(TINY)
RUNNING = prompts(2, shortest=9)
LATER = prompts(2, shortest=19, seed=8)
SAMPLED = SamplingMode("sampled", "block", logprobs=5)


def begun(mesh: Mesh | None, depths: tuple[int, ...] = (3, 2, 3, 2), cfg: ModelConfig = TINY) -> State:
    """Each slot has pages, and verifies so many drafts."""
    shape = StateShape(SLOTS, SLOTS * PAGES, SIZE, PAGES)
    state = empty_state(abstract_state(Model(cfg, xla_cpu(mesh)), build(cfg), shape))
    shards = 1 if mesh is None else mesh.shape["data"]
    slot = np.arange(SLOTS, dtype=np.int32)
    table = slot[:, None] % (SLOTS // shards) * PAGES + np.arange(PAGES, dtype=np.int32)
    slots, sampling = state.slots, state.slots.sampling

    def put(old: jax.Array, new: Any) -> jax.Array:
        return jax.device_put(np.broadcast_to(new, old.shape).astype(old.dtype), old.sharding)

    asked = {"temperature": 1 - slot % 2, "seed": slot, "top_p": 1, "repetition": 1}
    slots = slots.replace(
        page_table=put(slots.page_table, table),
        remaining=put(slots.remaining, 100),
        depth=put(slots.depth, depths),
        sampling=replace(sampling, **{name: put(getattr(sampling, name), v) for name, v in asked.items()}),
    )
    return state.replace(slots=slots)


def chunk_of(slots: tuple[int, ...], texts: list[list[int]], start: int) -> Chunk:
    """The next tokens of these slots' prompts; slot ``SLOTS`` is idle."""
    parts = [text[start : start + TOKENS] for text in texts]
    tokens, targets = np.zeros((len(slots), TOKENS), np.int32), np.full((len(slots), TOKENS), -1, np.int32)
    for row, following, part, text in zip(tokens, targets, parts, texts, strict=True):
        row[: len(part)] = part
        after = text[start + 1 : start + 1 + len(part)]
        following[: len(after)] = after
    count = np.array([len(p) for p in parts], np.int32)
    begin = np.where(count > 0, start, 0).astype(np.int32)
    final = np.array([n > 0 and start + n == len(t) for n, t in zip(count, texts, strict=True)])
    words = np.full((len(slots), -(-TINY.vocab_size // 32)), 2**32 - 1, np.uint32)
    follows = np.full(len(slots), -1, np.int32)
    return Chunk(np.array(slots, np.int32), begin, count, final, tokens, targets, follows, words)


def tokens_of(result: StepResult, rows: slice) -> list[list[int]]:
    packed = np.asarray(result.packed)[rows]
    return [row[: row[COUNT - EXTRA_COLUMNS]].tolist() for row in packed]


def close(got: Any, want: Any) -> None:
    """Log-probabilities, which are differences of logits, and ids."""
    size = largest_logit(tiny_params(), TINY)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        near(a, b, of_model(TINY, PAGES * SIZE), size=size)


@pytest.mark.parametrize(
    ("mode", "halves", "mesh_shape"),
    [
        pytest.param(SAMPLED, False, None, marks=pytest.mark.rest),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (SamplingMode(), False, None),
                (SamplingMode(), False, (2, 2)),
                (SamplingMode(), True, None),
                (SamplingMode(), True, (2, 2)),
                (SAMPLED, False, (2, 2)),
                (SAMPLED, True, None),
                (SAMPLED, True, (2, 2)),
            )
        ),
    ],
)
def test_what_runs_together_is_what_runs_apart(mode, halves, mesh_shape):
    """Slots 0 and 2 draft and verify while the prompts of 1 and 3 are read, in two chunks."""
    mesh = None if mesh_shape is None else make_mesh(*mesh_shape)
    params = tiny_params() if mesh is None else on_mesh(tiny_params(), mesh)
    model = Model(TINY, xla_cpu(mesh))
    step = Step(Decoding(model, DRAFTER), StepKey(SLOTS, DEPTH, PAGES, mode, TOKENS, 2, 5))
    whole, first, second = map(jax.jit, (step, step.draft, step.verify))
    steps, alone = (
        jax.jit(Step(Decoding(model, DRAFTER), key))
        for key in (StepKey(SLOTS, DEPTH, PAGES, mode), replace(step.key, slots=0, depth=0))
    )
    everything = np.full((SLOTS, DEPTH + 1, -(-TINY.vocab_size // 32)), 2**32 - 1, np.uint32)

    def together(state: State, chunk: Chunk) -> tuple[State, StepResult]:
        if not halves:
            return whole(params, state, chunk)
        state, drafts = first(params, state, everything)
        return second(params, state, drafts, everything, chunk)

    state, _ = alone(params, begun(mesh), chunk_of((0, 2), RUNNING, 0))
    both = apart = state
    accepted = 0
    for start in (0, TOKENS):
        chunk = chunk_of((1, 3), LATER, start)
        both, got = together(both, chunk)
        apart, stepped = steps(params, apart)
        apart, filled = alone(params, apart, chunk)
        packed, width = np.asarray(got.packed), DEPTH + 1
        np.testing.assert_array_equal(packed[:SLOTS], stepped.packed)
        np.testing.assert_array_equal(packed[SLOTS:, 0], filled.packed[:, 0])
        np.testing.assert_array_equal(packed[SLOTS:, 1:width], -1)
        np.testing.assert_array_equal(packed[SLOTS:, width:], filled.packed[:, 1:])
        assert (packed[[0, 2], width + COUNT] >= 1).all(), "every running row emits"
        assert (packed[[1, 3], width + COUNT] == 0).all()
        assert packed[[0, 2], width + DRAFTED].tolist() == [3, 3]
        assert (packed[:, width + FINISH] == Finish.RUNNING).all()
        accepted += packed[:SLOTS, width + ACCEPTED].sum()
        assert got.prompt is not None
        assert filled.prompt is not None
        close(got.prompt, filled.prompt)
        if mode.logprobs is not None:
            assert got.logprobs is not None
            close(jax.tree.map(lambda a: a[:SLOTS], got.logprobs), stepped.logprobs)
            close(jax.tree.map(lambda a: a[SLOTS:, :1], got.logprobs), filled.logprobs)
    assert tokens_of(got, slice(SLOTS, None)) == tokens_of(filled, slice(None)) != [[], []]
    assert accepted > 0
    # What they leave behind is the same, too: the next step, over all four rows, goes on alike.
    (_, one), (_, other) = steps(params, both), steps(params, apart)
    np.testing.assert_array_equal(one.packed, other.packed)
    assert (np.asarray(one.packed)[:, DEPTH + 1 + COUNT] >= 1).all()


def test_parts_are_joined_shard_by_shard():
    mesh = make_mesh(2, 1)

    def joined(one: jax.Array, other: jax.Array) -> Any:
        rows = join([one, other], mesh)
        return rows, split(rows, [(4, 3), (2, 5)], mesh)

    one, other = np.arange(4 * 3).reshape(4, 3), 100 + np.arange(2 * 5).reshape(2, 5)
    rows, (first, second) = jax.jit(joined)(one, other)
    np.testing.assert_array_equal(rows[0], [*range(6), *range(100, 105)])
    np.testing.assert_array_equal(rows[1], [*range(6, 12), *range(105, 110)])
    np.testing.assert_array_equal(first, one)
    np.testing.assert_array_equal(second, other)


def test_every_weight_is_read_once():
    """A product with each of the trunk's and the head's is there once in a step that takes a chunk."""

    def products(slots: int, chunk: Chunk | None) -> dict[str, int]:
        step = Step(Decoding(Model(TINY, xla_cpu()), DRAFTER), StepKey(slots, 0, PAGES, SamplingMode()))
        lowered = jax.jit(step).lower(tiny_params(), begun(None), chunk)
        weights = {
            "head": (TINY.vocab_size, TINY.hidden_size),
            "queries": (TINY.q_lora_rank, TINY.hidden_size),
            "latents": (TINY.row.width, TINY.hidden_size),
        }
        lines = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
        return {
            name: sum(f"(tensor<{out}x{inner}xf32>," in line for line in lines)  # the weight comes first
            for name, (out, inner) in weights.items()
        }

    chunk, layers = chunk_of((1, 3), LATER, 0), TINY.num_hidden_layers
    both, windows, filling = products(SLOTS, chunk), products(SLOTS, None), products(0, chunk)
    for name, count in (("head", 1), ("queries", layers)):
        assert windows[name] == filling[name] == both[name] == count
    # NextN entries are written part by part; a step without drafts and without a chunk defers its own.
    found = windows["latents"], filling["latents"], both["latents"]
    assert found == (layers, layers + 1, layers + 2)


@dataclass(frozen=True)
class Visits(CpuExperts):
    """Notes, in order, the experts that rows visit."""

    noted: list[np.ndarray] = field(default_factory=list, compare=False)

    def routed(self, own, x, r, limit=None):
        jax.debug.callback(self.noted.append, r.ids, ordered=True)
        return super().routed(own, x, r, limit)


@dataclass(frozen=True)
class Seeing(CpuLatent):
    """Notes, in order, how many tokens of each slot see anything."""

    noted: list[np.ndarray] = field(default_factory=list, compare=False)

    def attend(self, q, w, source, scale):
        assert isinstance(source, Paged)
        jax.debug.callback(self.noted.append, source.view.visible.count, ordered=True)
        return super().attend(q, w, source, scale)


@pytest.mark.rest
def test_rows_past_their_slots_depth_cost_nothing():
    """Neither an expert's weights, nor a tile of its kernel, nor attention, in any pass of the step."""
    cfg = replace(TINY, n_routed_experts=32, nextn_moe=(True,))
    params, drafter = tiny_params(cfg), build(cfg)
    plain, mode = xla_cpu(), SamplingMode()
    visits, seeing = Visits(plain.products), Seeing(plain.products)
    on = replace(plain, experts=visits, kinds=FrozenDict({**plain.kinds, MlaConfig: seeing}))
    first = jax.jit(Step(Decoding(Model(cfg, xla_cpu()), drafter), StepKey(0, 0, PAGES, mode)))
    counted = jax.jit(Step(Decoding(Model(cfg, on), drafter), StepKey(SLOTS, DEPTH, PAGES, mode)))
    texts = prompts(SLOTS, shortest=4, seed=2)

    def run(depths: tuple[int, ...]) -> tuple[list[np.ndarray], list[np.ndarray], list[list[int]]]:
        state, _ = first(params, begun(None, depths, cfg), chunk_of(tuple(range(SLOTS)), texts, 0))
        visits.noted.clear()
        seeing.noted.clear()
        _, result = counted(params, state)
        jax.effects_barrier()
        return (
            [*map(np.asarray, visits.noted)],
            [*map(np.asarray, seeing.noted)],
            tokens_of(result, slice(SLOTS)),
        )

    def experts(ids: np.ndarray) -> set[int]:
        return {*ids[ids < cfg.n_routed_experts].tolist()}

    every, _, deep = run((3, 3, 3, 3))
    some, seen, mixed = run((0, 1, 3, 3))
    # Three drafting passes, one row of a slot each, and the layers of the trunk, of which one has experts.
    expected = [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], *[[1, 2, 4, 4]] * cfg.num_hidden_layers]
    assert [counts.tolist() for counts in seen] == expected
    pairs = [cfg.num_experts_per_tok * sum(rows) for rows in expected[: DEPTH + 1]]
    assert [int((ids < cfg.n_routed_experts).sum()) for ids in some] == pairs
    for few, all_of_them in zip(some, every, strict=True):
        assert experts(few) < experts(all_of_them)
        tiles = [int(group_rows(jnp.asarray(ids), 32, 64).tiles.count[0]) for ids in (few, all_of_them)]
        assert tiles == [len(experts(few)), len(experts(all_of_them))]
    assert mixed == [deep[0][:1], deep[1][:2], *deep[2:]]
    assert [len(tokens) for tokens in mixed] == [1, 2, 1, 3]


def test_rows_that_do_not_count_visit_no_expert():
    """Nor do they change what the others give."""
    positions, tokens = np.tile(np.arange(3), (2, 1)), np.arange(5, 11).reshape(2, 3)
    caches = empty_state(abstract_state(Model(TINY), DRAFTER, StateShape(2, 2, SIZE, 1))).trunk

    @jax.jit
    def run(counts: jax.Array) -> Any:
        written = jnp.where(jnp.arange(3) < counts[:, None], positions, -1)
        view = PagedView(jnp.array([[0], [1]]), written, chain(jnp.zeros(2, jnp.int32), counts))
        given = jnp.asarray(tokens), jnp.asarray(positions)
        out = trunk.run(tiny_params(), Model(TINY, xla_cpu()), *given, caches, (view,))
        return out.hidden, out.routing

    (every, (of_all,)), (some, (of_some,)) = run(np.array([3, 3])), run(np.array([2, 0]))
    assert (np.asarray(of_all.ids) >= 0).all()
    np.testing.assert_array_equal(of_some.ids[0, :2], of_all.ids[0, :2])
    assert (np.asarray(of_some.ids[0, 2:]) == TINY.n_routed_experts).all()
    assert (np.asarray(of_some.ids[1]) == TINY.n_routed_experts).all()
    near(some[0, :2], every[0, :2], of_model(TINY, 3))
