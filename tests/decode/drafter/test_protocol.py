"""What the step asks of drafters, and what it refuses of them. Nothing is compiled: shapes tell."""

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.decode.bookkeeping import abstract_state, move
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Drafter, Drafts
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.suffix import Suffix, _replaced
from mtp_jax.decode.keys import EXTRA_COLUMNS, Drafting, SamplingMode, StepKey, Verifier
from mtp_jax.decode.law import Law
from mtp_jax.decode.result import StepResult
from mtp_jax.decode.state import State, StateShape, put_slots, take_slots
from mtp_jax.decode.step import Step
from mtp_jax.errors import ConfigError
from mtp_jax.heads.build import build
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.nextn import NextNLayers
from mtp_jax.model.trunk import Model
from tests.decode.helpers import zeroed
from tests.decode.planted import LENGTH, Planted
from tests.models import TINY, tiny_params

SLOTS = 4


def shapes(
    drafter: Drafter, depth: int = 3, drafting: Drafting | None = None, verifier: Verifier = "block"
) -> tuple[State, State, StepResult]:
    """The shapes of a state, and of the state and the result after a step."""
    model = Model(TINY, xla_cpu(experts="dense"))
    state = abstract_state(model, drafter, StateShape(SLOTS, SLOTS, 16, 1))
    key = StepKey(2, depth, 1, SamplingMode(drafting, verifier))
    return state, *jax.eval_shape(Step(Decoding(model, drafter), key), tiny_params(), state)


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.rest), 5])
@pytest.mark.parametrize("drafting", [None, pytest.param("sampled", marks=pytest.mark.rest)])
@pytest.mark.parametrize("drafter", [build(TINY), Nothing(TINY.vocab_size)], ids=["nextn", "nothing"])
def test_a_step_keeps_the_shape_of_every_state(drafter, drafting, depth):
    before, after, result = shapes(drafter, depth, drafting=drafting)
    assert after == before
    assert result.packed.shape == (2, depth + 1 + EXTRA_COLUMNS)


def test_slots_and_pages_come_first():
    """What lets programs slice a drafter's state, move it and place it on a mesh, whatever it is."""
    own = abstract_state(Model(TINY), build(TINY), StateShape(SLOTS, 7, 16, 1)).drafter
    assert {a.shape[0] for a in jax.tree.leaves(own.slots)} == {SLOTS}
    assert {a.shape[0] for a in jax.tree.leaves(own.pages)} == {7 + 1}


def test_the_layers_decide():
    assert build(TINY) == Recursive(NextNLayers(TINY))
    assert build(TINY.with_nextn(())) == Nothing(TINY.vocab_size)


@pytest.mark.rest
def test_trees_are_steps_of_the_same_shapes():
    planted = Planted(NextNLayers(TINY), texts=((0,) * LENGTH,) * 2)
    for drafter in (planted, Suffix(planted)):
        for before, after, result in (shapes(drafter, 5), shapes(drafter, 5, "sampled", "coupled")):
            assert after == before
            assert result.packed.shape == (2, 6 + EXTRA_COLUMNS)


def test_forced_acceptance_is_of_chains():
    planted = Planted(NextNLayers(TINY), texts=((0,) * LENGTH,) * 2)
    model = Model(TINY, xla_cpu(experts="dense"))
    state = abstract_state(model, planted, StateShape(SLOTS, SLOTS, 16, 1))
    step = Step(Decoding(model, planted, Law((0.5, 0.5, 0.5))), StepKey(2, 3, 1, SamplingMode()))
    with pytest.raises(ConfigError, match="of chains; this drafter makes trees"):
        jax.eval_shape(step, tiny_params(), state)


@pytest.mark.parametrize("verifier", ["block", "rejection"])
def test_sampled_trees_have_one_verifier(verifier):
    planted = Planted(NextNLayers(TINY), texts=((0,) * LENGTH,) * 2)
    with pytest.raises(ConfigError, match=f"'{verifier}' for a tree of drafts.*'coupled'"):
        shapes(planted, 5, "sampled", verifier)


def test_a_match_is_a_chain_in_its_row():
    tokens, parents = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32)
    drafts = Drafts(tokens, tokens[:, 0], tokens[:, 0], None, None, parents)
    found = _replaced(drafts, jnp.array([True, False]), tokens + 1, tokens[:, 0], 3)
    assert found.parents is not None
    assert found.parents.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_streams_that_the_trunk_has_are_handed_on():
    for features in ((2, -1), (0,)):
        shapes(Recursive(NextNLayers(TINY, features=features)))
    for features in ((3, -1), (-3,)):
        with pytest.raises(ConfigError, match=rf"features = \({features[0]}.*of 2 layers.* 0 to 2, -1"):
            shapes(Recursive(NextNLayers(TINY, features=features)))


def test_rows_that_a_drafter_left_alone_are_not_written():
    whole = {"a": jnp.arange(4), "b": jnp.arange(4)}
    part = take_slots(whole, 2)
    changed = put_slots(whole, 2, {"a": part["a"], "b": part["b"] + 10}, part)
    assert changed["a"] is whole["a"]
    assert changed["b"].tolist() == [10, 11, 2, 3]
    rows = {"a": jnp.array([7, 8]), "b": jnp.array([5, 6])}
    after = put_slots(whole, jnp.array([3, 9]), rows, {"a": rows["a"], "b": rows["a"]})
    assert after["a"] is whole["a"]
    assert after["b"].tolist() == [0, 1, 2, 5]


def test_a_drafters_rows_move_with_their_slot():
    state = zeroed(abstract_state(Model(TINY), build(TINY), StateShape(SLOTS, SLOTS, 16, 1)))
    state.drafter.slots.pending[3], state.drafter.slots.count[3] = 2, 5
    moved = jax.jit(move)(state, 3, 1)
    assert (moved.drafter.slots.pending[1] == 2).all()
    assert moved.drafter.slots.count.tolist() == [0, 5, 0, 5]
