"""Entries of compressed attention: each is a mean of r consecutive tokens' rows, weighted channel by channel.

An entry of ratio 4 is made of the four tokens before its own as well, of which it reads other channels. So a
token's input to a compressor has a part for the entry behind its own, where entries overlap, and a part for
its own. Entry w of ratio r ends with token r (w + 1) - 1, and every token from that one on sees it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model.config import CompressedConfig, ModelConfig
from mtp_jax.model.layers import angles_of, rms_norm, rotate_last
from mtp_jax.model.params import Compressor


@struct.dataclass
class Span:
    """Neighbouring tokens of each slot, to whose sequence a pass adds them.

    Attributes:
        start: position of the first.
        count: number of tokens that there are; tokens behind them are padding.
        width: number of tokens with padding.
    """

    start: Int[Array, " B"]
    count: Int[Array, " B"]
    width: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, written: Int[Array, "B W"]) -> "Span":
        """The span of a view's written rows, which are neighbours; the window's other rows are padding."""
        index = jnp.arange(written.shape[1])
        there = written >= 0
        start = jnp.max(jnp.where(there, written - index, 0), axis=1)
        return cls(start, jnp.max(jnp.where(there, index + 1, 0), axis=1), written.shape[1])

    def entries(self, ratio: int) -> Int[Array, "B E"]:
        """Numbers of the entries that may end within the span."""
        return self.start[:, None] // ratio + jnp.arange((self.width - 1) // ratio + 1)

    def ended(self, ratio: int) -> Int[Array, "B E"]:
        """``entries``, -1 in the place of an entry that does not end within the span."""
        found = self.entries(ratio)
        last = (found + 1) * ratio
        return jnp.where(last <= (self.start + self.count)[:, None], found, -1)

    def seen(self, ratio: int, entries: int) -> Bool[Array, "B W E"]:
        """Whether each token sees each of the first ``entries`` entries."""
        token = jnp.arange(self.width)
        ended = (self.start[:, None] + token + 1) // ratio
        ended = jnp.where(token < self.count[:, None], ended, 0)
        return jnp.arange(entries) < ended[..., None]


def inputs(
    compressors: Sequence[Compressor], outputs: Sequence[tuple[Array, Array]]
) -> Float[Array, "B W F"]:
    """Inputs of a layer's compressors, side by side, float32: first all parts for the entry behind.

    outputs: (rows, gates) of each compressor's products, [B, W, c * d].
    """
    parts = [
        jnp.split(a, a.shape[-1] // p.norm.shape[0], axis=-1)
        for p, o in zip(compressors, outputs, strict=True)
        for a in o
    ]
    return jnp.concatenate([part for turn in zip(*parts, strict=True) for part in turn], axis=-1)


def entries_of(
    before: Float[Array, "B b F"],
    own: Float[Array, "B W F"],
    span: Span,
    compressors: Sequence[Compressor],
    cfg: ModelConfig,
    ratio: int,
    dtype: jax.typing.DTypeLike,
) -> list[Float[Array, "B E d"]]:
    """The entries that may end within a span, of each compressor, normed and rotated.

    before: inputs of the ``reach`` tokens before the span; anything at positions below 0. own: of the span.
    """
    over = CompressedConfig.overlap(ratio)
    given = jnp.concatenate([before, own], axis=1)
    numbers = span.entries(ratio)
    first = numbers * ratio
    at = first - (span.start[:, None] - before.shape[1])
    turns = [jnp.split(given, 2, axis=-1)[0], jnp.split(given, 2, axis=-1)[1]] if over else [given]
    starts = [at - over, at] if over else [at]
    found, channel = [], 0
    for p in compressors:
        width, values, gates = p.norm.shape[0], [], []
        for turn, (channels, begin) in enumerate(zip(turns, starts, strict=True)):
            index = begin[..., None] + jnp.arange(ratio)
            picked = channels[..., channel : channel + 2 * width]
            picked = jnp.take_along_axis(picked, index.reshape(len(index), -1, 1), axis=1, mode="clip")
            value, gate = jnp.split(picked.reshape(*index.shape, -1), 2, axis=-1)
            gate = gate + p.places[:, turn * width : (turn + 1) * width]
            if over and turn == 0:  # the first entry has no tokens before its own
                some = (numbers > 0)[..., None, None]
                value, gate = jnp.where(some, value, 0), jnp.where(some, gate, -jnp.inf)
            values.append(value)
            gates.append(gate)
        channel += 2 * width
        weights = jax.nn.softmax(jnp.concatenate(gates, axis=2), axis=2)
        mean = (jnp.concatenate(values, axis=2) * weights).sum(axis=2).astype(dtype)
        normed = rms_norm(mean, p.norm, cfg.rms_norm_eps)
        found.append(rotate_last(normed, angles_of(cfg, first, kind=1)))
    return found


def reach(ratio: int) -> int:
    """Tokens before a span that its entries may be made of."""
    return ratio + CompressedConfig.overlap(ratio) - 1
