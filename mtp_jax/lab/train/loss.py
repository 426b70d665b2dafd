"""The multi-token-prediction objective (DeepSeek-V3 report, arXiv 2412.19437, section 2.2, eqs. 21-25)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.lab.train.mixed import Factors, differentiable
from mtp_jax.model import nextn, trunk
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.moe import Routing
from mtp_jax.model.params import Params


class LossFigures(NamedTuple):
    """Figures of a loss evaluation.

    Attributes:
        losses: cross entropy in nats per token of the trunk and of each MTP depth, [1 + depth].
        accuracy: fraction of positions whose most likely token is the right one, [1 + depth].
        loads: numbers of rows routed to each expert, [E] for every MoE layer of the trunk, then of NextN.
    """

    losses: Float[Array, " depths"]
    accuracy: Float[Array, " depths"]
    loads: tuple[Float[Array, " E"], ...]


def loss(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "B n"],
    mtp_weight: float,
    mtp_depth: int,
    mtp_targets: str = "data",
    products: Factors = "float32",
) -> tuple[jax.Array, LossFigures]:
    """Next-token cross entropy + mtp_weight * mean over depths 1..mtp_depth of the MTP cross entropy.

    A row of n tokens holds T + 1 + mtp_depth of them, so every depth predicts T tokens: the trunk predicts
    tokens[:, 1 : T + 1], depth k predicts tokens[:, k + 1 : T + k + 1]. Gradients of the MTP terms flow into
    the trunk, the embedding and the head, as in the report. Float32, a scalar.

    mtp_targets: "data", or "trunk": the drafts learn the trunk's own distribution of the same token, which
    verification compares them with, instead of the text.
    """
    length = tokens.shape[1] - 1 - mtp_depth
    on = differentiable(products)
    out = trunk.forward_traced(params, cfg, tokens[:, :length], on)
    drafts = nextn.drafts_forced(params, cfg, tokens, out.hidden, mtp_depth, on)
    trunk_logits = trunk.logits(params, out.hidden, on)
    results = [_cross_entropy(trunk_logits, tokens[:, 1 : length + 1])]
    for k, draft in enumerate(drafts, start=1):
        logits = nextn.logits(params, (k - 1) % len(params.nextn), draft.hidden, on)
        if mtp_targets == "data":
            results.append(_cross_entropy(logits, tokens[:, k + 1 : k + 1 + length]))
        else:
            results.append(_distillation(logits[:, :-k], trunk_logits[:, k:]))
    losses, accuracy = jnp.stack([loss for loss, _ in results]), jnp.stack([hit for _, hit in results])
    total = losses[0] + (mtp_weight * losses[1:].mean() if mtp_depth else 0.0)
    loads = [_load(cfg, routing) for routing in out.routing]
    for layer in range(min(mtp_depth, len(params.nextn))):
        # A re-used layer routed rows at several depths: its load is their sum.
        of_layer = [_load(cfg, r) for draft in drafts[layer :: len(params.nextn)] for r in draft.routing]
        loads += [sum(of_layer[1:], of_layer[0])] if of_layer else []
    return total, LossFigures(losses, accuracy, tuple(loads))


def _load(cfg: ModelConfig, routing: Routing) -> Float[Array, " E"]:
    """The number of rows that chose each expert."""
    return jnp.zeros(cfg.n_routed_experts).at[routing.ids.reshape(-1)].add(1.0)


def _cross_entropy(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> tuple[jax.Array, jax.Array]:
    """(mean cross entropy, accuracy)."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    # A hit is "the target's logit is the maximum": cheaper than an argmax on a CPU.
    hit = jax.lax.stop_gradient(chosen >= logits.max(-1))
    return nll.mean(), hit.mean()


def _distillation(
    logits: Float[Array, "B T V"], teacher: Float[Array, "B T V"]
) -> tuple[jax.Array, jax.Array]:
    """(mean cross entropy against the teacher's distribution, agreement of the most likely tokens)."""
    teacher = jax.lax.stop_gradient(teacher)
    chosen = jnp.sum(jax.nn.softmax(teacher) * logits, axis=-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    best = jnp.where(teacher >= teacher.max(-1, keepdims=True), logits, -jnp.inf).max(-1)
    return nll.mean(), jax.lax.stop_gradient(best >= logits.max(-1)).mean()
