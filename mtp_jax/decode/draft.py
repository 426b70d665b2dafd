"""The NextN layers at inference: extending their cache over known tokens, and drafting ahead of them."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from mtp_jax.decode.keys import Drafting
from mtp_jax.decode.sampling import (
    Purpose,
    adjust,
    argmax,
    distribution,
    gumbel_sample,
    restrict,
    row_keys,
    sample,
)
from mtp_jax.decode.state import Slots, State
from mtp_jax.model import nextn
from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.ops import write
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Backend


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """K drafts of every slot, the NextN logits behind them, and the distribution each was drawn from.

    ``logits`` is None where only the drafts are handed on, ``probs`` in greedy steps.
    """

    tokens: Int[Array, "B K"]
    logits: Float[Array, "B K V"] | None
    probs: Float[Array, "B K V"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Extension:
    """The NextN caches and page tails with a window's rows, and what the row after each token merges.

    ``merged`` [B, W, k, D]: for layer 0 the trunk's hidden state of the token, z_{k-1} for the others.
    """

    pages: tuple[LayerCache, ...]
    tails: Array
    merged: Float[Array, "B W k D"]

    def carry(self, count: Int[Array, " B"], before: Float[Array, "B k D"]) -> Float[Array, "B k D"]:
        """What the row after the first ``count`` of the window merges: ``before`` if that is none."""
        last = jnp.maximum(count - 1, 0)[:, None, None, None]
        after = jnp.take_along_axis(self.merged, last, axis=1)[:, 0]
        return jnp.where((count > 0)[:, None, None], after, before)


def extend(
    params: Params,
    cfg: ModelConfig,
    pages: tuple[LayerCache, ...],
    tails: Float[Array, "P one C"],
    page_table: Int[Array, "B n"],
    tokens: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    hidden: Float[Array, "B W D"],
    carry: Float[Array, "B k D"],
    on: Backend,
) -> Extension:
    """Write the NextN rows of known tokens, every layer.

    The last layer's are written without its attention and MLP: nothing but a draft needs its output, and
    ``draft`` computes that from the row itself.

    hidden: the trunk's state of ``tokens``. carry: what the first row merges (see ``Slots``). Rows with a
    negative position are computed but not written. The last row of a page leaves its tail, too.
    """
    if not pages:
        return Extension(pages, tails, jnp.zeros((*tokens.shape, 0, hidden.shape[-1]), hidden.dtype))
    merged, out = [hidden], list(pages)
    last, size = len(pages) - 1, pages[0].page_size

    def before(k: int) -> Float[Array, "B W D"]:
        return jnp.concatenate([carry[:, k : k + 1], merged[k][:, :-1]], axis=1)

    for k in range(last):
        view = PagedView(page_table, nextn.existing(k, positions), nextn.seen(k, positions))
        z, out[k] = nextn.run(params, cfg, k, tokens, before(k), positions, pages[k], view, on)
        merged.append(z)
    out[last] = nextn.write_cache(
        params, cfg, last, tokens, before(last), positions, pages[last], page_table, on
    )
    stacked = jnp.stack(merged, axis=2)
    full = jnp.where(positions % size == size - 1, positions // size, -1)
    tails = write(tails, stacked.reshape(*tokens.shape, -1), page_table, full, on.mesh)
    return Extension(tuple(out), tails, stacked)


def draft(
    params: Params,
    cfg: ModelConfig,
    state: State,
    slots: Slots,
    page_table: Int[Array, "B n"],
    depth: int,
    drafting: Drafting | None,
    on: Backend,
    allowed: UInt32[Array, "B W words"] | None = None,
    coupled: bool = False,
) -> tuple[Drafts, tuple[LayerCache, ...]]:
    """Draft ``depth`` tokens per slot by recursion; layers are reused, step modulo layers.

    drafting: None for steps in which every row is greedy. allowed: what grammars allow at each position, as
    far as that is known before there are drafts (see ``restrict``). coupled: sample with the numbers that
    ``verify.coupled`` draws the target's tokens with. Returns (drafts, NextN caches): the rows of the newest
    token and of the drafts are past the committed length, garbage once the step is over.
    """
    pages, layers = list(state.nextn), len(state.nextn)
    token, z, counts = slots.newest, slots.carry[:, 0], slots.sampling.counts
    tokens: list[Array] = []
    raw: list[Array] = []
    probs: list[Array] = []
    newest = jnp.where(slots.active, slots.length, -1)[:, None]
    for k in range(1, min(layers, depth)):  # layer 0 writes its row of the newest token with the first draft
        before = slots.carry[:, k : k + 1]
        pages[k] = nextn.write_cache(params, cfg, k, token[:, None], before, newest, pages[k], page_table, on)
    for k in range(depth):
        layer, position = k % layers, slots.length + k
        write_to = jnp.where(slots.active, position, -1)[:, None]
        view = PagedView(page_table, write_to, nextn.seen_by_draft(k, layers, slots.length, slots.active))
        window, pages[layer] = nextn.run(
            params, cfg, layer, token[:, None], z[:, None], position[:, None], pages[layer], view, on
        )
        z = window[:, 0]
        with jax.named_scope("draft_sample"):
            logits = nextn.logits(params, layer, z)
            raw.append(logits)
            here = None if allowed is None else allowed[:, k : k + 1]
            if drafting is None:
                token = argmax(restrict(logits[:, None], here))[:, 0]
                tokens.append(token)
                continue
            generated = (slots.generated + k)[:, None]
            adjusted = adjust(logits[:, None], slots.sampling, counts[:, None], generated, here)
            token, q = _choose(adjusted, slots, drafting, k, coupled)
            counts = counts.at[jnp.arange(token.shape[0]), jnp.where(token < 0, counts.shape[1], token)].add(
                1, mode="drop"
            )
            tokens.append(token)
            probs.append(q)
    distributions = jnp.stack(probs, axis=1) if probs else None
    return Drafts(jnp.stack(tokens, axis=1), jnp.stack(raw, axis=1), distributions), tuple(pages)


def _choose(
    logits: Float[Array, "B one V"], slots: Slots, drafting: Drafting, k: int, coupled: bool
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """One draft per row and the distribution it comes from: a point mass when drafting greedily."""
    if drafting == "greedy":
        cold = replace(slots.sampling, temperature=jnp.zeros_like(slots.sampling.temperature))
        q = distribution(logits, cold)[:, 0]
        return argmax(q), q
    q = distribution(logits, slots.sampling)[:, 0]
    if coupled:
        return gumbel_sample(row_keys(slots.sampling.seed, slots.length + k, Purpose.SAMPLE), q), q
    return sample(row_keys(slots.sampling.seed, slots.length, Purpose.DRAFT + k), q), q
