"""The NextN (Multi-Token-Prediction) module: arXiv 2412.19437, section 2.2, eqs. 21-23.

Row i of layer 0 merges the trunk's hidden state of token i, after the final norm, with the embedding of token
i+1 and predicts token i+2. Layer k merges layer k-1's output (after ``shared_head.norm``) with the next token
again. Embedding first, post-norm in, post-norm recycled: other choices give the same text, only slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.errors import ConfigError
from mtp_jax.model import draft_module
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import WholeCache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_module import Pass, beside
from mtp_jax.model.params import Layer, NextN, Params
from mtp_jax.model.products.plain import Stream
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

    def fed_back(self, params: Params, on: Backend, k: int, x: Stream) -> Float[Array, "B W D"]:
        """The state after shared_head.norm."""
        return on.finish(x, params.nextn[k].norm, self.cfg.rms_norm_eps)

    def logits(self, params: Params, k: int, z: Float[Array, "*b D"], on: Backend) -> Float[Array, "*b V"]:
        """Logits of every token."""
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
    """The drafts of depth 1 to ``depth`` after every row of ``hidden``, had they been the text's own tokens.

    Row i of depth k merges ``tokens[:, i + k]``, so there are at least T + depth of them. A single layer is
    run as it drafts ("training-time test", arXiv 2503.01840): a row of depth k sees the rows of depth 1 up to
    its own and its own chain, not other rows of depth k. Each of several layers sees its own rows, as in the
    report; layer (k - 1) modulo their number serves depth k. Raises ConfigError for sparse attention.
    """
    if cfg.indexer:
        raise ConfigError(
            "this model has sparse attention (index_topk), through which nothing is trained here"
        )
    slots, length, _ = hidden.shape
    layers, module = len(params.nextn), NextNLayers(cfg)
    causal, own = jnp.tri(length, dtype=bool), jnp.eye(length, dtype=bool)
    first = cache = WholeCache(jnp.zeros((slots, 0, cfg.row.width), hidden.dtype), causal)
    outputs, z = [], hidden
    for k in range(depth):
        if layers > 1:
            cache = first
        elif k:
            cache = WholeCache(cache.rows, jnp.concatenate([causal] + [own] * k, axis=1))
        positions = jnp.broadcast_to(jnp.arange(k, k + length), (slots, length))
        drafted = tokens[:, k + 1 : k + 1 + length]
        given = Pass(drafted, z, positions)
        z, cache, routing, _ = draft_module.run(module, params, on, k % layers, given, cache)
        outputs.append(Traced(z, () if routing is None else (routing,), ()))
    return tuple(outputs)


def logits(params: Params, k: int, z: Float[Array, "*b D"], on: Backend = REFERENCE) -> Float[Array, "*b V"]:
    """Draft logits of layer ``k``, float32, from z after its norm."""
    p: NextN = params.nextn[k]
    return on.products.head(z, params.table if p.head is None else p.head)
