"""The gates of a token, number by number, as threads and plain jnp compute them alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

STREAMS = 4


class Projected(NamedTuple):
    """Products of a token's streams with the weight of its gates, not yet summed.

    Attributes:
        parts: float32, to be summed over the last axis.
        squares: likewise, sums of the streams' squares.
    """

    parts: Float[Array, "T o n"]
    squares: Float[Array, "T n"]


class GateParams(NamedTuple):
    """Parameters that follow the product: factors and addends of its results, the weight of the input's norm.

    Attributes:
        scale: float32, three: of the input's gates, of the result's, of the matrix; one where streams end.
        base: float32.
        norm: weight of the norm, any float type; None: the input is not normed.
    """

    scale: Float[Array, " _"]
    base: Float[Array, " o"]
    norm: Float[Array, "*k"] | None = None


class InputForms(NamedTuple):
    """Forms in which a sublayer's input is wanted.

    Attributes:
        total: the gated sum of the streams, bfloat16.
        plain: normed, bfloat16.
        quantised: normed, e4m3 with scales.
    """

    total: bool = False
    plain: bool = False
    quantised: bool = False


class Gates(NamedTuple):
    """Gates of a sublayer's result, and the matrix that mixes streams.

    Attributes:
        out: gate of the result into each stream.
        mix: [..., j, k]: the share of stream j in the new stream k.
    """

    out: Float[Array, "T S"]
    mix: Float[Array, "T S S"]


class TokenGates(NamedTuple):
    """A token's gates, a number each: of the input, of the result, of the matrix row by row.

    The last two are empty where streams end.
    """

    into: list[jax.Array]
    out: list[jax.Array]
    mix: list[list[jax.Array]]


@dataclass(frozen=True)
class GateRule:
    """Numbers of the gates (arXiv 2512.24880, section 4.2, eqs. 7 to 9).

    Attributes:
        iterations: number of normalisations of the matrix, columns and rows in turn.
        eps: least sum and gate, added to them.
        norm_eps: least mean square, likewise.
    """

    iterations: int
    eps: float
    norm_eps: float

    def gates(self, found: Sequence[jax.Array], scale: Any, base: Any) -> TokenGates:
        """found: products with the normed streams: of the input, of the result, of the matrix row by row.

        scale: a number for each of the three. base: a number for each product.
        """

        def shifted(i: int, of: int) -> jax.Array:
            return found[i] * scale[of] + base[i]

        s = STREAMS
        into = [_sigmoid(shifted(i, 0)) + self.eps for i in range(s)]
        if len(found) == s:
            return TokenGates(into, [], [])
        out = [2 * _sigmoid(shifted(i, 1)) for i in range(s, 2 * s)]
        rows = [[shifted((2 + j) * s + k, 2) for k in range(s)] for j in range(s)]
        return TokenGates(into, out, self._balanced([self._softmax(row) for row in rows]))

    def _softmax(self, row: list[jax.Array]) -> list[jax.Array]:
        peak = reduce(jnp.maximum, row)
        each = [jnp.exp(x - peak) for x in row]
        over = 1 / reduce(jnp.add, each)
        return [x * over + self.eps for x in each]

    def _balanced(self, mix: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Columns and rows scaled in turn (Sinkhorn and Knopp), columns first and last."""

        def scaled(mix: list[list[jax.Array]]) -> list[list[jax.Array]]:
            over = [1 / (reduce(jnp.add, row) + self.eps) for row in mix]
            return [[x * o for x in row] for row, o in zip(mix, over, strict=True)]

        def turned(mix: list[list[jax.Array]]) -> list[list[jax.Array]]:
            return [list(column) for column in zip(*mix, strict=True)]

        def columns(mix: list[list[jax.Array]]) -> list[list[jax.Array]]:
            return turned(scaled(turned(mix)))

        return lax.fori_loop(0, self.iterations - 1, lambda _, mix: columns(scaled(mix)), columns(mix))


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))
