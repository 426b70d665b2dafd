"""examples/evaluation: the embedded model's scores are the same with drafts and without.

It sends the requests of lm-eval 0.4.13: tokens by /tokenize, log-likelihoods by echo.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from mtp_jax import demo_model
from tests.layers import ROOT
from tests.serve.conftest import Variant, modelled, start

FOLDER = ROOT / "examples" / "evaluation"
LINES = [json.loads(line) for line in (FOLDER / "python_lines.jsonl").read_text().splitlines()]
WITHOUT = {"speculative": {"enabled": False}}


@pytest.fixture(scope="module")
def demo() -> Iterator[Variant]:
    with start(modelled(demo_model())) as running:
        yield running.variant(spec_metrics="summary")


def tokens(server: Variant, text: str) -> list[int]:
    asked = {"prompt": text, "add_special_tokens": False}
    return server.post("/tokenize", json=asked).raise_for_status().json()["tokens"]


def completed(server: Variant, prompt: list[int], **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "seed": 1234, **body}
    answer = server.post("/v1/completions", json=asked).raise_for_status().json()
    return answer["choices"][0], answer["metrics"]["speculative_decoding"]


def likelihood(server: Variant, context: str, text: str, **more: Any) -> float:
    whole, begin = tokens(server, context + text), len(tokens(server, context))
    asked: dict[str, Any] = {"max_tokens": 1, "logprobs": 1, "echo": True, **more}
    choice, _ = completed(server, whole, **asked)
    return sum(choice["logprobs"]["token_logprobs"][begin:-1])


def choice_score(server: Variant, **more: Any) -> float:
    """python_choice.yaml, of every third line."""
    right = 0
    for line in LINES[::3]:
        found = [likelihood(server, line["code"], text, **more) for text in (line["next"], *line["others"])]
        right += found[0] == max(found)
    return right / len(LINES[::3])


def line_score(server: Variant, **more: Any) -> tuple[float, list[str], int]:
    """python_line.yaml. Returns the score, the texts, and the number of accepted drafts."""
    task = yaml.safe_load((FOLDER / "python_line.yaml").read_text())["generation_kwargs"]
    asked = {"max_tokens": task["max_gen_toks"], "stop": task["until"], **more}
    found = [completed(server, tokens(server, line["code"]), **asked) for line in LINES]
    texts = [choice["text"] for choice, _ in found]
    right = sum(text == line["next"] for text, line in zip(texts, LINES, strict=True))
    return right / len(LINES), texts, sum(metrics["num_accepted_draft_tokens"] for _, metrics in found)


@pytest.mark.rest
def test_the_scores_are_the_same_with_drafts_and_without(demo: Variant):
    score, texts, accepted = line_score(demo)
    assert line_score(demo, **WITHOUT) == (score, texts, 0)
    assert accepted > len(LINES)
    assert 0.3 < score < 0.8
    assert choice_score(demo) == choice_score(demo, **WITHOUT) > 1 / 4


def test_every_line_has_four_texts_that_differ():
    assert all(len({line["next"], *line["others"]}) == 4 for line in LINES)
    for name in ("python_choice", "python_line"):
        task = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        assert task["task"] == name
        assert (FOLDER / task["dataset_kwargs"]["data_files"]["test"]).exists()
