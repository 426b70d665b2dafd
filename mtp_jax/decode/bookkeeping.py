"""Bookkeeping of the state: making it empty, admitting and moving requests, reading and writing pages."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int, Shaped

from mtp_jax.decode.arrays import ExpertLayout, SlotRow
from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.expert_counts import no_counts, taken
from mtp_jax.decode.routed import empty_routed
from mtp_jax.decode.sampling import neutral_state
from mtp_jax.decode.state import Slots, State, StateShape
from mtp_jax.errors import ConfigError
from mtp_jax.machine import memory_size
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import empty_cache
from mtp_jax.model.params import Params, type_of
from mtp_jax.model.sharding import data_size, partition
from mtp_jax.model.stack import Stack, each
from mtp_jax.model.trunk import Model


def abstract_state(
    model: Model,
    drafter: Drafter,
    shape: StateShape,
    layout: ExpertLayout | None = None,
    groups: Sequence[int | None] | None = None,
) -> State:
    """The state's shapes, dtypes and shardings, without allocating it.

    layout: the experts whose choices are counted; None: nothing is counted. groups: for each element of
    ``Params.layers`` the number of layers in the stack, or None for a layer alone; None: no layer is stacked.
    """
    cfg, mesh, kind = model.cfg, model.on.mesh, type_of[shape.dtype]
    pages, groups = (shape.pages + 1) * data_size(mesh), groups or [None] * cfg.num_hidden_layers
    firsts = itertools.accumulate((n or 1 for n in groups), initial=0)

    def part(first: int, n: int | None) -> Any:
        cache = empty_cache(pages, shape.page_size, cfg, first, kind, fp8=shape.fp8)
        cache = model.on.kind(cfg).cache(cache, cfg, first, shape.slots, shape.window)
        return cache if n is None else Stack(jax.tree.map(lambda a: jnp.zeros((n, *a.shape), a.dtype), cache))

    def zeros() -> State:
        number = jnp.zeros(shape.slots, jnp.int32)
        slots = Slots(
            length=number,
            newest=number,
            active=jnp.zeros(shape.slots, bool),
            remaining=number,
            generated=number,
            depth=number,
            suffix=jnp.zeros(shape.slots, bool),
            page_table=jnp.zeros((shape.slots, shape.columns), jnp.int32),
            sampling=neutral_state(shape.slots, cfg.vocab_size),
            texts=jnp.zeros((shape.slots, shape.texts), jnp.int32) if shape.texts else None,
        )
        cache = tuple(part(first, n) for first, n in zip(firsts, groups, strict=False))
        counts, own = layout and no_counts(layout, mesh), drafter.empty(shape, pages)
        routed = empty_routed(pages, shape.page_size, cfg) if shape.routed else None
        return State(cache, slots, own, counts, routed)

    state = jax.eval_shape(zeros)
    if mesh is None:
        return state
    over_data = NamedSharding(mesh, partition("slots"))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=over_data), state)


def check_room(abstract: State) -> None:
    """Raise ConfigError where this computer has no room for a state on its CPU.

    A GPU refuses a cache that it has no room for; on a CPU the system kills the process once the memory is
    written.
    """
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(abstract))
    if jax.default_backend() == "cpu" and size > (memory := memory_size()):
        raise ConfigError(
            f"the cache takes {size / 2**30:,.1f} GiB, this computer has {memory / 2**30:,.1f}; lower "
            "num_pages, max_num_seqs or max_model_len"
        )


def empty_state(abstract: State) -> State:
    """A zeroed state of these shapes: no slot is active."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), abstract)


def bytes_per_page(state: State) -> int:
    """Bytes of a page, the trunk's and the drafter's part."""
    parts = each(state.in_pages)
    arrays = ((a, a.shape[len(at) + 1 :]) for tree, at in parts for a in jax.tree.leaves(tree))
    return sum(math.prod(shape) * a.dtype.itemsize for a, shape in arrays)


def admit(
    state: State, slot: Int[Array, ""], request: SlotRow, page: Int[Array, ""], *, drafter: Drafter
) -> State:
    """Put one request's row (first axis 1) into ``slot``; it goes on from the end of ``page``."""
    nothing = jnp.zeros(1, jnp.int32)
    row = Slots(
        length=nothing,
        newest=nothing,
        active=jnp.zeros(1, bool),
        remaining=request.remaining,
        generated=request.generated,
        depth=request.depth,
        suffix=request.suffix,
        page_table=request.page_table,
        sampling=request.sampling,
        texts=request.texts,
    )

    def put(a: Array, b: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(a, b.astype(a.dtype), slot, axis=0)

    slots, own = jax.tree.map(put, state.slots, row), drafter.resume(state.drafter, slot, page)
    return state.replace(slots=slots, drafter=own)


def move(state: State, source: Int[Array, ""], target: Int[Array, ""]) -> State:
    """Let the request in slot ``source`` go on in slot ``target``."""

    def put(a: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(a, source, 1)
        return jax.lax.dynamic_update_slice_in_dim(a, row, target, axis=0)

    slots, *rest = jax.tree.map(put, state.in_slots)
    slots = slots.replace(active=slots.active.at[source].set(False))
    return state.with_slots((slots, *rest))


def update(state: State, keep: Bool[Array, " B"], page_table: Int[Array, "B n"]) -> State:
    """Switch off the slots whose requests the host ended or preempted, and give other slots further pages."""
    slots = state.slots
    return state.replace(slots=slots.replace(active=slots.active & keep, page_table=page_table))


def flush(params: Params, state: State, *, drafter: Drafter, on: Backend) -> tuple[State, Int[Array, ""]]:
    """Write the drafter's deferred entries. The returned number has no meaning.

    Other programs take the state over, so the arrival of the number shows that this program has run.
    """
    own = drafter.flush(params, state.drafter, state.slots, on)
    return state.replace(drafter=own), jnp.zeros((), jnp.int32)


def read_experts(state: State) -> tuple[State, tuple[Int[Array, "L E"], Int[Array, " L"]]]:
    """Return the counts of chosen experts, and reset them."""
    assert state.experts is not None, "nothing is counted"
    zeros, read = taken(state.experts)
    return state.replace(experts=zeros), read


def read_pages(state: State, pages: Int[Array, " n"]) -> list[Shaped[Array, "n ..."]]:
    """Contents of these pages, counted over all shards: the trunk's and the drafter's part, leaf by leaf."""
    parts = each(state.in_pages)
    return [a[(*at, pages)] for tree, at in parts for a in jax.tree.leaves(tree)]


def write_pages(state: State, pages: Int[Array, " n"], data: list[Shaped[Array, "n ..."]]) -> State:
    """The state with ``data``, which ``read_pages`` gave, in these pages. A page given twice takes either."""
    rest = iter(data)

    def written(group: Any) -> Any:
        leaves, tree = jax.tree.flatten(group)
        for _, at in each([group]):
            leaves = [a.at[(*at, pages)].set(next(rest)) for a in leaves]
        return tree.unflatten(leaves)

    return state.with_pages([*map(written, state.in_pages)])
