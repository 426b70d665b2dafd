"""Logits of drafts that choose among a part of the vocabulary, in every form of the table."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.model import backend, nextn
from mtp_jax.model.backend import Backend
from mtp_jax.model.draft_rows import at_ids, ids_of, places_of, with_draft_rows
from mtp_jax.model.narrow import Bf16, with_bits
from mtp_jax.model.params import Params, shapes
from mtp_jax.model.sharding import make_mesh
from tests.models import SMALL, on_mesh, tiny_params
from tests.rounding import near

PARAMS, ON = tiny_params(SMALL), backend.xla_cpu()
IDS = (90, 3, 127, 0, 44)
OUTSIDE = np.setdiff1d(np.arange(SMALL.vocab_size), IDS)


def logits(params: Params, on: Backend = ON) -> np.ndarray:
    z = np.random.default_rng(0).normal(size=(2, SMALL.hidden_size)).astype(np.float32)
    return np.asarray(jax.jit(lambda p: nextn.logits(p, 0, jnp.asarray(z), on))(params))


def narrow() -> Bf16:
    return with_bits(Bf16(jnp.asarray(PARAMS.head, jnp.bfloat16)))


@pytest.mark.parametrize("head", [PARAMS.head, narrow()], ids=["array", "bf16"])
def test_logits_are_those_of_the_whole_table_and_none_elsewhere(head):
    params = replace(PARAMS, head=head)
    whole, part = logits(params), logits(with_draft_rows(params, IDS, None))
    near(part[:, list(IDS)], whole[:, list(IDS)], SMALL.hidden_size)
    assert (part[:, OUTSIDE] == -np.inf).all()


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_rows_are_split_as_the_table_is(shape):
    mesh = make_mesh(*shape)
    split = with_draft_rows(on_mesh(PARAMS, mesh, SMALL), IDS, mesh)
    rows = split.draft_rows
    assert rows is not None
    assert rows.table.sharding.shard_shape(rows.table.shape)[0] == len(rows.table) // shape[1]
    assert rows.places.sharding.shard_shape(rows.places.shape)[0] == SMALL.vocab_size // shape[1]
    part = logits(split, backend.xla_cpu(mesh))
    near(part[:, list(IDS)], logits(PARAMS)[:, list(IDS)], SMALL.hidden_size)
    assert (part[:, OUTSIDE] == -np.inf).all()


@pytest.mark.parametrize("head", [PARAMS.head, narrow()], ids=["array", "bf16"])
def test_shapes_alone_have_rows_of_the_same_shapes(head):
    params = replace(PARAMS, head=head)
    found, made = (with_draft_rows(p, IDS, None) for p in (shapes(params), params))
    assert shapes(found.draft_rows) == shapes(made.draft_rows)


def test_offsets_of_a_heads_own_tokens_are_the_same_places():
    offsets = np.array([4, 2, 5])
    own = np.array([[0.5, -1.0, 2.0]], np.float32)
    ids = ids_of(jnp.asarray(offsets))
    assert ids.tolist() == [4, 3, 7]
    found = np.asarray(at_ids(jnp.asarray(own), places_of(ids, 8)))
    expected = np.full((1, 8), -np.inf)
    expected[0, [4, 3, 7]] = own
    assert np.array_equal(found, expected)


def test_a_layer_with_a_table_of_its_own_is_refused():
    (layer,) = PARAMS.nextn
    with pytest.raises(ConfigError, match="draft_vocab has 5 tokens, but the drafts of this model"):
        with_draft_rows(replace(PARAMS, nextn=(replace(layer, head=PARAMS.head),)), IDS, None)
