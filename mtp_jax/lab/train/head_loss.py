"""The objective of a draft head for a frozen trunk: its drafts are to have the trunk's own distribution."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.drafter.protocol import FINAL
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.errors import ConfigError
from mtp_jax.heads.blocks.drafts import Block, Blocks
from mtp_jax.heads.build import build
from mtp_jax.lab.train.states import StateWindows
from mtp_jax.lab.train.tune_options import Objective
from mtp_jax.model import draft_module, trunk
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import empty_cache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_module import DraftModule
from mtp_jax.model.head import head_of as draft_head
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import data_size

# In the place of -inf: its exponential is 0, and its product with 0 is no NaN.
_NEVER = float(jnp.finfo(jnp.float32).min) / 2


@dataclass(frozen=True)
class Task:
    """The head to tune and the objective. Hashable.

    Attributes:
        head: the head's functions.
        on: the backend; it has derivatives.
        drafts: number of drafts that learn.
        objective: "kl": the divergence of the draft's distribution from the trunk's; "tv": their total
            variation, which is the rate of rejection (arXiv 2211.17192, theorem 3.5); "text": the cross
            entropy of the text's tokens.
        decay: weight of a draft over the weight of the draft before it.
    """

    head: DraftModule | Blocks
    on: Backend
    drafts: int
    objective: Objective
    decay: float

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams that the head reads."""
        features = self.head.head.taps if isinstance(self.head, Blocks) else self.head.features
        return tuple(sorted({k for k in features if k != FINAL}))

    @property
    def extra(self) -> int:
        """Tokens of a window behind the rows from which drafts follow."""
        return self.drafts + 1


def head_of(cfg: ModelConfig) -> DraftModule | Blocks:
    """The functions of a model's head or NextN layers. Raises ConfigError for a model without."""
    head, drafter = draft_head(cfg), build(cfg)
    if not cfg.attention.trained:
        raise ConfigError("DeepSeek-V4's MTP layers and DSpark stages are not tuned here; name another model")
    if head and head.untuned:
        raise ConfigError(head.untuned)
    if not isinstance(drafter, Recursive | Block):
        raise ConfigError(
            "the model has no NextN layer to tune; name a head with draft_model, or begin one with fresh"
        )
    return drafter.module


class Drafted(NamedTuple):
    """A draft for every row, at its place in the text.

    Attributes:
        z: the head's states, from which it drafts.
        teacher: the trunk's logits of the draft's token.
        previous, tokens: the text's own tokens before the draft's place and there.
        counts: rows whose draft is of an answer.
    """

    z: Float[Array, "R d"]
    teacher: Float[Array, "R V"]
    previous: Int[Array, " R"]
    tokens: Int[Array, " R"]
    counts: Bool[Array, " R"]


class HeadFigures(NamedTuple):
    """Figures of every draft, means over rows, [K].

    Attributes:
        losses: the objective.
        accepted: share of rows where this draft and all before it are the trunk's most likely tokens: the
            rate at which greedy drafts are accepted.
        overlap: share of probability that draft and trunk have in common: the rate at which a sampled draft
            is accepted after accepted drafts.
    """

    losses: Float[Array, " K"]
    accepted: Float[Array, " K"]
    overlap: Float[Array, " K"]


def objective(trained: Any, params: Params, task: Task, windows: StateWindows) -> tuple[Array, HeadFigures]:
    """The mean objective over drafts, weighted by ``decay``, and its figures.

    trained: the arrays of ``params.drafts`` that learn, None in the other places.
    """
    params = params.with_drafts(merged(trained, params.drafts))
    losses, accepted, overlaps, agrees = [], [], [], jnp.ones((), bool)
    for k, drafted in enumerate(drafts_of(task, params, windows)):
        loss, same, overlap = _figures(task, k, params, drafted)
        agrees = agrees & same
        for found, value in ((losses, loss), (accepted, agrees), (overlaps, overlap)):
            total = jnp.maximum(drafted.counts.sum(), 1)
            found.append(jnp.where(drafted.counts, value, 0).sum() / total)
    weights = task.decay ** jnp.arange(len(losses))
    aux = HeadFigures(*map(jnp.stack, (losses, accepted, overlaps)))
    return (weights * aux.losses).sum() / weights.sum(), jax.lax.stop_gradient(aux)


def split(params: Params) -> tuple[Any, Params]:
    """(The arrays of ``params.drafts`` that learn, which are no ids; all other parameters)."""

    def only(learns: bool) -> Any:
        return jax.tree.map(
            lambda a: a if jnp.issubdtype(a.dtype, jnp.floating) == learns else None, params.drafts
        )

    return only(True), params.with_drafts(only(False))


def merged(trained: Any, drafts: Any) -> Any:
    """Parameters with the arrays of ``trained`` where it has them."""
    return jax.tree.map(lambda new, old: old if new is None else new, trained, drafts, is_leaf=_is_none)


def _is_none(x: object) -> bool:
    return x is None


