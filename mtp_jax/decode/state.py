"""Everything that lives on the device between steps: one donated pytree.

Invariant *committed length*: whatever lies in the cache past a slot's ``length`` is garbage and harmless, so
the rollback of rejected drafts is only a length.

Invariant *warm draft cache*: the NextN cache is extended for every committed token, at every depth, so that
drafting can begin at any step. Steps without drafts put their rows off, ``BACKLOG`` at most, and ``catch_up``
writes them before any other program runs. Rows are indexed by the token: row j of layer 0 holds the pair
(h_{j-1}, t_j), row j of layer k the pair (z_{k-1} of row j-1, t_j), so rows 0..k of layer k do not exist.
Like the trunk's cache it ends before the newest token.

Invariant *page tails*: what a full page holds, in every cache, depends on the tokens up to its end alone. Its
tail holds the hidden states that the next NextN rows merge, so a sequence that begins with cached pages goes
on, drafting too, as if it had computed them. It is written with the page's last row.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.sampling import SamplingState, neutral_state
from mtp_jax.errors import ConfigError
from mtp_jax.model.cache import LayerCache, empty_cache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import type_of
from mtp_jax.model.sharding import data_size, partition

Tree = TypeVar("Tree")

# Steps without drafts after which the NextN rows that they put off must be written.
BACKLOG = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The rows of the decode batch. First axis of every field: slots.

    Attributes:
        length: committed length: rows of the trunk's cache that count; also the position of ``newest``.
        newest: the last emitted token, not yet in the trunk's cache.
        active: whether steps advance the slot; a finished slot switches itself off.
        remaining: tokens the slot may still emit.
        generated: tokens emitted so far.
        depth: most drafts the slot's request wants verified per step.
        page_table: pages in order, local to the slot's data shard; the spare last page where unallocated.
        carry: what the NextN row after the written ones merges, by layer: the trunk's hidden state of the
            last token that has one for layer 0, z_{k-1} of it for layer k.
        sampling: what the request asks of the sampler.
    """

    length: Int[Array, " B"]
    newest: Int[Array, " B"]
    active: Bool[Array, " B"]
    remaining: Int[Array, " B"]
    generated: Int[Array, " B"]
    depth: Int[Array, " B"]
    page_table: Int[Array, "B n"]
    carry: Float[Array, "B k D"]
    sampling: SamplingState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Backlog:
    """Committed tokens whose NextN rows are put off: the last ones of each slot, in order.

    Attributes:
        tokens: W = ``BACKLOG`` of them, or none without NextN layers.
        hidden: the trunk's hidden states of them.
        count: how many of them there are; the others are garbage.
    """

    tokens: Int[Array, "B W"]
    hidden: Float[Array, "B W D"]
    count: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Latent cache, page tails, slots, and what steps put off.

    Attributes:
        trunk, nextn: the paged cache of each layer.
        tails: [P, 1, k * D].
    """

    trunk: tuple[LayerCache, ...]
    nextn: tuple[LayerCache, ...]
    tails: Any
    slots: Slots
    backlog: Backlog


@dataclass(frozen=True)
class StateShape:
    """Sizes of a ``State``. ``columns`` is the width of the page table.

    ``pages`` are per data shard and can be handed out; each shard has one more, for rows nobody wants.
    """

    slots: int
    pages: int
    page_size: int
    columns: int


def abstract_state(
    cfg: ModelConfig, shape: StateShape, dtype: str, mesh: Mesh | None, fp8_cache: bool = False
) -> State:
    """The state's shapes, dtypes and shardings, without allocating it."""
    pages, layers = (shape.pages + 1) * data_size(mesh), cfg.num_nextn_predict_layers

    def zeros() -> State:
        cache = empty_cache(pages, shape.page_size, cfg, type_of[dtype], fp8=fp8_cache)
        number = jnp.zeros(shape.slots, jnp.int32)
        slots = Slots(
            length=number,
            newest=number,
            active=jnp.zeros(shape.slots, bool),
            remaining=number,
            generated=number,
            depth=number,
            page_table=jnp.zeros((shape.slots, shape.columns), jnp.int32),
            carry=jnp.zeros((shape.slots, layers, cfg.hidden_size), type_of[dtype]),
            sampling=neutral_state(shape.slots, cfg.vocab_size),
        )
        tails = jnp.zeros((pages, 1, layers * cfg.hidden_size), type_of[dtype])
        tokens = jnp.zeros((shape.slots, BACKLOG if layers else 0), jnp.int32)
        hidden = jnp.zeros((*tokens.shape, cfg.hidden_size), type_of[dtype])
        backlog = Backlog(tokens, hidden, number)
        return State((cache,) * cfg.num_hidden_layers, (cache,) * layers, tails, slots, backlog)

    state = jax.eval_shape(zeros)
    if mesh is None:
        return state
    over_data = NamedSharding(mesh, partition("slots"))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=over_data), state)


def memory_size() -> int:
    """Bytes of memory that this computer has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def empty_state(abstract: State) -> State:
    """A zeroed state of these shapes: no slot is active. Raises ConfigError.

    A GPU refuses what it has no room for; a computer ends the process, later, once the memory is written.
    """
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(abstract))
    if jax.default_backend() == "cpu" and size > (memory := memory_size()):
        raise ConfigError(
            f"the cache takes {size / 2**30:,.1f} GiB, this computer has {memory / 2**30:,.1f}; lower "
            "num_pages, max_num_seqs or max_model_len"
        )
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), abstract)


def first_slots(slots: Tree, count: int) -> Tree:
    """The first ``count`` slots."""
    return jax.tree.map(lambda a: a if a.shape[0] == count else a[:count], slots)


def put_first_slots(slots: Tree, part: Tree) -> Tree:
    """``slots`` with the first ones replaced by ``part``."""

    def put(a: Array, b: Array) -> Array:
        return b if a.shape[0] == b.shape[0] else jax.lax.dynamic_update_slice_in_dim(a, b, 0, axis=0)

    return jax.tree.map(put, slots, part)


def admit(state: State, slot: Int[Array, ""], row: Slots, tail: Int[Array, ""]) -> State:
    """Put one request's row (first axis 1) into ``slot``; it goes on from the tail of page ``tail``."""
    carry = jax.lax.dynamic_index_in_dim(state.tails, tail, axis=0)
    row = replace(row, carry=carry.reshape(row.carry.shape))

    def put(a: Array, b: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(a, b.astype(a.dtype), slot, axis=0)

    return replace(state, slots=jax.tree.map(put, state.slots, row))


def move(state: State, source: Int[Array, ""], target: Int[Array, ""]) -> State:
    """Let the request in slot ``source`` go on in slot ``target``."""

    def put(a: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(a, source, 1)
        return jax.lax.dynamic_update_slice_in_dim(a, row, target, axis=0)

    slots = jax.tree.map(put, state.slots)
    return replace(state, slots=replace(slots, active=slots.active.at[source].set(False)))


def update(state: State, keep: Bool[Array, " B"], page_table: Int[Array, "B n"]) -> State:
    """Switch off the slots whose requests the host ended or preempted, and give the others further pages."""
    slots = replace(state.slots, active=state.slots.active & keep, page_table=page_table)
    return replace(state, slots=slots)


def mask_row(ids: Iterable[int], vocab: int) -> Any:
    """A bool [1, V] row that is True at ``ids``."""
    row = np.zeros((1, vocab), bool)
    row[0, list(ids)] = True
    return row
