"""Drafts from the sequence itself: the tokens after the longest earlier occurrence of its last tokens.

This drafter stands before another one. In rows with a match its drafts replace the other's, as the drafts of
the suffix automaton of TensorRT-LLM's MTP do. The match is the one that such an automaton finds: the longest
suffix that occurs earlier, up to ``REACH`` tokens, and the most recent of its occurrences. It is found by
comparison, in 3 L REACH integer operations per row on the L tokens of its page table: 0.4 million for 4,096
tokens, where one token through one layer of DeepSeek-V3 takes 1,200 million.

Where slots see outputs of other requests (``SlotRow.texts``), a match may lie in these, too: they stand
before the sequence, so that of equal matches its own is the most recent. Drafts end where such a text ends.

The drafts are point masses that depend on committed tokens, and on texts that were handed over with the slot,
alone, so every verifier stays exact.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from mtp_jax.decode.drafter.protocol import Committed, Drafter, Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import MAX_DRAFTS, Origin
from mtp_jax.decode.sampling import permits
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.model.backend import Backend
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import partition, sharded

# A shorter match is left to the other drafter: TensorRT-LLM's threshold.
SHORTEST = 4
# Tokens of the longest window: occurrences that agree for longer are told apart by age alone.
REACH = MAX_DRAFTS + 1


class SuffixPages(struct.PyTreeNode):
    """State in each page: its committed tokens, and the other drafter's part.

    Tokens kept by page are found again after a prefix hit, a preemption or a move.
    """

    tokens: Int[Array, "P S one"]
    other: Any


@dataclass(frozen=True)
class Suffix:
    """Drafts from a match of ``shortest`` tokens or more, else the drafts of ``other``."""

    other: Drafter
    shortest: int = SHORTEST

    @property
    def features(self) -> tuple[int, ...]:
        """The other drafter's."""
        return self.other.features

    @property
    def deferral(self) -> int:
        """The other drafter's: tokens are kept at once."""
        return self.other.deferral

    def empty(self, shape: StateShape, pages: int) -> DrafterState:
        """No tokens yet."""
        other = self.other.empty(shape, pages)
        tokens = jnp.zeros((pages, shape.page_size, 1), jnp.int32)
        return other.replace(pages=SuffixPages(tokens, other.pages))

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        """The other drafter's drafts, replaced as a whole where a match has drafts that grammars allow."""
        drafts, after = self.other.propose(params, _others(own), s, rules, on)
        with jax.named_scope("suffix"):
            tokens = _read(own.pages.tokens, s.page_table, on.mesh)
            tokens = jnp.where(jnp.arange(tokens.shape[1]) == s.length[:, None], s.newest[:, None], tokens)
            last, own_from = s.length, 0
            if s.texts is not None:
                own_from = s.texts.shape[1]
                tokens, last = jnp.concatenate([s.texts, tokens], axis=1), last + own_from
            end, matched = longest_match(tokens, last)
            found = continuation(tokens, last, end, rules.depth)
            use = s.suffix & s.active & (matched >= self.shortest) & permits(rules.allowed, found)
            source = jnp.where(end < own_from, Origin.STORE, Origin.SUFFIX)
            drafts = _replaced(drafts, use, found, source, rules.wanted)
            if drafts.margins is not None:  # the longer the match, the surer its drafts
                drafts = drafts.replace(margins=jnp.where(use[:, None], matched[:, None], drafts.margins))
        return drafts, _with_others(own, after)

    def observe(self, params: Params, own: DrafterState, seen: Committed, on: Backend) -> DrafterState:
        """Keep the tokens, and let the other drafter observe them."""
        kept = on.write(own.pages.tokens, seen.tokens[..., None], seen.page_table, seen.positions)
        other = self.other.observe(params, _others(own), seen, on)
        return other.replace(pages=SuffixPages(kept, other.pages))

    def flush(self, params: Params, own: DrafterState, s: Slots, on: Backend) -> DrafterState:
        """Do the other drafter's deferred work."""
        return _with_others(own, self.other.flush(params, _others(own), s, on))

    def resume(self, own: DrafterState, slot: Int[Array, ""], page: Int[Array, ""]) -> DrafterState:
        """The pages have their tokens; the other drafter goes on from the last one."""
        return _with_others(own, self.other.resume(_others(own), slot, page))


def _others(own: DrafterState) -> DrafterState:
    return own.replace(pages=own.pages.other)


def _with_others(own: DrafterState, other: DrafterState) -> DrafterState:
    return other.replace(pages=own.pages.replace(other=other.pages))


def _read(pages: Int[Array, "P S one"], table: Int[Array, "B n"], mesh: Mesh | None) -> Int[Array, "B L"]:
    """The tokens of each slot's pages, in order."""

    def local(pages: Array, table: Array) -> Array:
        return pages[table].reshape(len(table), -1)

    slots = partition("slots")
    return sharded(local, mesh, (partition("pages"), slots), slots)(pages, table)


def longest_match(
    tokens: Int[Array, "B L"], last: Int[Array, " B"], reach: int = REACH
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The longest suffix of tokens[: last + 1] that occurs earlier in it, up to ``reach`` tokens.

    tokens: up to ``last`` texts, each of which a negative number ends, the last one apart; anything after it.
    Returns (index of the last token of its most recent earlier occurrence that another token follows, its
    length); the index means nothing where the length is 0.
    """
    index = jnp.arange(tokens.shape[1])
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    here = (index < last[:, None]) & (following >= 0)
    matched = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(reach):  # unrolled: one fused pass over the tokens
        wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], axis=1)
        before = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, : tokens.shape[1]]
        here &= (before == wanted) & (wanted >= 0)
        matched += here
    best = jnp.max(matched * tokens.shape[1] + index, axis=1)
    return best % tokens.shape[1], best // tokens.shape[1]


def continuation(
    tokens: Int[Array, "B L"], last: Int[Array, " B"], end: Int[Array, " B"], count: int
) -> Int[Array, "B K"]:
    """``count`` tokens that follow if tokens[: last + 1] goes on as it did after ``end`` < ``last``.

    Behind the last known token the continuation starts anew: a text that repeats itself goes on repeating. A
    negative number is the end of the text that it was found in; numbers after it have no meaning.
    """
    period = jnp.maximum(last - end, 1)[:, None]
    index = end[:, None] + 1 + jnp.arange(count) % period
    return jnp.take_along_axis(tokens, jnp.minimum(index, tokens.shape[1] - 1), axis=1)


def _replaced(
    drafts: Drafts,
    use: Bool[Array, " B"],
    tokens: Int[Array, "B K"],
    source: Int[Array, " B"],
    wanted: Int[Array, ""] | int,
) -> Drafts:
    """``drafts`` with the rows in which ``use`` is set replaced by point masses at ``tokens``.

    There are ``wanted`` of these at most, and none from the first negative number on.
    """
    count = jnp.minimum(wanted, jnp.sum(jnp.cumprod(tokens >= 0, axis=1), axis=1))
    tokens = jnp.maximum(tokens, 0)
    probs = drafts.probs
    if probs is not None:
        one_hot = jax.nn.one_hot(tokens, probs.shape[-1], dtype=probs.dtype)
        probs = jnp.where(use[:, None, None], one_hot, probs)
    parents = drafts.parents
    if parents is not None:
        parents = jnp.where(use[:, None], jnp.arange(tokens.shape[1]), parents)
    return drafts.replace(
        tokens=jnp.where(use[:, None], tokens, drafts.tokens),
        count=jnp.where(use, count, drafts.count),
        source=jnp.where(use, source, drafts.source),
        probs=probs,
        parents=parents,
    )
