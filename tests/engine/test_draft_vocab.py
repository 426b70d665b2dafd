"""Drafts that choose among a part of the vocabulary: texts of depth 0, and drafts of no other token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.api.propose import propose
from mtp_jax.checkpoint import load
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.model.params import shapes
from mtp_jax.model.sharding import make_mesh
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.engine import structured
from tests.golden import model_dir
from tests.models import SMALL, Reference, accepted, make_engine, on_mesh, prompts, rigged, serve, tiny_params
from tests.rounding import near, of_model

# Two tokens of three: some drafts of the whole vocabulary lie outside.
IDS = tuple(i for i in reversed(range(SMALL.vocab_size)) if i % 3)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=3)
PROMPTS = prompts(4, vocab=SMALL.vocab_size)
PARAMS = tiny_params(SMALL)
rest, slow = pytest.mark.rest, pytest.mark.slow


def engine_of(**config: Any) -> Engine:
    return make_engine(PARAMS, SMALL, **config)


def told(
    engine: Engine, options: SamplingParams, given: list[list[int]] = PROMPTS
) -> tuple[list[list[int]], int]:
    """Texts, and the number of accepted drafts."""
    requests = serve(engine, [(prompt, options) for prompt in given])
    return [r.progress.output for r in requests], sum(sum(accepted(r)) for r in requests)


@rest
def test_drafts_are_the_likeliest_of_the_part():
    engine, reference = engine_of(draft_vocab=IDS), Reference(PARAMS, SMALL)
    outside = np.setdiff1d(np.arange(SMALL.vocab_size), IDS)
    moved = 0
    for prompt in PROMPTS:
        token, ids, logits = propose(engine, prompt, 3)
        whole, expected = reference.drafts([*prompt, token], 1)
        assert (logits[:, outside] == -np.inf).all()
        near(logits[0, list(IDS)], expected[0, list(IDS)], of_model(SMALL, len(prompt) + 4))
        assert ids[0] == min(IDS, key=lambda i: (-expected[0, i], i))
        moved += ids[0] != whole[0]
    assert moved


def test_texts_are_those_of_depth_0():
    plain, none = told(engine_of(num_speculative_tokens=0), GREEDY)
    part, some = told(engine_of(draft_vocab=IDS), GREEDY)
    assert part == plain
    assert none == 0 < some


@rest
def test_fewer_drafts_are_accepted_than_of_the_whole():
    for options in (GREEDY, SAMPLED):
        part, some = told(engine_of(draft_vocab=IDS, verifier="coupled"), options)
        whole, most = told(engine_of(verifier="coupled"), options)
        assert part == whole
        assert 0 < some < most


def test_new_weights_bring_new_rows():
    engine, other = engine_of(draft_vocab=IDS), rigged(SMALL, seed=5)
    runner = local_runner(engine)
    runner.take(shapes(PARAMS))  # as while memory is released
    runner.take(other)
    rows = runner.params.draft_rows
    assert rows is not None
    places = np.asarray(rows.places)
    assert np.array_equal(np.asarray(rows.table)[places[list(IDS)]], np.asarray(other.head)[list(IDS)])
    assert (np.delete(places, IDS) >= len(rows.table)).all()


@rest
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_a_mesh_changes_nothing(shape):
    mesh = make_mesh(*shape)
    split = make_engine(on_mesh(PARAMS, mesh, SMALL), SMALL, mesh, draft_vocab=IDS)
    assert told(split, GREEDY) == told(engine_of(draft_vocab=IDS), GREEDY)
    rows = local_runner(split).params.draft_rows
    assert rows is not None
    assert rows.table.sharding.shard_shape(rows.table.shape)[0] == len(rows.table) // shape[1]


@slow
def test_trees_are_grown_of_the_part():
    given: dict[str, Any] = {"tree": "2x3x6", "num_speculative_tokens": 6, "verifier": "coupled"}
    for options in (GREEDY, SAMPLED):
        plain, _ = told(engine_of(num_speculative_tokens=0, verifier="coupled"), options)
        part, some = told(engine_of(draft_vocab=IDS, **given), options)
        whole, most = told(engine_of(**given), options)
        assert part == whole == plain
        assert 0 < some < most


@slow
def test_a_grammar_may_leave_nothing_of_the_part(tmp_path):
    """Where no token of the part is allowed there is no draft, and the text is the grammar's."""
    tokenizer = Tokenizer.from_dir(tiny_tokenizer.write(tmp_path, 104))
    assert tokenizer is not None
    grammars = Grammars(tokenizer, structured.CFG.vocab_size, structured.CFG.eos_token_ids)
    wanted = StructuredOutput(regex="[a-m ]{6,16}[x-z]")
    letters = [grammars.encode(c)[0] for c in "abcdefghijklm "]
    found = []
    for ids in (None, (*letters[::2], *structured.CFG.eos_token_ids), (2, 3)):
        engine = structured.engine_with(grammars, draft_vocab=ids)
        for options in (GREEDY, replace(SAMPLED, seed=1)):
            asked = replace(options, structured=wanted, ignore_eos=False)
            requests = serve(engine, [(p, asked) for p in prompts(4, vocab=104)])
            assert all(r.progress.finish_reason == "stop" for r in requests)
            found.append([r.progress.output for r in requests] if options is GREEDY else None)
    assert found[0] == found[2] == found[4]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dflash", "v4_fp4"])
def test_other_drafts_that_share_the_table(variant):
    """A head that drafts blocks, and the layers of a model with several streams."""
    draft = model_dir(variant, "draft") if variant == "dflash" else None
    found = load(model_dir(variant), draft)
    ids = tuple(range(0, found.config.vocab_size, 2))
    given: dict[str, Any] = {"max_model_len": 128, "page_size": found.config.usual_page, "prefill_chunk": 128}
    asked = prompts(4, vocab=found.config.vocab_size)
    plain = make_engine(found.params, found.config, num_speculative_tokens=0, **given)
    engine = make_engine(found.params, found.config, num_speculative_tokens=2, draft_vocab=ids, **given)
    assert told(engine, GREEDY, asked)[0] == told(plain, GREEDY, asked)[0]
    _, drafted, logits = propose(engine, asked[0], 2)
    assert not (drafted % 2).any()
    assert np.isfinite(logits[:, ::2]).all()
    assert (logits[:, 1::2] == -np.inf).all()


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ((), "draft_vocab names no token"),
        ((1, 128), "draft_vocab names token 128; expected ids from 0 to 127"),
        ((1, 2, 1), "draft_vocab names token 1 twice"),
    ],
)
def test_lists_that_are_refused(ids, error):
    with pytest.raises(ConfigError, match=error):
        engine_of(draft_vocab=ids)
