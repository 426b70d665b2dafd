"""Trees of an independent implementation: grown from its weights; verified, with masks and paths."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.decode import windows
from mtp_jax.decode.accept import accept_drafts
from mtp_jax.decode.arrays import Chunk
from mtp_jax.decode.bookkeeping import abstract_state, empty_state
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.grow import Candidates
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.keys import ACCEPTED, COUNT, SamplingMode, StepKey, TreeShape
from mtp_jax.decode.sampling import neutral_state
from mtp_jax.decode.state import State, StateShape
from mtp_jax.decode.step import Step
from mtp_jax.decode.verify import Verdict
from mtp_jax.heads.build import build
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.trunk import Model
from tests.golden import EAGLES, expected, model_dir
from tests.rounding import near, of_model

VARIANTS = [EAGLES[0], *(pytest.param(variant, marks=pytest.mark.rest) for variant in EAGLES[1:])]
# Trees of a variant, nodes of the largest one, and rows for it and for the prompt before it.
ROWS, WIDTH, PAGE, PROMPT = 2, 12, 64, 32
Found = tuple[np.ndarray, Verdict, np.ndarray, np.ndarray]


@functools.cache
def programs(cfg: ModelConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """To read prompts, and to verify: (packed results, the verdict, logits, the rows that nodes see)."""
    model, drafter, mode = Model(cfg, xla_cpu(experts="dense")), build(cfg), SamplingMode()

    def judged(params: Any, state: State, drafts: Drafts) -> tuple[jax.Array, Verdict, jax.Array, jax.Array]:
        seen = []

        def recorded(logits: jax.Array, *rest: Any) -> Verdict:
            seen.append((accept_drafts(logits, *rest), logits))
            return seen[0][0]

        with pytest.MonkeyPatch.context() as patch:  # while it is traced
            patch.setattr(windows, "accept_drafts", recorded)
            verifying = Step(Decoding(model, drafter), StepKey(ROWS, WIDTH - 1, 1, mode))
            _, result = verifying.verify(params, state, drafts, None)
        return result.packed, *seen[0], windows.rows_of(state, drafts, 1).view.visible.mask(WIDTH, PAGE)

    key = StepKey(0, 0, 1, mode, tokens=PROMPT, prompts=ROWS)
    return jax.jit(Step(Decoding(model, drafter), key)), jax.jit(judged)


@functools.cache
def begun(variant: str) -> tuple[Loaded, State]:
    """The model, and the state after the prompt and its first token, in every slot."""
    loaded, want = load(model_dir(variant), model_dir(variant, "draft"), dtype="float32"), expected(variant)
    cfg, row, many = loaded.config, np.arange(ROWS, dtype=np.int32), jnp.full(ROWS, 99)
    empty = empty_state(abstract_state(Model(cfg), build(cfg), StateShape(ROWS, ROWS, PAGE, 1)))
    greedy = replace(neutral_state(ROWS, cfg.vocab_size), temperature=jnp.zeros(ROWS))
    slots = empty.slots.replace(
        page_table=jnp.asarray(row[:, None]), remaining=many, depth=many, sampling=greedy
    )
    tokens, unknown = (
        np.tile(want["input_ids"].astype(np.int32), (ROWS, 1)),
        np.full((ROWS, PROMPT), -1, np.int32),
    )
    masks = np.full((ROWS, -(-cfg.vocab_size // 32)), 2**32 - 1, np.uint32)
    count = np.full(ROWS, PROMPT, np.int32)
    chunk = Chunk(row, row * 0, count, row >= 0, tokens, unknown, unknown[:, 0], masks)
    prefill, _ = programs(cfg)
    state, first = prefill(loaded.params, empty.replace(slots=slots), chunk)
    assert (np.asarray(first.packed)[:, 0] == want["greedy_ids"][0]).all()
    return loaded, state


def verified(variant: str, drafts: Drafts) -> Found:
    loaded, state = begun(variant)
    _, judged = programs(loaded.config)
    return jax.tree.map(np.asarray, judged(loaded.params, state, drafts))


def golden_trees(variant: str) -> list[dict[str, np.ndarray]]:
    want = expected(variant, "trees")
    return [
        {key.rpartition(".")[2]: a for key, a in want.items() if key.startswith(f"{n}.")}
        for n in names(variant)
    ]


def names(variant: str) -> list[str]:
    return sorted({key.rpartition(".")[0] for key in expected(variant, "trees")})


def drafts_of(trees: list[dict[str, np.ndarray]]) -> Drafts:
    """A tree in each of the first rows."""
    tokens, parents = np.zeros((2, ROWS, WIDTH - 1), np.int32)
    count = np.zeros(ROWS, np.int32)
    for row, own in enumerate(trees):
        count[row] = n = len(own["tokens"]) - 1
        tokens[row, :n], parents[row, :n] = own["tokens"][1:], own["parents"][1:]
    given: list[Any] = [tokens, count, 0 * count, None, None, parents]
    return Drafts(*given)


@pytest.mark.parametrize("variant", VARIANTS)
def test_trees_are_grown(variant, monkeypatch):
    loaded, state = begun(variant)
    found, best = [], Candidates.best

    def recorded(self: Candidates, nodes: int, count: jax.Array) -> Any:
        found.append(self)
        return best(self, nodes, count)

    monkeypatch.setattr(Candidates, "best", recorded)
    for name, want in zip(names(variant), golden_trees(variant), strict=True):
        topk, steps, nodes = (int(part[1:]) for part in name.split(".")[1].split("_"))
        shape = TreeShape(topk, steps, nodes - 1)
        model, drafter = Model(loaded.config, xla_cpu(experts="dense")), build(loaded.config, tree=shape)
        step = Step(Decoding(model, drafter), StepKey(ROWS, shape.nodes, 1, SamplingMode()))

        def drafted(params: Any, state: State, step: Step = step) -> Any:
            return step.draft(params, state, None)[1], found[-1]

        drafts, every = jax.tree.map(np.asarray, jax.jit(drafted)(loaded.params, state))
        for row in range(ROWS):
            np.testing.assert_array_equal(drafts.tokens[row], want["tokens"][1:])
            np.testing.assert_array_equal(drafts.parents[row], want["parents"][1:])
            np.testing.assert_array_equal(every.tokens[row], want["candidate_tokens"])
            # Factors of scores are probabilities, and errors of logits are relative errors of theirs.
            terms = shape.steps * of_model(loaded.config, PROMPT + WIDTH)
            near(np.log(every.scores[row]), np.log(want["candidate_scores"]), terms)


@pytest.mark.parametrize("variant", VARIANTS)
def test_trees_are_verified(variant):
    trees, (loaded, _) = golden_trees(variant), begun(variant)
    packed, verdict, logits, mask = verified(variant, drafts_of(trees))
    depths = []
    for row, want in enumerate(trees):
        n, accepted = len(want["tokens"]), len(want["accept_index"])
        assert mask[row, :n, :PROMPT].all()
        np.testing.assert_array_equal(mask[row, :n, PROMPT : PROMPT + n], want["mask"])
        near(logits[row, :n], want["target_logits"], of_model(loaded.config, PROMPT + n))
        np.testing.assert_array_equal(logits[row, :n].argmax(-1), want["target_ids"])
        assert verdict.path is not None
        np.testing.assert_array_equal(verdict.path[row, :accepted], want["accept_index"])
        np.testing.assert_array_equal(packed[row, : packed[row, WIDTH + COUNT]], want["emitted"])
        assert packed[row, WIDTH + ACCEPTED] == accepted - 1
        depths.append(accepted - 1)
    assert depths == {"eagle3": [2, 2], "eagle3_mla": [3, 3]}[variant]


def test_a_mask_of_other_ancestors_would_show():
    trees = golden_trees("eagle3")
    for own in trees:
        own["parents"] = np.arange(len(own["parents"])) - 1
    *_, logits, _ = verified("eagle3", drafts_of(trees))
    for row, want in enumerate(trees):
        n = len(want["tokens"])
        assert np.abs(logits[row, :n] - want["target_logits"]).max() > 1
