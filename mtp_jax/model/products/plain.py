"""Products and norms in plain XLA, as the papers write them: the oracle of the other products."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from mtp_jax.model import hyper
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layers import gated, rms_norm
from mtp_jax.model.narrow import Bf16, Matrix, Table, expand
from mtp_jax.model.params import Hyper, HyperHead, Layer, Mlp, Moe
from mtp_jax.model.products.stream import ProductResult, summed
from mtp_jax.model.sharding import constrain, ways

Split = Literal["out", "in"]
Residual = Any
"""The residual stream [B, W, D] between two stages: an array at first, then in the products' own form."""
Rows = Any
"""The rows that a norm hands to products: [B, W, D], in the products' own form."""


class Reader(NamedTuple):
    """A weight whose product reads the rows of a norm; ``split``: see ``Products.linear``."""

    weight: Matrix
    split: Split | None = None


Readers = Sequence[Reader | Mlp | Moe | None]
"""The readers of a norm's rows; None: a reader of plain rows."""


@dataclass(frozen=True)
class Products:
    """Products, norms and the residual stream. Hashable, as programs are compiled for one backend.

    Attributes:
        mesh: the mesh of devices; None for one device.
    """

    mesh: Mesh | None = None

    @property
    def loops(self) -> bool:
        """Whether equal passes are a loop; else they are unrolled."""
        return False

    # The residual stream

    def norm(
        self, x: Residual, weight: Float[Array, " D"], eps: float, readers: Readers = ()
    ) -> tuple[Residual, Rows]:
        """Return the stream, and its rows normed for ``readers``."""
        return x, rms_norm(x, weight, eps)

    def add(self, x: Residual, *outs: ProductResult) -> Residual:
        """The stream with the results of a stage."""
        return constrain(x + functools.reduce(jnp.add, map(summed, outs)), self.mesh, "slots", None, None)

    def tap(self, x: Residual) -> Float[Array, "B W D"]:
        """Turns the stream into an array."""
        return x

    def finish(self, x: Residual, weight: Float[Array, " D"], eps: float) -> Float[Array, "B W D"]:
        """The norm behind the last block."""
        return rms_norm(x, weight, eps)

    def joined(self, x: Float[Array, "B W N v"], o: Matrix, absorbed: bool) -> Rows:
        """Heads side by side, [B, W, N * v], for the output projection ``o``. absorbed: the form of MLA."""
        return x.reshape(*x.shape[:2], -1)

    # Several residual streams, of hyper-connections

    def enter(
        self, x: Residual, p: Hyper, cfg: ModelConfig, weight: Float[Array, " D"], readers: Readers = ()
    ) -> tuple[hyper.Entered, Rows]:
        """The streams while a sublayer runs, and its input, normed for ``readers``."""
        entered, one = hyper.enter(self.streams(x), p, cfg, self.exactly)
        return entered, self.norm(one, weight, cfg.rms_norm_eps, readers)[1]

    def leave(self, x: hyper.Entered, *outs: ProductResult) -> Residual:
        """The streams after a sublayer."""
        return hyper.leave(x, functools.reduce(jnp.add, map(summed, outs)))

    def streams(self, x: Residual) -> Residual:
        """Several streams as an array [B, W, S, D]; one stream as it is."""
        return x

    def collapse(self, x: Float[Array, "*b S D"], p: HyperHead, cfg: ModelConfig) -> Float[Array, "*b D"]:
        """One stream behind the last block."""
        return hyper.collapse(x, p, cfg, self.exactly)

    # Products

    def linear(self, x: Rows, w: Matrix, *, split: Split | None = None) -> Float[Array, "..."]:
        """``x @ w.T``: weights have output features first, as in the checkpoint; narrow weights are expanded.

        split: whether ``model`` splits the first output axis or the input features of w.
        """
        return self.product(x, w, x.dtype)

    def result(self, x: Rows, w: Matrix, *, split: Split | None = None) -> ProductResult:
        """``linear`` for a reader that takes its result as a kernel leaves it."""
        return self.linear(x, w, split=split)

    def results(self, x: Rows, *ws: Any) -> tuple[ProductResult, ...]:
        """``result`` for each of several weights."""
        return tuple(self.result(x, w) for w in ws)

    def product(self, x: Float[Array, "... i"], w: Matrix, dtype: Any) -> Float[Array, "..."]:
        """``x @ w.T``, accumulated in float32."""
        w = expand(w, x.dtype)
        flat_x, flat_w = x.reshape(-1, x.shape[-1]), w.reshape(-1, w.shape[-1])
        y = jax.lax.dot_general(flat_x, flat_w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        return y.reshape(*x.shape[:-1], *w.shape[:-1])

    def by_group(self, x: Float[Array, "B W G i"], w: Matrix) -> Float[Array, "B W G o"]:
        """``x[:, :, g] @ w[g].T`` for every group g, which ``model`` splits."""
        return jnp.einsum("bwgi,goi->bwgo", x, expand(w, x.dtype))

    def plain(self, x: Rows) -> Float[Array, "*b D"]:
        """Rows as an array."""
        return x

    def exactly(self, x: Rows, w: Float[Array, "o i"]) -> Float[Array, "*b o"]:
        """A product in full float32, also on devices that by default multiply float32 with fewer bits."""
        with jax.default_matmul_precision("highest"):
            return self.product(self.plain(x).astype(jnp.float32), w, jnp.float32)

    def mlp(self, x: Rows, p: Mlp, limit: float | None = None) -> Float[Array, "B W D"]:
        """``down(silu(gate(x)) * up(x))``. limit: see ``layers.gated``."""
        gate_up = self.linear(x, p.gate_up)
        return self.linear(gated(gate_up[..., 0, :], gate_up[..., 1, :], limit), p.down)

    @jax.named_scope("head")
    def head(self, hidden: Float[Array, "... D"], table: Table) -> Float[Array, "... V"]:
        """Logits in float32, from rows in the table's dtype."""
        rows = hidden.astype(jnp.float32 if isinstance(table, Bf16) else table.dtype)
        return self.product(rows, table, jnp.float32)

    def head_parts(self, hidden: Float[Array, "*b D"]) -> int:
        """The number of parts of the vocabulary whose logits greedy decoding takes one after the other.

        All logits of many rows would be a step's largest array, unless devices share them; a quarter of them
        takes less memory than a layer's experts need. They are not cut where they take less than a hundredth
        of the table: each part is a dozen launches, and of a single row XLA would widen all parts beforehand.
        """
        rows, width = math.prod(hidden.shape[:-1]) // ways("slots", self.mesh), hidden.shape[-1]
        few = rows * 100 * jnp.dtype(jnp.float32).itemsize <= width * jnp.dtype(jnp.bfloat16).itemsize
        return 1 if few or ways("vocab", self.mesh) > 1 else 4

    def reads_stacks(self, layer: Layer) -> bool:
        """Whether loops over a stack of such layers read the weights where they lie."""
        return False
