"""How many drafts come true, how good the text is, and what every benchmark does before it measures."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from mtp_jax import LLM, checkpoint
from mtp_jax.commands import cli
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench import acceptance, bits, questions
from tests import golden, tiny_tokenizer
from tests.lab.bench import small
from tests.models import SMALL
from tests.rounding import near, of_model

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.mark.slow
def test_the_model_is_read_once(tmp_path, monkeypatch):
    read = []
    load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda *a, **k: read.append(a) or load(*a, **k))
    out = tmp_path / "out.json"
    sizes = "--depth 2 --prompts 2 --prompt-tokens 6 --max-tokens 12 --samples 1 --compile-cache none"
    model = str(golden.model_dir("rigged"))
    command = ["bench", "acceptance", "--model", model, "--temperatures", "0,1", *sizes.split()]
    assert cli.main([*command, "--json", str(out)]) == 0
    assert len(read) == 1
    greedy, sampled = json.loads(out.read_text())["figures"]["temperatures"]
    assert (greedy["temperature"], sampled["temperature"]) == (0, 1)
    for found in (greedy, sampled):
        assert 1 < found["acceptance_length"] <= 3
        assert found["tokens"] == 24
        assert len(found["samples"]) == 1
    assert json.loads(out.read_text())["figures"]["held_out_text"] is None  # without a tokenizer


@pytest.mark.slow
def test_questions_are_answered_by_kind(tmp_path, monkeypatch):
    """The lengths of kinds, weighted by steps, make the length of all questions."""
    monkeypatch.setattr(questions, "QUESTIONS", {"a": ["b", "cd"], "e": ["f"]})
    out, model = tmp_path / "out.json", str(tiny_tokenizer.model(tmp_path / "model"))
    command = ["bench", "questions", "--model", model, "--depth", "2", "--max-tokens", "12"]
    assert cli.main([*command, "--json", str(out), "--compile-cache", "none"]) == 0
    levels = json.loads(out.read_text())["figures"]["levels"]
    kinds = [(k, t) for t in (0, 0.7) for k in ("a", "e", "all")]
    assert [(f["kind"], f["temperature"]) for f in levels] == kinds
    for one, other, both in (levels[:3], levels[3:]):
        assert both["steps"] == one["steps"] + other["steps"]
        total = sum(f["acceptance_length"] * f["steps"] for f in (one, other))
        assert both["acceptance_length"] == pytest.approx(total / both["steps"])
        assert both["acceptance_length"] > 1.2


@pytest.mark.parametrize("option", ["--json", "--png"])
def test_a_file_that_cannot_be_written_is_found_before_the_model_is_read(
    option, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "depth", "--model", "no/such/model", option, str(tmp_path)]) == 2
    assert f"{tmp_path} cannot be written; name another file" in capsys.readouterr().err


@pytest.fixture
def with_text(tmp_path):
    return small.with_text(tmp_path / "model")


def test_bits_per_byte_are_those_of_the_log_probabilities(with_text):
    llm = LLM(with_text, num_speculative_tokens=0, max_num_seqs=1, compile_cache=None)
    assert llm.tokenizer is not None
    vocab = llm.tokenizer.vocab_size
    pieces = [[0, *range(2, vocab, step)][:9] for step in (1, 2)]
    found = bits.score(llm, llm.tokenizer, pieces)
    assert (found.context, found.tokens) == (9, 16)
    logits = [np.asarray(llm.score(ids).logits, np.float64)[:-1] for ids in pieces]
    chosen = [log_softmax(x, axis=-1)[range(8), ids[1:]] for x, ids in zip(logits, pieces, strict=True)]
    expected = [-each.sum() / math.log(2) for each in chosen]
    # Sums of eight log-probabilities, each as far from the right one as a logit.
    largest = max(float(np.abs(x).max()) for x in logits)
    near(found.bits, expected, of_model(SMALL, 9) + vocab, size=8 * largest / math.log(2))
    size = [len(llm.tokenizer.decode(ids[1:]).encode()) for ids in pieces]
    assert found.bytes == size
    assert found.per_byte == pytest.approx(sum(found.bits) / sum(size))


@pytest.mark.rest
def test_held_out_text_is_cut_in_pieces_of_whole_context(with_text):
    llm = LLM(with_text, num_speculative_tokens=0, max_num_seqs=1, compile_cache=None)
    found = bits.held_out(llm, 3)
    assert found is not None
    assert found.context == min(bits.CONTEXT, llm.config.max_position_embeddings)
    assert len(found.bits) == len(found.bytes) == 3
    assert found.tokens == 3 * (found.context - 1)
    # Random weights foresee nothing: no better than a uniform guess among the vocabulary.
    assert sum(found.bits) / found.tokens > math.log2(llm.config.vocab_size) - 1
    with pytest.raises(ConfigError, match="0 pieces of text; expected at least 1"):
        bits.held_out(llm, 0)


@pytest.mark.rest
def test_the_report_says_what_text_costs_and_which_completions_repeat(with_text, tmp_path, capsys):
    out = tmp_path / "out.json"
    sizes = "--depth 1 --prompts 1 --prompt-tokens 6 --max-tokens 24 --samples 0 --pieces 2"
    command = ["bench", "acceptance", "--model", str(with_text), "--temperatures", "0", *sizes.split()]
    assert cli.main([*command, "--json", str(out), "--compile-cache", "none"]) == 0
    figures = json.loads(out.read_text())["figures"]
    text = figures["held_out_text"]
    assert text["bits_per_byte"] == pytest.approx(sum(text["bits"]) / sum(text["bytes"]))
    printed = capsys.readouterr().out
    headers, _, greedy = (line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|"))
    row = {h.strip(): cell.strip() for h, cell in zip(headers, greedy, strict=True)}
    assert row["bits per byte"] == f"{text['bits_per_byte']:.3f}"
    share = figures["temperatures"][0]["completions_that_repeat"]
    assert row["completions that repeat one"] == f"{share:.0%}"
    assert f"2 pieces of {text['context']} tokens" in printed


def test_a_completion_counts_once_however_much_of_it_repeats():
    def output(*ids) -> Any:
        return SimpleNamespace(speculation=Speculation(), outputs=[SimpleNamespace(token_ids=list(ids))])

    loop, once, never = output(*[5] * 40), output(*range(8), *range(8)), output(*range(40))
    found = acceptance.figures_of([loop, once, never, never], 1)
    assert found["completions_that_repeat"] == 0.5
