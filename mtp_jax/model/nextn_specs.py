"""The parameters of a NextN layer as they are declared."""

from typing import Any

from mtp_jax.model.layer_specs import Layer, Weight
from mtp_jax.model.spec import parameters


@parameters
class NextN:
    """A Multi-Token-Prediction module. ``embed`` and ``head`` are None when they are the trunk's own.

    ``stream_merge`` merges each of several residual streams with the token.
    """

    token_norm: Weight  # [D], enorm
    hidden_norm: Weight  # [D], hnorm
    merge: Weight  # [D, 2D], eh_proj; [D, D], e_proj, beside stream_merge
    layer: Layer
    norm: Weight  # [D], shared_head.norm
    embed: Weight
    head: Weight
    stream_merge: Weight = None  # [D, D], h_proj
    hyper_head: Any = None  # HyperHead

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """Its layer."""
        return (self.layer,)

    @property
    def merging(self) -> tuple[Weight, ...]:
        """The matrices and the norms beside the layer."""
        return self.token_norm, self.hidden_norm, self.merge, self.stream_merge, self.norm, self.hyper_head

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make NextN entries of tokens: the merge, and latents or keys and values."""
        return self.token_norm, self.hidden_norm, self.merge, self.stream_merge, *self.layer.entries