def drafts_of(task: Task, params: Params, windows: StateWindows) -> Iterator[Drafted]:
    """The drafts of all rows, as the head makes them when it decodes: draft 0, draft 1, ..."""
    of_kind = _of_blocks if isinstance(task.head, Blocks) else _of_recursion
    teacher = trunk.logits(params, windows.states[FINAL].astype(jnp.float32), task.on)
    return of_kind(task, params, windows, jax.lax.stop_gradient(teacher))


def logits_of(task: Task, k: int, params: Params, drafted: Drafted) -> Float[Array, "R V"]:
    """The logits of draft ``k``, -inf for tokens that the head never drafts."""
    head, z = task.head, drafted.z
    if isinstance(head, Blocks):
        return head.after(params, z, head.logits(params, task.on, z), drafted.previous)
    return head.logits(params, k % len(head.numbers), z, task.on)


def _figures(task: Task, k: int, params: Params, drafted: Drafted) -> tuple[Array, Array, Array]:
    """(Objective, whether the most likely tokens agree, overlap) of every row of draft ``k``."""
    head = task.head
    loss, same, overlap = _compared(task, logits_of(task, k, params, drafted), drafted)
    if isinstance(head, Blocks) and head.head.selector:
        # The candidates are the best of these logits, which learn nothing from a choice among candidates.
        loss += _compared(task, head.logits(params, task.on, drafted.z), drafted)[0]
    return loss, same, overlap


def _compared(task: Task, given: Float[Array, "R V"], drafted: Drafted) -> tuple[Array, Array, Array]:
    """``_figures`` of logits. given: -inf for tokens that are never drafted."""
    teacher = drafted.teacher
    drafts = jnp.isfinite(given)
    logits = jnp.where(drafts, given, _NEVER)
    p, log_q = jax.nn.softmax(teacher), jax.nn.log_softmax(logits)
    overlap = jnp.minimum(p, jnp.exp(log_q)).sum(-1)
    if task.objective == "tv":
        loss = 1 - overlap
    elif task.objective == "kl":  # from the trunk's distribution over the tokens that are drafted
        wanted = jax.nn.log_softmax(jnp.where(drafts, teacher, _NEVER))
        loss = (jnp.exp(wanted) * (wanted - log_q)).sum(-1)
    else:
        chosen = jnp.take_along_axis(log_q, drafted.tokens[:, None], axis=-1)[:, 0]
        loss = jnp.where(chosen > _NEVER / 2, -chosen, 0)
    return loss, logits.argmax(-1) == teacher.argmax(-1), overlap


def _of_recursion(
    task: Task, params: Params, w: StateWindows, teacher: Float[Array, "B n V"]
) -> Iterator[Drafted]:
    """Row i has token i + 1 for its newest; draft k, from 0, is of token i + 2 + k."""
    module, on = task.head, task.on
    assert not isinstance(module, Blocks)
    length = w.tokens.shape[1] - task.extra
    features = [w.states[k][:, :length].astype(jnp.float32) for k in module.features]
    together = w.text[:, :length, None] == w.text[:, None, :length]
    fused = module.fuse(params, on, features)
    drafts = draft_module.drafts_forced(module, params, on, w.tokens, fused, task.drafts, together)
    for k, draft in enumerate(drafts):
        before, here = (slice(k + i, k + i + length) for i in (1, 2))
        counts = w.answer[:, 1 : length + 1] & (w.text[:, :length] == w.text[:, here])
        found = draft.hidden, teacher[:, before], w.tokens[:, before], w.tokens[:, here], counts
        yield Drafted(*(a.reshape(-1, *a.shape[2:]) for a in found))


def _of_blocks(
    task: Task, params: Params, w: StateWindows, teacher: Float[Array, "B n V"]
) -> Iterator[Drafted]:
    """A block follows each anchor, and sees the contexts of its text before the anchor."""
    blocks, on = task.head, task.on
    assert isinstance(blocks, Blocks)
    (batch, length), cfg, head = w.tokens.shape, blocks.head.layers, blocks.head
    # Every window is a page, with a number in its data shard; its blocks are slots that see it.
    pages = jnp.arange(batch)[:, None] % (batch // data_size(on.mesh))
    positions = jnp.broadcast_to(jnp.arange(length), w.tokens.shape)
    empty = [empty_cache(batch, length, cfg, i, jnp.float32) for i in range(cfg.num_hidden_layers)]
    context = blocks.context(params, on, [w.states[k].astype(jnp.float32) for k in head.taps])
    caches = blocks.write(params, on, context, positions, pages, tuple(empty))
    of_text = w.text[:, None] == jnp.take_along_axis(w.text, w.anchors, axis=1)[..., None]
    first = of_text.argmax(-1).reshape(-1)
    window, at = jnp.repeat(jnp.arange(batch), w.anchors.shape[1]), w.anchors.reshape(-1)
    seen = blocks.seen(at, jnp.ones_like(at, bool), first)
    x = blocks.run(params, on, w.tokens[window, at], seen, pages[window], caches)
    z = blocks.normed(params, x)
    for k in range(task.drafts):
        row, before, here = k if head.anchored else k + 1, at + k, at + k + 1
        counts = w.answer[window, at] & (w.text[window, at] == w.text[window, here])
        target = teacher[window, before], w.tokens[window, before], w.tokens[window, here], counts
        yield Drafted(z[:, row], *target)
