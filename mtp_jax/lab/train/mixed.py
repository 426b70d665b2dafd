"""The model with derivatives: products in float32, or of bfloat16 factors with sums in float32.

The second is mixed-precision training (arXiv 1710.03740, section 3): parameters, norms, softmax, router and
optimiser stay in float32. A CPU with bfloat16 matrix instructions multiplies so several times faster.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jaxtyping import Array, Float

from mtp_jax.model.attention.compressed import Compressed
from mtp_jax.model.attention.gqa import Gqa
from mtp_jax.model.attention.latent import Latent
from mtp_jax.model.attention.source import Chosen, Source
from mtp_jax.model.backend import Backend, kinds, xla
from mtp_jax.model.experts.plain import Experts
from mtp_jax.model.layers import masked_softmax
from mtp_jax.model.mla import Queries, Ups
from mtp_jax.model.narrow import Matrix
from mtp_jax.model.products.plain import Products, Rows

Factors = Literal["float32", "bfloat16"]


def differentiable(factors: Factors = "float32", mesh: Mesh | None = None) -> Backend:
    """The backend that has derivatives: every expert computes every row."""
    if factors == "float32":
        return xla(mesh, experts="dense")
    on = Bf16Products(mesh)
    return Backend(on, kinds(Bf16Latent(on), Gqa(on), Compressed(on)), Experts(on, "dense"))


@dataclass(frozen=True)
class Bf16Products(Products):
    """Products of factors rounded to bfloat16, but for products that are exact."""

    def product(self, x: Float[Array, "... i"], w: Matrix, dtype: Any) -> Float[Array, "..."]:
        """See `Products.product`."""
        y = _narrow(x.reshape(-1, x.shape[-1]), w.reshape(-1, w.shape[-1]))
        return y.reshape(*x.shape[:-1], *w.shape[:-1]).astype(dtype)

    def exactly(self, x: Rows, w: Float[Array, "o i"]) -> Float[Array, "*b o"]:
        """See `Products.exactly`."""
        return Products(self.mesh).exactly(x, w)


@dataclass(frozen=True)
class Bf16Latent(Latent):
    """Naive MLA, heads first, with one product for both parts of queries and keys."""

    def attend(self, q: Queries, w: Ups, source: Source, scale: float) -> Float[Array, "B W N v"]:
        """See `Latent.attend`."""
        assert not isinstance(source, Chosen), "nothing is trained through sparse attention"
        rows, mask = source.read(jnp.float32)
        latent, key_rope = jnp.split(rows, [w.k.shape[-1]], axis=-1)
        keys, values = (jnp.moveaxis(self.on.product(latent, up, jnp.float32), 2, 1) for up in w)
        shared = jnp.broadcast_to(key_rope[:, None], (*keys.shape[:3], key_rope.shape[-1]))
        keys = jnp.concatenate([keys, shared], -1).astype(jnp.bfloat16)
        asked = jnp.moveaxis(jnp.concatenate([q.nope, q.rope], -1), 2, 1).astype(jnp.bfloat16)
        scores = jnp.einsum("bnwh,bnlh->bnwl", asked, keys, preferred_element_type=jnp.float32)
        weights = masked_softmax(scores, mask, scale).astype(jnp.bfloat16)
        values = values.astype(jnp.bfloat16)
        out = jnp.einsum("bnwl,bnlv->bnwv", weights, values, preferred_element_type=jnp.float32)
        return jnp.moveaxis(out, 1, 2)


@jax.custom_vjp
def _narrow(x: Float[Array, "T i"], w: Float[Array, "o i"]) -> Float[Array, "T o"]:
    """``x @ w.T`` of factors rounded to bfloat16; both derivatives round their factors, too."""
    return _forward(x, w)[0]


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return _dot(x, w, 1, 1), (x, w)


def _backward(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    g = g.astype(jnp.bfloat16)
    # Without a layout XLA's CPU compiler reads g.T across rows and no longer multiplies in bfloat16.
    across = with_layout_constraint(g.T, Layout((0, 1)))
    return _dot(g, w, 1, 0), _dot(across, x, 1, 0)


_narrow.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)
