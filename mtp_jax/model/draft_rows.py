"""The tokens that drafts choose among, where these are a part of the vocabulary.

An EAGLE-3 head has a table of its own for the tokens that it drafts (``d2t``). Drafts that share the trunk's
table may read the rows of its commonest tokens alone (FR-Spec, arXiv 2502.14856): a copy, as rows that lie
together are read at full speed. Either way logits come back at their tokens' ids and are -inf
elsewhere, so transforms, grammars and verifiers see one vocabulary, and verification keeps every token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from mtp_jax.errors import ConfigError
from mtp_jax.model.backend import Backend
from mtp_jax.model.narrow import Table, readable, with_bits, without_bits
from mtp_jax.model.params import DraftRows, Params
from mtp_jax.model.sharding import constrain, partition, ways

# Rows are a multiple of this number: loops of a CPU tile 64 rows, products of a GPU 128.
_UNIT = 128


def ids_of(offsets: Int[Array, " n"]) -> Int[Array, " n"]:
    """The tokens of a head's rows: row i is token i + offsets[i] (``d2t``)."""
    return jnp.arange(len(offsets)) + offsets


def places_of(ids: Int[Array, " n"], vocab: int) -> Int[Array, " V"]:
    """The row of each token of the vocabulary, of a table with the tokens ``ids``; n where it has none."""
    count = len(ids)
    return jnp.full(vocab, count, jnp.int32).at[ids].set(jnp.arange(count, dtype=jnp.int32))


def at_ids(logits: Float[Array, "*b n"], places: Int[Array, " V"]) -> Float[Array, "*b V"]:
    """Logits of rows, each at its token's id; -inf for tokens without a row, whose place is past the rows.

    A gather, whose result lies over devices as the places do.
    """
    return jnp.take(logits, places, axis=-1, mode="fill", fill_value=-jnp.inf)


def draft_logits(
    params: Params, own: Table | None, z: Float[Array, "*b D"], on: Backend
) -> Float[Array, "*b V"]:
    """Draft logits, float32, from normed states.

    own: the drafter's output table; None: it shares the trunk's, or the part ``params.draft_rows`` of it.
    """
    if own is not None:
        return on.products.head(z, own)
    if (rows := params.draft_rows) is None:
        return on.products.head(z, params.table)
    logits = on.products.head(z, rows.table)
    return at_ids(constrain(logits, on.mesh, "slots", *(None,) * (logits.ndim - 1)), rows.places)


def shares_table(params: Params) -> bool:
    """Whether drafts have no output table of their own."""
    if params.drafter is not None:
        return params.drafter.head is None
    return bool(params.nextn) and all(p.head is None for p in params.nextn)


def with_draft_rows(params: Params, ids: Sequence[int], mesh: Mesh | None) -> Params:
    """The parameters with a copy of the rows of these tokens, split over devices as the trunk's table is.

    The last token's row may be there several times: the number of rows is a multiple of ``_UNIT`` on every
    device. Parameters may be shapes alone. Raises ConfigError for drafts that have a table of their own.
    """
    if not shares_table(params):
        raise ConfigError(
            f"draft_vocab has {len(ids)} tokens, but the drafts of this model have an output table of their "
            "own; leave it out: only drafts that share the model's table read a part of it"
        )
    order = np.sort(np.asarray(ids, np.int32))
    unit = _UNIT * ways("vocab", mesh)
    padded = np.pad(order, (0, -len(order) % unit), mode="edge")
    places = np.full(params.table.shape[0], len(padded), np.int32)
    places[order] = np.arange(len(order))
    where = None if mesh is None else NamedSharding(mesh, partition("vocab", None))
    take = jax.jit(lambda a: jnp.take(a, padded, axis=0), out_shardings=where)

    def rows(a: Any) -> Any:
        if isinstance(a, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(padded), *a.shape[1:]), a.dtype, sharding=a.sharding)
        if mesh is None and jax.default_backend() == "cpu":
            return jax.device_put(np.take(np.asarray(a), padded, axis=0))  # which compiles nothing
        return take(a)

    whole = params.table
    abstract = isinstance(jax.tree.leaves(whole)[0], jax.ShapeDtypeStruct)
    if abstract or not readable(whole):
        table = jax.tree.map(rows, whole)
    else:
        table = with_bits(jax.tree.map(rows, without_bits(whole)))
    return replace(params, draft_rows=DraftRows(table, _whole(places, mesh, abstract)))


def _whole(places: np.ndarray, mesh: Mesh | None, abstract: bool) -> Any:
    """The places on the devices, split as logits are; abstract: their shape alone."""
    where = None if mesh is None else NamedSharding(mesh, partition("vocab"))
    if abstract:
        return jax.ShapeDtypeStruct(places.shape, places.dtype, sharding=where)
    if where is None:
        return jax.device_put(places)  # which compiles nothing
    return jax.make_array_from_callback(places.shape, where, lambda index: places[index])
