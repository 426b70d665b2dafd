"""Trees of drafts in an engine: masks of grammars along every way, and texts of depth 0."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.decode import runner
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.drafter.suffix import Suffix
from mtp_jax.decode.state import DrafterState, Slots
from mtp_jax.decode.tree import depths, lineage
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.structured import allowed
from mtp_jax.model.backend import Backend
from mtp_jax.model.nextn import NextNLayers
from mtp_jax.model.params import Params
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.engine.structured import CFG, engine_with, params
from tests.models import accepted, engine_config, prompts, runner_of, serve

CHOICE = StructuredOutput(choice=["a rather long choice!", "a rather lame one.", "other"])
REGEX = StructuredOutput(regex="[a-m ]{6,16}[x-z]")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    found = Tokenizer.from_dir(tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), 104))
    assert found is not None
    return Grammars(found, CFG.vocab_size, CFG.eos_token_ids)


def test_masks_follow_the_way_to_their_node(grammars):
    rows, drafts = 3, 9
    engine = engine_with(grammars, num_speculative_tokens=drafts)
    wanted = (0, CHOICE), (2, REGEX)
    requests = [(row, engine.make_request([5], SamplingParams(structured=w))) for row, w in wanted]
    rng = np.random.default_rng(2)
    parents = np.array([[rng.integers(0, i + 1) for i in range(drafts)] for _ in range(rows)])
    letters = [grammars.encode(c)[0] for c in "ao rtx"]
    tokens, shape = rng.choice(letters, (rows, drafts)), (rows, drafts + 1)
    steps = np.asarray(depths(lineage(jnp.asarray(parents[:1]))))[0]
    tokens[0, 1:] = np.array(grammars.encode("a rather long choice!"))[steps[2:] - 1]  # all but a first draft
    got = allowed(grammars, requests, shape, CFG.vocab_size, tokens, parents)
    seen = set()
    for node in range(drafts + 1):
        along, lengths = np.full_like(tokens, -1), []
        for row in range(rows):
            way, at = [], node
            while at:
                way.insert(0, tokens[row, at - 1])
                at = parents[row, at - 1]
            along[row, : len(way)] = way
            lengths.append(len(way))
        want = allowed(grammars, requests, shape, CFG.vocab_size, along)
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(got[row, node], want[row, length])
            seen.add(got[row, node].tobytes())
    assert (got[1] == 2**32 - 1).all()
    assert len(seen) > 4


@dataclass(frozen=True)
class Forked(Recursive):
    """The module's drafts, each behind a sibling that is another token: the rows of all that is kept move."""

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        chain = rules.replace(depth=rules.depth // 2, wanted=rules.wanted // 2)
        made, after = super().propose(params, own, s, chain, on)
        vocab, count = self.module.trunk.vocab_size, jnp.full_like(s.length, rules.wanted)
        twins = jnp.stack([(made.tokens + 1) % vocab, made.tokens], axis=2)
        tokens = jnp.pad(twins.reshape(len(count), -1), ((0, 0), (0, rules.depth % 2)))
        parents = jnp.broadcast_to(jnp.arange(rules.depth) // 2 * 2, tokens.shape)
        probs = None if rules.drafting is None else jnp.zeros((*tokens.shape, vocab))
        return Drafts(tokens, count, made.source, None, probs, parents), after


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forked", "behind matches", "grown"])
def test_texts_are_those_of_depth_0(grammars, monkeypatch, kind):
    """Greedy rows, rows that draw, under penalties and grammars; again after a prefix hit."""
    forked = Forked(NextNLayers(CFG))
    if kind != "grown":
        monkeypatch.setattr(runner, "build", lambda *_: forked if kind == "forked" else Suffix(forked))
    greedy = SamplingParams(temperature=0, max_tokens=60, logprobs=0, ignore_eos=True)
    drawn = replace(greedy, temperature=0.8, seed=5, repetition_penalty=1.2, min_tokens=9)
    shaped = [
        replace(p, structured=w, ignore_eos=False, min_tokens=0)
        for p in (greedy, drawn)
        for w in (CHOICE, REGEX)
    ]
    jobs = list(zip(prompts(8, 20, vocab=104), [greedy, drawn, *shaped, greedy, drawn], strict=True))

    def engine(depth: int) -> Engine:
        config = engine_config(max_model_len=248, num_speculative_tokens=depth, verifier="coupled")
        config = replace(config, tree="2x3x6" if depth and kind == "grown" else None)
        return Engine(CFG, config, runner_of(CFG, params(), config), grammars)

    trees = engine(6)
    plain, first, again = serve(engine(0), jobs), serve(trees, jobs), serve(trees, jobs)
    for want, *found in zip(plain, first, again, strict=True):
        for got in found:
            assert got.progress.output == want.progress.output
    assert all(r.progress.cached_tokens > 0 for r in again)
    for got in (*first, *again):
        # A node of a tree is one step further than its number says only once in two.
        assert sum(accepted(got)) > 0.1 * len(got.progress.output)
