"""The NextN (Multi-Token-Prediction) module: arXiv 2412.19437, section 2.2, eqs. 21-23.

Row i of layer 0 merges the trunk's hidden state of token i, after the final norm, with the embedding of token
i+1 and predicts token i+2. Layer k merges layer k-1's output (after ``shared_head.norm``) with the next token
again. Embedding first, post-norm in, post-norm recycled: other choices give the same text, only slower.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.errors import ConfigError
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import LayerCache, Views, WholeCache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import Choice
from mtp_jax.model.layers import rms_norm, rope_angles
from mtp_jax.model.moe import Routing
from mtp_jax.model.params import NextN, Params
from mtp_jax.model.trunk import REFERENCE, Model, OneCache, Traced, block, embed
from mtp_jax.model.visible import Visible, Window, chain


@struct.dataclass
class Pass:
    """Rows of one pass through a layer, which merges each token with the hidden state of the token before it.

    Attributes:
        tokens: ids [B, W].
        hidden: hidden states [B, W, D], the trunk's for layer 0, else the layer's before.
        positions: positions of the tokens.
        views: where entries are written, and the rows that tokens see; none without pages.
        choice: rows for sparse attention, if an earlier pass chose them.
    """

    tokens: Int[Array, "B W"]
    hidden: Float[Array, "B W D"]
    positions: Int[Array, "B W"]
    views: Views = ()
    choice: Choice = ()


def run(
    params: Params, model: Model, k: int, given: Pass, cache: OneCache
) -> tuple[Float[Array, "B W D"], OneCache, Routing | None, Choice]:
    """Layer ``k``. Returns (z after the norm, cache, routing of an MoE layer, choice)."""
    p: NextN = params.nextn[k]
    with jax.named_scope(f"nextn_{k}"):
        x, angles = _merge(params, model, p, given), rope_angles(model.cfg, given.positions)
        x, cache, routing, choice = block(p.layer, model, x, angles, cache, given.views, given.choice)
        return model.on.finish(x, p.norm, model.cfg.rms_norm_eps), cache, routing, choice


def write_cache(params: Params, model: Model, k: int, given: Pass, cache: LayerCache) -> LayerCache:
    """The cache as ``run`` leaves it, of a pass with one view, without its attention and MLP.

    Later rows see nothing of a row but its entries, which depend on the row's own token and hidden state
    alone.
    """
    p, cfg, on, (view,) = params.nextn[k], model.cfg, model.on, given.views
    with jax.named_scope(f"nextn_{k}"):
        x = _merge(params, model, p, given)
        a, x = p.layer.attention, rms_norm(x, p.layer.attention_norm, cfg.rms_norm_eps)
        rows = on.kind(a).entries(a, cfg, x, rope_angles(cfg, given.positions))
        return on.write(cache, cache.stored(rows, cfg.row), view.page_table, view.written)


def existing(k: int, positions: Int[Array, "B W"]) -> Int[Array, "B W"]:
    """Rows of layer ``k``: the first is row k + 1, as each layer merges the token before it. -1 elsewhere."""
    return jnp.where(positions > k, positions, -1)


def seen(k: int, positions: Int[Array, "B W"]) -> Visible:
    """Rows of layer ``k`` that known tokens see; ``positions`` run on, then -1 after the last."""
    start, count = positions[:, 0], (positions >= 0).sum(axis=1)
    return chain(start, count, k + 1)


def seen_by_draft(
    step: Int[Array, ""] | int, layers: int, length: Int[Array, " B"], active: Bool[Array, " B"]
) -> Visible:
    """Rows of its layer that the draft of ``step`` sees, ``step`` modulo ``layers``, in slots of that length.

    Rows past the newest token's exist where the layer has drafted before, every ``layers`` positions, and of
    the drafts before its first own, as the layers ran on each other's rows. step: an array with one layer
    only.
    """
    if layers == 1:
        layer, drafted = 0, (jnp.int32(1) << step) - 1
    else:
        layer = step % layers
        drafted = sum(1 << (row - 1) for row in range(1, step + 1) if row <= layer or row % layers == layer)
    first, count = jnp.full_like(length, layer + 1), active.astype(jnp.int32)
    return Window(first, length + 1, count, jnp.full((*length.shape, 1), drafted, jnp.int32))


def _merge(params: Params, model: Model, p: NextN, given: Pass) -> Float[Array, "B W D"]:
    eps, on = model.cfg.rms_norm_eps, model.on
    e = embed(params.embed if p.embed is None else p.embed, given.tokens, on.mesh)
    e = rms_norm(e, p.token_norm, eps)
    h = rms_norm(given.hidden.astype(e.dtype), p.hidden_norm, eps)
    with jax.named_scope("merge"):
        return on.products.linear(jnp.concatenate([e, h], axis=-1), p.merge)


def teacher_forced(
    params: Params,
    cfg: ModelConfig,
    k: int,
    tokens: Int[Array, "B n"],
    hidden: Float[Array, "B n D"],
    on: Backend = REFERENCE,
) -> Float[Array, "B n D"]:
    """Layer ``k`` over a whole sequence without a cache: row i merges ``tokens[i]`` with ``hidden[i]``.

    For layer 0 ``tokens`` are the sequence from its second token on.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return run(params, Model(cfg, on), k, Pass(tokens, hidden, positions), None)[0]


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
    layers, model = len(params.nextn), Model(cfg, on)
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
        z, cache, routing, _ = run(params, model, k % layers, Pass(drafted, z, positions), cache)
        outputs.append(Traced(z, () if routing is None else (routing,), ()))
    return tuple(outputs)


def logits(params: Params, k: int, z: Float[Array, "*b D"], on: Backend = REFERENCE) -> Float[Array, "*b V"]:
    """Draft logits of layer ``k``, float32, from z after its norm."""
    p: NextN = params.nextn[k]
    return on.products.head(z, params.table if p.head is None else p.head)
