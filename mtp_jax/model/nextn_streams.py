"""The NextN layers of a model with hyper-connections: they merge each residual stream, and feed all back.

Row i merges the trunk's streams of token i, before they are collapsed, with the embedding of token i + 1.
Every stream is normed and projected alike, and the projected embedding is added to it. A further draft merges
the layer's own streams, as in SGLang and vLLM; the release drafts one token.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from mtp_jax.model.backend import Backend
from mtp_jax.model.draft_module import Pass
from mtp_jax.model.draft_rows import draft_logits
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.nextn import NextNLayers
from mtp_jax.model.params import NextN, Params
from mtp_jax.model.products.plain import Residual
from mtp_jax.model.trunk import STREAMS, embed, side_by_side


@dataclass(frozen=True)
class StreamNextN(NextNLayers):
    """NextN layers over several residual streams; hidden states are all S streams side by side."""

    features: tuple[int, ...] = (STREAMS,)

    @property
    def width(self) -> int:
        """Values of all streams."""
        return self.streams * self.cfg.hidden_size

    @property
    def streams(self) -> int:
        """Number of streams."""
        assert self.cfg.hyper is not None, "a model with one stream has other NextN layers"
        return self.cfg.hyper.streams

    def merge(self, params: Params, on: Backend, k: int, given: Pass) -> tuple[Float[Array, "B W S D"], None]:
        """e_proj enorm(embedding) + h_proj hnorm(stream), for every stream."""
        p, eps = params.nextn[k], self.cfg.rms_norm_eps
        e = rms_norm(embed(params.embed, given.tokens, on.mesh), p.token_norm, eps)
        # A stream of a token is a row of its own, as products take rows [B, W, D].
        h = given.hidden.astype(e.dtype).reshape(len(e), -1, e.shape[-1])
        with jax.named_scope("merge"):
            merged = on.products.linear(rms_norm(h, p.hidden_norm, eps), p.stream_merge)
            token = on.products.linear(e, p.merge)[:, :, None]
            return merged.reshape(*e.shape[:2], self.streams, -1) + token, None

    def fed_back(self, params: Params, on: Backend, k: int, x: Residual) -> Float[Array, "B W SD"]:
        """The streams behind the layer."""
        return side_by_side(on.streams(x))

    def logits(self, params: Params, k: int, z: Float[Array, "*b SD"], on: Backend) -> Float[Array, "*b V"]:
        """Draft logits, from the layer's own collapse and norm, and the trunk's head."""
        p: NextN = params.nextn[k]
        assert p.hyper_head is not None, "a layer with several streams collapses them"
        one = z.reshape(*z.shape[:-1], self.streams, -1)
        collapsed = on.collapsed(one, p.hyper_head, self.cfg)
        return draft_logits(params, None, rms_norm(collapsed, p.norm, self.cfg.rms_norm_eps), on)
