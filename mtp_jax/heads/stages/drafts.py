"""DSpark stages of DeepSeek-V4 (``mtp.{k}``): a head that drafts blocks, whose layers are the trunk's blocks.

A context is main_norm(main_proj(taps)), of which every stage caches one row. The rows of a block see the last
``sliding_window`` contexts, the same for all, and each other. Streams begin and collapse as the trunk's do.
"""

from dataclasses import dataclass

from jaxtyping import Array, Float

from mtp_jax.heads.blocks.declared import BlockLayer
from mtp_jax.heads.blocks.drafts import BlockDrafter, Blocks
from mtp_jax.model import trunk
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.sight import Sight
from mtp_jax.model.trunk import Model


@dataclass(frozen=True)
class Stages(Blocks):
    """The stages beside a trunk. Hashable."""

    def layer(
        self,
        p: BlockLayer,
        on: Backend,
        x: Float[Array, "B R ..."],
        angles: Float[Array, "B R ... 2 r"],
        cache: LayerCache,
        view: PagedView,
    ) -> Float[Array, "B R ..."]:
        """The residual streams of a block's rows behind a stage."""
        return trunk.block(p.layer, Model(self.head.layers, on), x, Sight(angles, (view,)), cache)[0]


def drafter(trunk: ModelConfig) -> BlockDrafter:
    """Drafts with the stages."""
    return BlockDrafter(Stages(trunk))
