"""The trunk: embedding, decoder blocks, final norm, logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mtp_jax.model import attention as mla
from mtp_jax.model import products
from mtp_jax.model.cache import LayerCache, PagedView, WholeCache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.kernels import AUTO, Kernels
from mtp_jax.model.layers import rms_norm, rope_angles, vocabulary_logits
from mtp_jax.model.moe import Experts, Routing, moe
from mtp_jax.model.moe import takes_quantised as moe_takes_quantised
from mtp_jax.model.ops import Form
from mtp_jax.model.params import Layer, Moe, Params
from mtp_jax.model.sharding import constrain


@dataclass(frozen=True)
class Backend:
    """How a forward pass is carried out; never what it computes.

    Attributes:
        form: MLA form: "naive" (prefill, training) or "absorbed" (decode).
        experts: "dense" or "sparse" (moe.py); with a mesh they always run in parallel.
        mesh: device mesh, None for one device.
        kernels: who computes the operations of products.py.
    """

    form: Form = "naive"
    experts: Experts = "sparse"
    mesh: Mesh | None = None
    kernels: Kernels = AUTO


UNSHARDED = Backend()


@dataclass(frozen=True)
class Traced:
    """A forward pass with what tests and training look at.

    Attributes:
        hidden: after the final norm [B, T, D].
        routing: of every MoE layer, in order.
        caches: those of the layers after the pass; none without a cache.
    """

    hidden: Float[Array, "B T D"]
    routing: tuple[Routing, ...]
    caches: tuple[LayerCache, ...]


def block(
    p: Layer,
    cfg: ModelConfig,
    x: Float[Array, "B W D"],
    added: Sequence[Float[Array, "B W D"]],
    angles: Float[Array, "B W 2 r"],
    cache: LayerCache | WholeCache | None,
    view: PagedView | None,
    on: Backend,
) -> tuple[Float[Array, "B W D"], tuple[Float[Array, "B W D"], ...], Any, Routing | None]:
    """A pre-norm decoder block of x and what the block before adds to it.

    Returns (x, what the next norm adds to it, cache, routing of an MoE block): a norm adds for nothing.
    """
    where: dict[str, Any] = {"mesh": on.mesh, "kernels": on.kernels}
    readers = mla.takes_quantised(p.attention, x.dtype, **where)
    x, normed = products.norm(x, p.attention_norm, cfg.rms_norm_eps, readers, added=added, mesh=on.mesh)
    out, cache = mla.attention(p.attention, cfg, normed, angles, cache, view, form=on.form, **where)
    if isinstance(p.mlp, Moe):
        readers = moe_takes_quantised(p.mlp, x.dtype, **where)
    else:
        readers = (products.mlp_takes_quantised(p.mlp, x.dtype, **where),)
    x, normed = products.norm(x, p.mlp_norm, cfg.rms_norm_eps, readers, added=(out,), mesh=on.mesh)
    if isinstance(p.mlp, Moe):
        added, routing = moe(p.mlp, cfg, normed, experts=on.experts, **where)
    else:
        with jax.named_scope("mlp"):
            added, routing = (products.mlp(normed, p.mlp, **where),), None
    return constrain(x, on.mesh, "slots", None, None), added, cache, routing


@jax.named_scope("embed")
def embed(table: Float[Array, "V D"], tokens: Int[Array, "B W"], mesh: Mesh | None) -> Float[Array, "B W D"]:
    """Rows of the embedding table."""
    return constrain(jnp.take(table, tokens, axis=0, mode="clip"), mesh, "slots", None, None)


def run(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    caches: tuple[LayerCache, ...] | None,
    view: PagedView | None,
    on: Backend,
) -> Traced:
    """The trunk over a window of every slot, reading and extending the cache if there is one."""
    x, angles = embed(params.embed, tokens, on.mesh), rope_angles(cfg, positions)
    added, kept, routings = (), [], []
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{i}"):
            mine = caches[i] if caches else None
            x, added, mine, routing = block(layer, cfg, x, added, angles, mine, view, on)
        kept += [] if mine is None else [mine]
        routings += [] if routing is None else [routing]
    hidden = rms_norm(products.plus(x, added), params.norm, cfg.rms_norm_eps)
    return Traced(hidden, tuple(routings), tuple(kept))


def forward(
    params: Params, cfg: ModelConfig, tokens: Int[Array, "B T"], on: Backend = UNSHARDED
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, causal, without a cache."""
    return forward_traced(params, cfg, tokens, on).hidden


def forward_traced(
    params: Params, cfg: ModelConfig, tokens: Int[Array, "B T"], on: Backend = UNSHARDED
) -> Traced:
    """``forward`` with the routing of every MoE layer."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return run(params, cfg, tokens, positions, None, None, on)


def logits(params: Params, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
    """Next-token logits, float32."""
    return vocabulary_logits(hidden, head(params))


def head(params: Params) -> Float[Array, "V D"]:
    """The table that logits are products with."""
    return params.embed if params.head is None else params.head
