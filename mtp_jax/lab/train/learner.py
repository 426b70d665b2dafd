"""Heads that learn to draft, by recursion or a block in one pass."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.errors import ConfigError
from mtp_jax.heads.blocks.drafts import BlockDrafter, Blocks
from mtp_jax.heads.build import build
from mtp_jax.lab.train.states import StateWindows
from mtp_jax.model import draft_module
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import empty_cache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_module import DraftModule, OfSome
from mtp_jax.model.head import head_of
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import data_size


class Teacher(NamedTuple):
    """The trunk's distribution of some tokens.

    Attributes:
        logits: the trunk's, of the tokens that the head drafts.
        total: logarithm of the sum of the exponentials of all tokens' logits.
        best: the most likely of all tokens.
    """

    logits: Float[Array, "*b v"]
    total: Float[Array, "*b"]
    best: Int[Array, "*b"]

    @classmethod
    def of(cls, logits: Float[Array, "*b V"], ids: Int[Array, " v"] | None) -> "Teacher":
        """ids: the tokens that the head drafts; None: all."""
        some = logits if ids is None else jnp.take(logits, ids, axis=-1)
        return cls(some, logsumexp(logits, axis=-1), logits.argmax(-1))


class Drafted(NamedTuple):
    """A draft for every row, at its place in the text.

    Attributes:
        z: the head's states, from which it drafts.
        teacher: the trunk's distribution of the draft's token.
        previous, tokens: the text's own tokens before the draft's place and there.
        counts: rows whose draft is of an answer.
    """

    z: Float[Array, "R d"]
    teacher: Teacher
    previous: Int[Array, " R"]
    tokens: Int[Array, " R"]
    counts: Bool[Array, " R"]


class Learner(Protocol):
    """The functions of a head that learns. Hashable."""

    @property
    def features(self) -> tuple[int, ...]:
        """The hidden states that it reads, as of ``Drafter.features``."""
        ...

    @property
    def block(self) -> int | None:
        """Drafts of the one pass that makes them all; None: each draft takes a pass."""
        ...

    def ids(self, params: Params) -> Int[Array, " v"] | None:
        """The tokens that logits are of; None: all."""
        ...

    def drafts(
        self, params: Params, on: Backend, w: StateWindows, count: int, teacher: Teacher
    ) -> Iterator[Drafted]:
        """Draft 0 of all rows, draft 1, ..., as the head makes them when it decodes.

        teacher: the distribution at every row, [B, n].
        """
        ...

    def logits(self, params: Params, on: Backend, k: int, drafted: Drafted) -> Float[Array, "R v"]:
        """The logits of draft ``k``, -inf for tokens that the head never drafts."""
        ...

    def candidates(self, params: Params, on: Backend, drafted: Drafted) -> Float[Array, "R v"] | None:
        """The logits whose best tokens are the candidates of a draft; None: all tokens are."""
        ...


@dataclass(frozen=True)
class Recursion:
    """A draft module."""

    module: DraftModule
    block: None = None

    @property
    def features(self) -> tuple[int, ...]:
        """The module's."""
        return self.module.features

    def ids(self, params: Params) -> Int[Array, " v"] | None:
        """See ``Learner``."""
        return self.module.ids(params) if isinstance(self.module, OfSome) else None

    def drafts(
        self, params: Params, on: Backend, w: StateWindows, count: int, teacher: Teacher
    ) -> Iterator[Drafted]:
        """The row at position i of a window drafts after token i + 1; draft k is of token i + 2 + k."""
        length = w.tokens.shape[1] - (count + 1)
        features = [w.states[k][:, :length].astype(jnp.float32) for k in self.features]
        together = w.text[:, :length, None] == w.text[:, None, :length]
        fused = self.module.fuse(params, on, features)
        drafts = draft_module.drafts_forced(self.module, params, on, w.tokens, fused, count, together)
        for k, draft in enumerate(drafts):
            before, here = (slice(k + i, k + i + length) for i in (1, 2))
            counts = w.answer[:, 1 : length + 1] & (w.text[:, :length] == w.text[:, here])
            wanted = jax.tree.map(lambda a, rows=before: a[:, rows], teacher)
            found = Drafted(draft.hidden, wanted, w.tokens[:, before], w.tokens[:, here], counts)
            yield jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), found)

    def logits(self, params: Params, on: Backend, k: int, drafted: Drafted) -> Float[Array, "R v"]:
        """The logits of the layer that makes this draft."""
        given = params, k % len(self.module.numbers), drafted.z, on
        return (
            self.module.own_logits(*given) if isinstance(self.module, OfSome) else self.module.logits(*given)
        )

    def candidates(self, params: Params, on: Backend, drafted: Drafted) -> None:
        """All tokens are."""


@dataclass(frozen=True)
class OnePass:
    """A head that drafts blocks."""

    module: Blocks

    @property
    def features(self) -> tuple[int, ...]:
        """The head's taps."""
        return self.module.head.taps

    @property
    def block(self) -> int:
        """Drafts of a block."""
        return self.module.head.most_drafts

    def ids(self, params: Params) -> None:
        """All: a draft's own logits are corrected at the tokens' places."""

    def drafts(
        self, params: Params, on: Backend, w: StateWindows, count: int, teacher: Teacher
    ) -> Iterator[Drafted]:
        """A block follows each anchor, and sees the contexts of its text before the anchor."""
        blocks = self.module
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
        for k in range(count):
            row, before, here = k if head.anchored else k + 1, at + k, at + k + 1
            counts = w.answer[window, at] & (w.text[window, at] == w.text[window, here])
            wanted = jax.tree.map(lambda a, at=before: a[window, at], teacher)
            yield Drafted(z[:, row], wanted, w.tokens[window, before], w.tokens[window, here], counts)

    def logits(self, params: Params, on: Backend, k: int, drafted: Drafted) -> Float[Array, "R V"]:
        """The logits after the text's token before the draft."""
        own = self.module.logits(params, on, drafted.z)
        return self.module.after(params, drafted.z, own, drafted.previous)

    def candidates(self, params: Params, on: Backend, drafted: Drafted) -> Float[Array, "R V"] | None:
        """The logits that know no token before, of a head that chooses among candidates."""
        return self.module.logits(params, on, drafted.z) if self.module.head.selector else None


def learner_of(cfg: ModelConfig) -> Learner:
    """A model's head, or its NextN layers. Raises ConfigError for a model without, or if it is not tuned."""
    head, drafter = head_of(cfg), build(cfg)
    if not cfg.attention.trained:
        raise ConfigError("DeepSeek-V4's MTP layers and DSpark stages are not tuned here; name another model")
    if head and head.untuned:
        raise ConfigError(head.untuned)
    match drafter:
        case Recursive(module):
            return Recursion(module)
        case BlockDrafter(module):
            return OnePass(module)
    raise ConfigError(
        "the model has no NextN layer to tune; name a head with draft_model, or begin one with fresh"
    )
