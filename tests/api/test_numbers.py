"""What the Python API gives with weights: tokens, scores and drafts that another implementation computed."""

from dataclasses import replace

import numpy as np
import pytest

from mtp_jax import LLM, ConfigError, RequestError
from mtp_jax.model.family import config_of_file
from tests import golden
from tests.api.helpers import GREEDY, PROMPT, RIGGED, SCORED, SIZES, tokens
from tests.rounding import error, near, of_model

pytestmark = pytest.mark.usefixtures("shared_programs")
CONFIG = config_of_file(RIGGED / "config.json")


@pytest.fixture(scope="module")
def llm(directory):
    return LLM(directory, **SIZES)


def test_greedy_tokens_and_acceptance_are_the_golden_ones(llm):
    expected = golden.expected("rigged")
    (output,) = llm.generate(PROMPT, SCORED)
    assert tokens(output) == expected["greedy_ids"].tolist()
    assert output.speculation.accepted_per_step == expected["spec_accept.3"].tolist()
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text == llm.tokenizer.decode(tokens(output))
    assert output.finished
    assert output.prompt is None
    assert output.prompt_token_ids == PROMPT


def test_without_speculation_gives_the_same_tokens(llm):
    (output,) = llm.generate(PROMPT, replace(GREEDY, num_speculative_tokens=0))
    assert tokens(output) == golden.expected("rigged")["greedy_ids"].tolist()
    assert output.speculation.drafted == 0


def log_softmax(logits):
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_logprobs_are_those_of_score(llm):
    """Tokens whose logits differ by no more than rounding may change places."""
    (output,) = llm.generate(PROMPT, replace(SCORED, max_tokens=6))
    ids = [*PROMPT, *tokens(output)]
    logits = llm.score(ids).logits
    expected, terms, size = log_softmax(logits), of_model(CONFIG, len(ids)), np.abs(logits).max()
    slack = error(terms, size)

    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    assert len(output.outputs[0].logprobs) == 6
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for i, row in enumerate(rows):
        chosen, width = ids[i + 1], 1 if i < len(PROMPT) - 1 else 2
        assert next(iter(row)) == chosen
        assert len(row) in (width, width + 1)
        worst = np.sort(expected[i])[-width]
        for token, entry in row.items():
            likely = expected[i, token]
            assert token == chosen or likely >= worst - slack
            near(entry.logprob, likely, terms, size=size)
            at_least, at_most = (1 + (expected[i] > likely + by).sum() for by in (slack, -slack))
            assert at_least <= entry.rank <= at_most


def test_hidden_states_of_chosen_positions(llm):
    everything, states = llm.score(PROMPT).hidden, llm.hidden_states(PROMPT)
    near(states, everything, of_model(CONFIG, len(PROMPT)))
    near(llm.hidden_states(PROMPT, [3, -1]), states[[3, -1]], of_model(CONFIG, len(PROMPT)))
    with pytest.raises(RequestError, match=f"position 99 is outside of {len(PROMPT)} tokens"):
        llm.hidden_states(PROMPT, [99])


def test_score_computes_by_the_kernels_that_are_chosen(monkeypatch):
    monkeypatch.setattr("mtp_jax.model.backend.is_hopper", lambda: True)
    insisting = LLM(golden.model_dir("rigged"), kernels="mosaic_gpu")
    with pytest.raises(ConfigError, match=r"float32.*take kernels=auto or kernels=xla"):
        insisting.score(PROMPT)


def test_score_gives_the_golden_numbers(llm):
    expected, terms = golden.expected("rigged"), of_model(CONFIG, len(PROMPT))
    scores = llm.score(PROMPT)
    near(scores.logits, expected["logits"], terms)
    near(scores.hidden, expected["hidden"], terms)
    assert len(scores.mtp_logits) == sum(key.startswith("mtp_logits.") for key in expected)
    for k, (logits, hidden) in enumerate(zip(scores.mtp_logits, scores.mtp_hidden, strict=True)):
        near(logits, expected[f"mtp_logits.{k}"], terms)
        near(hidden, expected[f"mtp_hidden.{k}"], terms)


def test_draft_gives_the_golden_drafts(llm):
    """Each draft follows the hidden state that the one before has left."""
    expected = golden.expected("rigged")
    draft = llm.draft(PROMPT, 4)
    assert draft.next_token == expected["greedy_ids"][0]
    assert draft.token_ids == expected["draft_rec_ids"].tolist()
    near(draft.logits, expected["draft_rec_logits"], 4 * of_model(CONFIG, len(PROMPT) + 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.score([5, 5.5]), "5.5 is among them"),
        (lambda m: m.score([]), "empty"),
        (lambda m: m.score([3, 160]), "from 0 to 159"),
        (lambda m: m.score([3] * 5000), "up to 2560 tokens"),
    ],
)
def test_scores_that_cannot_be_had(llm, call, message):
    with pytest.raises(RequestError, match=message):
        call(llm)
