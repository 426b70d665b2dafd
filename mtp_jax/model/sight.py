"""The places of a pass's tokens, which every layer of the pass sees alike."""

from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.model.cache import Views
from mtp_jax.model.indexer import Choice


@struct.dataclass
class Sight:
    """The places of a pass's tokens.

    Attributes:
        angles: of rope, at the tokens' positions.
        views: where entries are written, and the cached rows that tokens see; none without pages.
        choice: rows for sparse attention, if another layer has chosen them.
        tokens: ids, where a layer chooses experts by them.
    """

    angles: Float[Array, "B W ... 2 r"]
    views: Views = ()
    choice: Choice = ()
    tokens: Int[Array, "B W"] | None = None
