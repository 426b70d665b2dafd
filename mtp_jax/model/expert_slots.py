"""Expert slots: more slots than experts, so that often chosen experts lie on several devices.

An array beside the weights (``Moe.copies``), an input of the step, lists the slots of each expert. A new
placement is therefore other values of the same shapes, and nothing is compiled for it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from mtp_jax.errors import ConfigError
from mtp_jax.model.params import Layer, Moe, Params
from mtp_jax.model.placement import copies_of, first_placement
from mtp_jax.model.sharding import partition, sharded

SlotWeights = tuple[Any, Any]
"""gate_up and down of an MoE layer."""


def slots_of(copies: Int[Array, "E c"], ids: Int[Array, "T k"], rows: Int[Array, " T"]) -> Int[Array, "T k"]:
    """The slot in which each row finds each of its experts; -1 where ids name none.

    A row takes the copies of an expert in turn, by its number: all of them hold the same weights.
    """
    inside = (ids >= 0) & (ids < len(copies))
    expert = jnp.where(inside, ids, 0)
    count = (copies >= 0).sum(axis=1)[expert]
    return jnp.where(inside, copies[expert, rows[:, None] % count], -1)


def most_copies(redundant: int, mesh: Mesh) -> int:
    """Columns of ``Moe.copies``: two copies on one device are of no use."""
    return min(1 + redundant, mesh.size)


def moe_layers(params: Params) -> tuple[Moe, ...]:
    """The MoE blocks of the trunk's layers, in order."""
    return tuple(p.moe for p in params.layers if p.moe)


def with_moe_layer(params: Params, number: int, moe: Moe) -> Params:
    """The parameters with this block in the place of one of ``moe_layers``."""
    at = [i for i, p in enumerate(params.layers) if p.moe][number]
    layers = [replace(p, mlp=moe) if i == at else p for i, p in enumerate(params.layers)]
    return replace(params, layers=tuple(layers))


def with_slots(params: Params, redundant: int, mesh: Mesh | None, *, consume: bool = False) -> Params:
    """The parameters with ``redundant`` slots more than experts in every MoE layer of the trunk.

    The NextN layers stay as they are, as few rows use their experts. Parameters that have slots are returned
    unchanged. consume: delete the old experts layer by layer, so that one layer more is all the memory it
    takes. Raises ConfigError.
    """
    moes = moe_layers(params)
    if not redundant or (moes and moes[0].copies is not None):
        return params
    if mesh is None or mesh.size == 1:
        raise ConfigError(
            f"redundant_experts = {redundant} with one device: copies are for balance between devices; give "
            "a mesh, or redundant_experts=0"
        )
    if not moes:
        raise ConfigError(
            f"redundant_experts = {redundant}, but the model has no routed experts; set it to 0"
        )
    experts = moes[0].down.shape[0]
    if (experts + redundant) % mesh.size:
        raise ConfigError(
            f"redundant_experts = {redundant}: {experts + redundant} slots do not divide over {mesh.size} "
            f"devices; add {-(experts + redundant) % mesh.size}"
        )
    placed = first_placement(experts, experts + redundant)
    table = copies_of(placed, experts, most_copies(redundant, mesh))
    where = NamedSharding(mesh, partition("experts")), NamedSharding(mesh, PartitionSpec())

    def copied(weights: SlotWeights) -> tuple[SlotWeights, Array]:
        return jax.tree.map(lambda a: a[placed], weights), jnp.asarray(table)

    spread, layers = jax.jit(copied, out_shardings=where), []
    for layer in params.layers:
        layers.append(_with_slots(layer, spread, consume))
    return replace(params, layers=tuple(layers))


def _with_slots(
    layer: Layer, spread: Callable[[SlotWeights], tuple[SlotWeights, Array]], consume: bool
) -> Layer:
    if not (moe := layer.moe):
        return layer
    (gate_up, down), copies = spread((moe.gate_up, moe.down))
    if consume:
        jax.block_until_ready((gate_up, down))
        for array in jax.tree.leaves((moe.gate_up, moe.down)):
            array.delete()
    return replace(layer, mlp=replace(moe, gate_up=gate_up, down=down, copies=copies))


def move(
    weights: SlotWeights,
    copies: Int[Array, "E c"],
    source: Int[Array, ""],
    target: Int[Array, ""],
    *,
    mesh: Mesh,
) -> tuple[SlotWeights, Int[Array, "E c"]]:
    """Copy the expert in slot ``source`` into slot ``target``. Returns an MoE layer's weights and ``copies``.

    The slots may lie on any two devices. One expert travels, bit by bit: a sum of integers of which all but
    one are zero.
    """

    def local(weights: SlotWeights, source: Array, target: Array) -> SlotWeights:
        device = jax.lax.axis_index(("data", "model"))

        def one(a: Array) -> Array:
            count, kind = len(a), jnp.dtype(f"uint{8 * a.dtype.itemsize}")
            at, to = source - device * count, target - device * count
            here, there = (at >= 0) & (at < count), (to >= 0) & (to < count)
            held = jax.lax.dynamic_index_in_dim(a, jnp.clip(at, 0, count - 1), keepdims=False)
            bits = jax.lax.bitcast_convert_type(held, kind)
            sent = jax.lax.psum(jnp.where(here, bits, 0), ("data", "model"))
            new = jax.lax.bitcast_convert_type(sent, a.dtype)
            return a.at[jnp.where(there, to, count)].set(new, mode="drop")

        return jax.tree.map(one, weights)

    experts, everywhere = partition("experts"), PartitionSpec()
    run = sharded(local, mesh, (experts, everywhere, everywhere), experts)
    return run(weights, source, target), copies
