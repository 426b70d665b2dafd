"""A language instead of a model: the next token is a hash of all tokens before it. No jax here.

Each token leaves a *row* in the cache, a hash of the token and its position. The *hidden state* after a
token, which a model computes from cached rows, is a hash of their sum. So one row that is missing, stale or
in the wrong place changes all text behind it, as it would with a model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from mtp_jax.errors import ConfigError

Hash = TypeVar("Hash", int, np.ndarray)

BITS = 64
MASK = 2**BITS - 1
NAN = MASK
"""The row of a token after which a model's numbers are not finite."""

_FLOOR = 50  # logits end here: a bias of 100 decides against all of them


def mix(x: Hash) -> Hash:
    """A hash of 64 bits, of a number or of every element (splitmix64, Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class Language:
    """The text of a simulated model, and the quality of its drafts.

    A token's logit is minus its rank, and never below -50. First comes a word that the hidden state chooses,
    then the other words in their order, then all other tokens. A row that samples draws a rank by its seed.

    Attributes:
        vocab: number of tokens.
        rates: the probability that each draft is the next token, if all earlier drafts were; the last rate
            holds for all further drafts. Without rates nothing is drafted.
        seed: names the language, as weights name a model.
        words: tokens that occur; None: all but ``ends`` and ``broken``.
        ends: tokens that end a text; the first one is said with probability ``end_rate``.
        end_rate: see ``ends``.
        broken: tokens after which no number is finite.
    """

    vocab: int
    rates: tuple[float, ...] = ()
    seed: int = 0
    words: tuple[int, ...] | None = None
    ends: tuple[int, ...] = ()
    end_rate: float = 0.0
    broken: frozenset[int] = field(default=frozenset())

    def __post_init__(self) -> None:
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise ConfigError(f"rates = {self.rates}; expected probabilities from 0 to 1, such as 0.85, 0.7")
        if not self.spoken:
            raise ConfigError(f"a language of {self.vocab} tokens has no words; give it some")

    @cached_property
    def spoken(self) -> tuple[int, ...]:
        """The words."""
        if self.words is not None:
            return self.words
        return tuple(t for t in range(self.vocab) if t not in self.ends and t not in self.broken)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {token: i for i, token in enumerate(self.spoken)}

    @cached_property
    def _others(self) -> tuple[int, ...]:
        return tuple(t for t in range(self.vocab) if t not in self._place)

    @cached_property
    def _log_sum(self) -> float:
        return math.log(sum(math.exp(-min(rank, _FLOOR)) for rank in range(self.vocab)))

    def row(self, token: int, position: int) -> int:
        """The row of a token at this position."""
        return NAN if token in self.broken else mix(mix(self.seed ^ token << 20) + position)

    def total(self, tokens: Sequence[int]) -> int:
        """The sum of the rows of a text."""
        return sum(self.row(t, i) for i, t in enumerate(tokens)) & MASK

    def _first(self, hidden: int, heat: int = 0) -> tuple[int, bool]:
        """The word that comes first, and whether an end comes before it.

        heat: a number that a row samples by; 0: the likeliest token is taken.
        """
        key = mix(hidden)
        ends = bool(self.ends) and mix(key + 1) < self.end_rate * MASK
        drawn = -math.log1p(-(mix(key ^ heat) >> 11) * 2.0**-53) if heat else 0.0
        return (key + int(drawn)) % len(self.spoken), ends

    def next(self, hidden: int, heat: int = 0) -> int:
        """The token that follows."""
        word, ends = self._first(hidden, heat)
        return self.ends[0] if ends else self.spoken[word]

    def another(self, token: int) -> int:
        """A word that is not this token, where there are two."""
        return self.spoken[(self._place.get(token, -1) + 1) % len(self.spoken)]

    def right(self, hidden: int, k: int) -> bool:
        """Whether the k-th draft after a hidden state is the next token, by ``rates``."""
        return mix(hidden + 2 + k) < self.rates[min(k, len(self.rates) - 1)] * MASK

    def margin(self, hidden: int, k: int) -> float:
        """How sure the drafter is of the k-th draft after a hidden state: surer where it is right, mostly."""
        right, chance = mix(hidden + 2 + k), mix(hidden - 1 - k)
        return 4 - (right + chance) / MASK

    def likeliest(self, hidden: int, count: int) -> list[int]:
        """The first tokens in the order of their ranks."""
        word, ends = self._first(hidden)
        words = [*self.spoken[word : word + count], *self.spoken[: max(0, word + count - len(self.spoken))]]
        found = [*self.ends[:ends], *words[:count]]
        others = (t for t in self._others if t not in found)
        return [*found, *(t for t, _ in zip(others, range(count - len(found)), strict=False))][:count]

    def rank(self, hidden: int, token: int) -> int:
        """The number of tokens that come before this token."""
        word, ends = self._first(hidden)
        if ends and token == self.ends[0]:
            return 0
        if token in self._place:
            return (self._place[token] - word) % len(self.spoken) + ends
        return len(self.spoken) + self._others.index(token)

    def logprob(self, rank: int) -> float:
        """The natural logarithm of the probability of the token with this rank."""
        return -min(rank, _FLOOR) - self._log_sum

    def logits(self, hidden: int, heat: int = 0) -> np.ndarray:
        """Logits of all tokens, float32 [vocab], or as a row that samples draws them."""
        word, ends = self._first(hidden, heat)
        found = np.full(self.vocab, -_FLOOR, np.float32)
        count = len(self.spoken)
        first = [self.spoken[(word + i) % count] for i in range(min(_FLOOR, count))]  # others have the floor
        found[first] = -np.arange(len(first)) - ends
        if ends:
            found[self.ends[0]] = 0
        return found
