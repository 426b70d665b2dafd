"""The objective of a draft head for a frozen trunk: its drafts are to have the trunk's own distribution."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.drafter.protocol import FINAL
from mtp_jax.lab.train.learner import Drafted, Learner, Teacher
from mtp_jax.lab.train.states import StateWindows
from mtp_jax.lab.train.tune_options import Objective
from mtp_jax.model import trunk
from mtp_jax.model.backend import Backend
from mtp_jax.model.params import Params

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

    head: Learner
    on: Backend
    drafts: int
    objective: Objective
    decay: float

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams that the head reads."""
        return tuple(sorted({k for k in self.head.features if k != FINAL}))

    @property
    def extra(self) -> int:
        """Tokens of a window behind the rows from which drafts follow."""
        return self.drafts + 1


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
    logits = trunk.logits(params, windows.states[FINAL].astype(jnp.float32), task.on)
    teacher = Teacher.of(jax.lax.stop_gradient(logits), task.head.ids(params))
    return task.head.drafts(params, task.on, windows, task.drafts, teacher)


def _figures(task: Task, k: int, params: Params, drafted: Drafted) -> tuple[Array, Array, Array]:
    """(Objective, whether the most likely tokens agree, overlap) of every row of draft ``k``."""
    given, ids = task.head.logits(params, task.on, k, drafted), task.head.ids(params)
    loss, same, overlap = compared(task, given, drafted, ids)
    # Logits that learn nothing from a choice among their best tokens learn by themselves.
    if (candidates := task.head.candidates(params, task.on, drafted)) is not None:
        loss += compared(task, candidates, drafted, ids)[0]
    return loss, same, overlap


def compared(
    task: Task, given: Float[Array, "R v"], drafted: Drafted, ids: Int[Array, " v"] | None
) -> tuple[Array, Array, Array]:
    """``_figures`` of logits. given: -inf for tokens that are never drafted. ids: the tokens; None: all."""
    teacher = drafted.teacher
    drafts = jnp.isfinite(given)
    logits = jnp.where(drafts, given, _NEVER)
    p, log_q = jnp.exp(teacher.logits - teacher.total[:, None]), jax.nn.log_softmax(logits)
    overlap = jnp.minimum(p, jnp.exp(log_q)).sum(-1)
    if task.objective == "tv":
        loss = 1 - overlap
    elif task.objective == "kl":  # from the trunk's distribution over the tokens that are drafted
        wanted = jax.nn.log_softmax(jnp.where(drafts, teacher.logits, _NEVER))
        loss = (jnp.exp(wanted) * (wanted - log_q)).sum(-1)
    else:
        at, known = (drafted.tokens, True) if ids is None else _found(ids, drafted.tokens)
        chosen = jnp.take_along_axis(log_q, at[:, None], axis=-1)[:, 0]
        loss = jnp.where(known & (chosen > _NEVER / 2), -chosen, 0)
    best = logits.argmax(-1)
    return loss, (best if ids is None else ids[best]) == teacher.best, overlap


def _found(ids: Int[Array, " v"], tokens: Int[Array, " R"]) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
    """(A place of each token among ``ids``, whether it is there)."""
    order = jnp.argsort(ids)
    at = order[jnp.minimum(jnp.searchsorted(ids, tokens, sorter=order), len(ids) - 1)]
    return at, ids[at] == tokens
