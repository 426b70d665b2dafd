"""The EAGLE-3 head: arXiv 2503.01840, section 3.1, and its later options (EAGLE 3.1).

Row i merges a state fused of residual streams of token i with the embedding of token i + 1 and predicts token
i + 2, from a vocabulary that may be a part of the trunk's. Its layer reads both beside each other and adds to
the hidden state. A draft's row merges the state that the draft was predicted from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.keys import TreeShape
from mtp_jax.heads.eagle3.declared import Eagle3, Eagle3Config
from mtp_jax.model.backend import Backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_module import Pass, beside
from mtp_jax.model.draft_rows import at_ids, draft_logits, ids_of, places_of
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.params import Layer, Params
from mtp_jax.model.products.plain import Residual


@dataclass(frozen=True)
class Eagle3Head:
    """The head of a trunk as a ``DraftModule``."""

    trunk: ModelConfig
    name: str = "eagle3"

    @property
    def head(self) -> Eagle3Config:
        """Sizes and options of the head."""
        assert isinstance(self.trunk.drafter, Eagle3Config), "the trunk has no EAGLE-3 head"
        return self.trunk.drafter

    @property
    def cfg(self) -> ModelConfig:
        """Sizes of the head's layer."""
        return self.head.layer

    @property
    def numbers(self) -> range:
        """One layer."""
        return range(1)

    @property
    def width(self) -> int:
        """The head's hidden size."""
        return self.cfg.hidden_size

    @property
    def features(self) -> tuple[int, ...]:
        """The head's taps."""
        return self.head.taps

    def layer(self, params: Params, k: int) -> Layer:
        """The head's layer; its ``attention_norm`` is the norm of embeddings."""
        return _of(params).layer

    def fuse(
        self, params: Params, on: Backend, features: Sequence[Float[Array, "B W T"]]
    ) -> Float[Array, "B W D"]:
        """fc of the taps in a row, normed each, together, or not at all."""
        p, x = _of(params), jnp.concatenate(features, axis=-1)
        with jax.named_scope("merge"):
            if p.tap_norms:
                parts = zip(jnp.split(x, len(p.tap_norms), axis=-1), p.tap_norms, strict=True)
                x = jnp.concatenate([rms_norm(a, w, self.cfg.rms_norm_eps) for a, w in parts], axis=-1)
            return on.products.linear(x, p.fuse)

    def merge(
        self, params: Params, on: Backend, k: int, given: Pass
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W E"]]:
        """The hidden state, as it is or normed; [norm(embedding), norm(hidden)]."""
        p, width = _of(params), self.cfg.hidden_size
        table = params.embed if p.embed is None else p.embed
        rows = beside(table, p.layer.attention_norm, p.hidden_norm, self.cfg.rms_norm_eps, given, on)
        return rows[..., width:] if self.head.normed_residual else given.hidden.astype(rows.dtype), rows

    def fed_back(self, params: Params, on: Backend, k: int, x: Residual) -> Float[Array, "B W D"]:
        """The stream before the head's norm or after it."""
        if self.head.normed_output:
            return on.finish(x, _of(params).norm, self.cfg.rms_norm_eps)
        return on.tap(x)

    def ids(self, params: Params) -> Int[Array, " v"] | None:
        """See ``OfSome``."""
        offset = _of(params).target_offset
        return None if offset is None else ids_of(offset)

    def own_logits(
        self, params: Params, k: int, z: Float[Array, "*b D"], on: Backend
    ) -> Float[Array, "*b v"]:
        """See ``OfSome``."""
        p = _of(params)
        z = z if self.head.normed_output else rms_norm(z, p.norm, self.cfg.rms_norm_eps)
        return self.head.logit_scale * draft_logits(params, p.head, z, on)

    def logits(self, params: Params, k: int, z: Float[Array, "*b D"], on: Backend) -> Float[Array, "*b V"]:
        """Logits of the head's vocabulary, each at its token's id, and -inf elsewhere."""
        own, ids = self.own_logits(params, k, z, on), self.ids(params)
        return own if ids is None else at_ids(own, places_of(ids, self.trunk.vocab_size))


def drafter(trunk: ModelConfig, tree: TreeShape | None = None) -> Recursive:
    """Drafts with the head by recursion. tree: the trees that it grows; None: chains."""
    return Recursive(Eagle3Head(trunk), tree)


def _of(params: Params) -> Eagle3:
    assert isinstance(params.drafter, Eagle3), "the configuration has a head, the parameters have none"
    return params.drafter
