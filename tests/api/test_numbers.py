"""What the Python API gives with weights: tokens, scores and drafts that another implementation computed."""

from dataclasses import replace

import numpy as np
import pytest

from mtp_jax import LLM, ConfigError, RequestError
from mtp_jax.api.local import local_runner
from tests import golden
from tests.api.helpers import GREEDY, PROMPT, SCORED, SIZES, tokens

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def llm(directory):
    return LLM(directory, **SIZES)


def test_greedy_tokens_and_acceptance_are_the_golden_ones(llm):
    expected = golden.expected("rigged")
    (output,) = llm.generate(PROMPT, GREEDY)
    assert tokens(output) == expected["greedy_ids"].tolist()
    assert output.speculation.accepted_per_step == expected["spec_accept.3"].tolist()
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text == llm.tokenizer.decode(tokens(output))
    assert output.finished
    assert output.prompt is None
    assert output.prompt_token_ids == PROMPT


def test_without_speculation_gives_the_same_tokens(llm):
    plain = llm.without_speculation()
    assert tokens(plain.generate(PROMPT, GREEDY)[0]) == golden.expected("rigged")["greedy_ids"].tolist()
    assert local_runner(plain.engine).params.nextn == ()
    assert local_runner(plain.engine).params.layers is local_runner(llm.engine).params.layers
    assert llm.engine.config.num_speculative_tokens == 3


def log_softmax(logits):
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_logprobs_are_those_of_score(llm):
    (output,) = llm.generate(PROMPT, replace(SCORED, max_tokens=6))
    ids = [*PROMPT, *tokens(output)]
    expected = log_softmax(llm.score(ids).logits)

    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    assert len(output.outputs[0].logprobs) == 6
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for i, row in enumerate(rows):
        chosen, width = ids[i + 1], 1 if i < len(PROMPT) - 1 else 2
        assert next(iter(row)) == chosen
        assert set(row) == {chosen, *np.argsort(-expected[i])[:width]}
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(expected[i, token], abs=1e-3)
            assert entry.rank == 1 + (expected[i] > expected[i, token]).sum()


def test_score_computes_by_the_kernels_that_are_chosen(monkeypatch):
    monkeypatch.setattr("mtp_jax.model.backend.is_hopper", lambda: True)
    insisting = LLM(golden.model_dir("rigged"), kernels="mosaic_gpu")
    with pytest.raises(ConfigError, match=r"float32.*take kernels=auto or kernels=xla"):
        insisting.score(PROMPT)


def test_score_gives_the_golden_numbers(llm):
    expected = golden.expected("rigged")
    scores = llm.score(PROMPT)
    np.testing.assert_allclose(scores.logits, expected["logits"], atol=2e-3, rtol=1e-4)
    np.testing.assert_allclose(scores.hidden, expected["hidden"], atol=1e-3, rtol=1e-4)
    assert len(scores.mtp_logits) == sum(key.startswith("mtp_logits.") for key in expected)
    for k, (logits, hidden) in enumerate(zip(scores.mtp_logits, scores.mtp_hidden, strict=True)):
        np.testing.assert_allclose(logits, expected[f"mtp_logits.{k}"], atol=2e-3, rtol=1e-4)
        np.testing.assert_allclose(hidden, expected[f"mtp_hidden.{k}"], atol=1e-3, rtol=1e-4)


def test_draft_gives_the_golden_drafts(llm):
    expected = golden.expected("rigged")
    draft = llm.draft(PROMPT, 4)
    assert draft.next_token == expected["greedy_ids"][0]
    assert draft.token_ids == expected["draft_rec_ids"].tolist()
    np.testing.assert_allclose(draft.logits, expected["draft_rec_logits"], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.score([5, 5.5]), "5.5 is among them"),
        (lambda m: m.score([]), "empty"),
        (lambda m: m.score([3, 160]), "from 0 to 159"),
        (lambda m: m.score([3] * 5000), "up to 2560 tokens"),
        (lambda m: m.without_speculation().draft([3], 1), "num_speculative_tokens of 1 or more"),
    ],
)
def test_scores_that_cannot_be_had(llm, call, message):
    with pytest.raises(RequestError, match=message):
        call(llm)
