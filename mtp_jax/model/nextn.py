"""The NextN (Multi-Token-Prediction) module: arXiv 2412.19437, section 2.2, eqs. 21-23.

Row i of layer 0 merges the trunk's hidden state of token i, after the final norm, with the embedding of token
i+1 and predicts token i+2. Layer k merges layer k-1's output (after ``shared_head.norm``) with the next token
again. Embedding first, post-norm in, post-norm recycled: other choices give the same text, only slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int

from mtp_jax.model import draft_module
from mtp_jax.model.backend import Backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_module import Pass, beside
from mtp_jax.model.draft_rows import draft_logits
from mtp_jax.model.params import Layer, NextN, Params
from mtp_jax.model.products.plain import Residual
from mtp_jax.model.trunk import REFERENCE, Traced


@dataclass(frozen=True)
class NextNLayers:
    """The NextN layers of a model as a ``DraftModule``."""

    cfg: ModelConfig
    features: tuple[int, ...] = (-1,)
    name: str = "nextn"

    @property
    def numbers(self) -> range:
        """They count on from the trunk's."""
        first = self.cfg.num_hidden_layers
        return range(first, first + self.cfg.num_nextn_predict_layers)

    @property
    def width(self) -> int:
        """The trunk's hidden size."""
        return self.cfg.hidden_size

    @property
    def trunk(self) -> ModelConfig:
        """Sizes of the trunk, which are theirs."""
        return self.cfg

    def layer(self, params: Params, k: int) -> Layer:
        """The decoder block of layer ``k``."""
        return params.nextn[k].layer

    def fuse(
        self, params: Params, on: Backend, features: Sequence[Float[Array, "B W D"]]
    ) -> Float[Array, "B W D"]:
        """The trunk's hidden state as it is."""
        return features[0]

    def merge(self, params: Params, on: Backend, k: int, given: Pass) -> tuple[Float[Array, "B W D"], None]:
        """eh_proj [enorm(embedding); hnorm(hidden)] (eq. 21)."""
        p: NextN = params.nextn[k]
        table = params.embed if p.embed is None else p.embed
        rows = beside(table, p.token_norm, p.hidden_norm, self.cfg.rms_norm_eps, given, on)
        with jax.named_scope("merge"):
            return on.products.linear(rows, p.merge), None

    def fed_back(self, params: Params, on: Backend, k: int, x: Residual) -> Float[Array, "B W D"]:
        """The state after shared_head.norm."""
        return on.finish(x, params.nextn[k].norm, self.cfg.rms_norm_eps)

    def logits(self, params: Params, k: int, z: Float[Array, "*b D"], on: Backend) -> Float[Array, "*b V"]:
        """Draft logits, from the trunk's head unless the layer has its own."""
        return logits(params, k, z, on)


def teacher_forced(
    params: Params,
    cfg: ModelConfig,
    k: int,
    tokens: Int[Array, "B n"],
    hidden: Float[Array, "B n D"],
    on: Backend = REFERENCE,
) -> Float[Array, "B n D"]:
    """``draft_module.teacher_forced`` of NextN layer ``k``."""
    return draft_module.teacher_forced(NextNLayers(cfg), params, on, k, tokens, hidden)


def drafts_forced(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "B n"],
    hidden: Float[Array, "B T D"],
    depth: int,
    on: Backend = REFERENCE,
) -> tuple[Traced, ...]:
    """``draft_module.drafts_forced`` of the NextN layers."""
    return draft_module.drafts_forced(NextNLayers(cfg), params, on, tokens, hidden, depth)


def logits(params: Params, k: int, z: Float[Array, "*b D"], on: Backend = REFERENCE) -> Float[Array, "*b V"]:
    """Draft logits of layer ``k``, float32, from z after its norm."""
    return draft_logits(params, params.nextn[k].head, z, on)
