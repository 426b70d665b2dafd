"""The NextN layers at inference: extending their cache over known tokens, and drafting ahead of them."""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.config import ModelConfig
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
from mtp_jax.model.ops import PagedView, write_tails
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Backend

Drafting = Literal["greedy", "sampled"]


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
    """NextN outputs over a window: ``z[k]`` [B, W, D], the caches, and the page tails."""

    z: tuple[Array, ...]
    pages: tuple[Array, ...]
    tails: Array


def extend(
    params: Params,
    cfg: ModelConfig,
    pages: tuple[Array, ...],
    tails: Float[Array, "P one C"],
    page_table: Int[Array, "B n"],
    tokens: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    hidden: Float[Array, "B W D"],
    before: Float[Array, "B k D"],
    on: Backend,
) -> Extension:
    """Write the NextN rows of known tokens, every layer.

    hidden: the trunk's state of the token before each of ``tokens``. before: z_k of the token before the
    window. Rows with a negative position are computed but not written. The first row of a page also leaves
    what it merged as the tail of the page before.
    """
    z: list[Array] = []
    out: list[Array] = []
    merged: list[Array] = []
    for k in range(len(pages)):
        written = jnp.where(positions > k, positions, -1)
        view = _view(page_table, written, positions, pages[k].shape[1], first_row=k + 1)
        if k > 0:
            hidden = jnp.concatenate([before[:, k - 1 : k], z[-1][:, :-1]], axis=1)
        out_z, kept = nextn.run(params, cfg, k, tokens, hidden, positions, pages[k], view, on)
        z.append(out_z)
        out.append(kept)
        merged.append(hidden)
    if merged:
        size = pages[0].shape[1]
        full = jnp.where((positions > 0) & (positions % size == 0), positions // size - 1, -1)
        tails = write_tails(tails, jnp.concatenate(merged, axis=-1), page_table, full, on.mesh)
    return Extension(tuple(z), tuple(out), tails)


def _view(
    page_table: Int[Array, "B n"],
    written: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    page_size: int,
    first_row: int,
) -> PagedView:
    row = jnp.arange(page_table.shape[1] * page_size)
    mask = (row >= first_row) & (row <= positions[..., None])
    return PagedView(page_table, written, mask)


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
) -> tuple[Drafts, tuple[Array, ...]]:
    """Draft ``depth`` tokens per slot by recursion; layers are reused, step modulo layers.

    drafting: None for steps in which every row is greedy. allowed: what grammars allow at each position, as
    far as that is known before there are drafts (see ``restrict``). coupled: sample with the numbers that
    ``verify.coupled`` draws the target's tokens with. Returns (drafts, NextN caches): the rows of the drafts
    are past the committed length, garbage once the step is over.
    """
    pages, layers = list(state.nextn), len(state.nextn)
    z, counts = slots.carry[:, 0], slots.sampling.counts
    tokens: list[Array] = []
    raw: list[Array] = []
    probs: list[Array] = []
    for k in range(depth):
        layer = k % layers
        if k > 0:
            # Layer k's rows past the newest token exist only every `layers` positions.
            position = slots.length + k
            row = jnp.arange(page_table.shape[1] * pages[layer].shape[1])
            ahead = row - slots.length[:, None]
            seen = (row > layer) & (ahead <= k) & ((ahead <= 0) | (ahead % layers == layer))
            mask = (seen & slots.active[:, None])[:, None]
            write = jnp.where(slots.active, position, -1)[:, None]
            window, kept = nextn.run(
                params,
                cfg,
                layer,
                tokens[-1][:, None],
                z[:, None],
                position[:, None],
                pages[layer],
                PagedView(page_table, write, mask),
                on,
            )
            z, pages[layer] = window[:, 0], kept
        with jax.named_scope("draft_sample"):
            logits = nextn.logits(params, layer, z)
            raw.append(logits)
            here = None if allowed is None else allowed[:, k : k + 1]
            if drafting is None:
                tokens.append(argmax(restrict(logits[:, None], here))[:, 0])
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


def window_positions(start: Int[Array, " B"], width: int, valid: Bool[Array, "B W"]) -> Int[Array, "B W"]:
    """Rows ``start, start + 1, ...``; -1 where not valid."""
    return jnp.where(valid, start[:, None] + jnp.arange(width), -1)
