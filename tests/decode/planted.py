"""A drafter that knows the text, and proposes it in random trees: the rows of all that it gets right move."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.decode import tree
from mtp_jax.decode.arrays import Chunk
from mtp_jax.decode.bookkeeping import abstract_state
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.protocol import Drafter, Drafts
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import ACCEPTED, COUNT, DRAFTED, SamplingMode, StepKey
from mtp_jax.decode.sampling import neutral_state
from mtp_jax.decode.state import DrafterState, Slots, State, StateShape
from mtp_jax.decode.step import Step
from mtp_jax.heads.build import build
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Model
from tests.decode.helpers import zeroed
from tests.models import prompts, tiny_params

ROWS, DEPTH, SIZE, COLUMNS, PROMPT = 6, 9, 8, 7, 5
LENGTH = SIZE * COLUMNS  # of the longest text
SAMPLED = SamplingMode("sampled", "coupled", logprobs=0)


@dataclass(frozen=True)
class Planted(Recursive):
    """Trees about the texts of the slots. Draft 0 is always wrong, the others are right at a rate.

    Attributes:
        texts: of each slot; a text's token i has position i.
    """

    texts: tuple[tuple[int, ...], ...] = ()
    rate: float = 0.8

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Any
    ) -> tuple[Drafts, DrafterState]:
        shape = len(s.length), rules.depth
        keys = jax.random.split(jax.random.fold_in(jax.random.key(7), jnp.sum(s.length)), 3)
        parents = jax.random.randint(keys[0], shape, 0, jnp.arange(rules.depth) + 1)
        position = s.length[:, None] + tree.depths(tree.lineage(parents))[:, 1:]
        right = jnp.take_along_axis(jnp.asarray(self.texts), jnp.minimum(position, LENGTH - 1), axis=1)
        wrong = (
            right + jax.random.randint(keys[1], shape, 1, self.module.trunk.vocab_size)
        ) % self.module.trunk.vocab_size
        hit = (jax.random.uniform(keys[2], shape) < self.rate) & (jnp.arange(rules.depth) > 0)
        probs = None if rules.drafting is None else jnp.zeros((*shape, self.module.trunk.vocab_size))
        count = jnp.full_like(s.length, rules.depth)
        return Drafts(jnp.where(hit, right, wrong), count, count * 0, None, probs, parents), own


@dataclass(frozen=True)
class World:
    """A model and its cache. Rows 0 and 1 are greedy, the others draw, under penalties."""

    cfg: ModelConfig
    fp8: bool = False

    @property
    def model(self) -> Model:
        return Model(self.cfg, xla_cpu(experts="dense"))

    def step(self, drafter: Drafter, key: StepKey) -> Callable[..., Any]:
        return jax.jit(Step(Decoding(self.model, drafter), key))

    def prefill(self) -> Callable[[list[list[int]]], tuple[State, np.ndarray]]:
        """A function that reads texts, of any length, into an empty state: (state, the tokens after them)."""
        drafter = build(self.cfg)
        shape = StateShape(ROWS, ROWS * COLUMNS, SIZE, COLUMNS, fp8=self.fp8)
        empty = zeroed(abstract_state(self.model, drafter, shape))
        table = np.random.default_rng(3).permutation(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
        drawn = jnp.arange(ROWS) > 1
        sampling = replace(
            neutral_state(ROWS, self.cfg.vocab_size),
            seed=jnp.arange(ROWS, dtype=jnp.uint32) + 11,
            temperature=jnp.where(drawn, 0.8, 0.0),
            repetition=jnp.where(drawn, 1.2, 1.0),
            frequency=jnp.where(drawn, 0.3, 0.0),
            min_tokens=jnp.where(drawn, 7, 0),
            logit_bias=jnp.zeros((ROWS, self.cfg.vocab_size)),
        )
        slots = replace(
            empty.slots,
            page_table=jnp.asarray(table, jnp.int32),
            remaining=jnp.full(ROWS, 1000),
            depth=jnp.full(ROWS, DEPTH),
            sampling=sampling,
        )
        empty = replace(empty, slots=slots)
        run = self.step(drafter, StepKey(0, 0, COLUMNS, SAMPLED, tokens=LENGTH, prompts=ROWS))

        def read(texts: list[list[int]]) -> tuple[State, np.ndarray]:
            tokens = np.zeros((ROWS, LENGTH), np.int32)
            for row, text in enumerate(texts):
                tokens[row, : len(text)] = text
            number = np.arange(ROWS, dtype=np.int32)
            words = -(-self.cfg.vocab_size // 32)
            chunk = Chunk(
                number,
                number * 0,
                np.array([len(text) for text in texts], np.int32),
                number >= 0,
                tokens,
                np.full_like(tokens, -1),
                np.full_like(number, -1),
                np.full((ROWS, words), 2**32 - 1, np.uint32),
            )
            state, result = run(self.params, empty, chunk)
            return state, np.asarray(result.packed)[:, 0]

        return read

    @property
    def params(self) -> Params:
        return tiny_params(self.cfg)


@dataclass
class Told:
    """Texts of all rows, prompts included, log-probabilities of their outputs, and drafts."""

    texts: list[list[int]]
    logprobs: list[list[float]]
    accepted: int = 0
    drafted: int = 0


def decode(
    world: World, drafter: Drafter, depth: int, state: State, begun: list[list[int]]
) -> tuple[State, Told]:
    """Go on from a state until no row has room for another step."""
    told = Told([list(text) for text in begun], [[] for _ in begun])
    run = world.step(drafter, StepKey(ROWS, depth, COLUMNS, SAMPLED))
    while max(map(len, told.texts)) + DEPTH + 1 < LENGTH:
        state, result = run(world.params, state)
        packed, width = np.asarray(result.packed), depth + 1
        for row, text in enumerate(told.texts):
            count = packed[row, width + COUNT]
            text += packed[row, :count].tolist()
            told.logprobs[row] += np.asarray(result.logprobs.chosen)[row, :count].tolist()
        told.accepted += int(packed[:, width + ACCEPTED].sum())
        told.drafted += int(packed[:, width + DRAFTED].sum())
    return state, told


def beginnings(world: World) -> list[list[int]]:
    return [p[:PROMPT] for p in prompts(ROWS, PROMPT, vocab=world.cfg.vocab_size)]
