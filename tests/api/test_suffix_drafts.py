"""Suffix drafts of the embedded model: on text that repeats its prompt, and after held-out prompts."""

from collections.abc import Sequence
from typing import Any

import pytest

from mtp_jax import LLM, SamplingParams, Speculation
from mtp_jax.api.demo import demo_model
from mtp_jax.decode.drafter.suffix import SHORTEST
from mtp_jax.decode.keys import Origin
from mtp_jax.lab.bench import corpus

# What they do to a text is shown by tests/decode/drafter on small models: this is of the embedded one.
pytestmark = pytest.mark.slow
DEPTH = 7


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_speculative_tokens=DEPTH, suffix_drafts=True, max_model_len=256, max_num_seqs=4)


@pytest.fixture(scope="module")
def held_out() -> list[list[int]]:
    tokenizer = corpus.read_tokenizer(demo_model() / "tokenizer.json")
    return corpus.held_out_prompts(tokenizer, corpus.split(corpus.read_files()).held_out, n=24, length=64)


def run(llm: LLM, prompts: Sequence[list[int]], **params: Any) -> tuple[list[list[int]], Speculation]:
    """The tokens of each prompt, and what became of all drafts."""
    chosen = SamplingParams(max_tokens=80, ignore_eos=True, **params)
    outs = llm.generate(prompts, chosen)
    spec = sum((o.speculation for o in outs), Speculation())
    return [list(o.outputs[0].token_ids) for o in outs], spec


def rate(spec: Speculation) -> float:
    return spec.accepted / spec.drafted


def repeats(text: list[int], prompt: list[int]) -> bool:
    """Whether all that is needed for a match is in the prompt: each run of a match and the token after it."""
    size = SHORTEST + 1
    known = {tuple(prompt[i : i + size]) for i in range(len(prompt) - size + 1)}
    return all(tuple(text[i : i + size]) in known for i in range(len(text) - size + 1))


def test_a_copying_task(llm: LLM, held_out: list[list[int]]) -> None:
    """The model's greedy text soon repeats itself; with it in the prompt, what follows repeats the prompt."""
    begun, _ = run(llm, held_out[:12], temperature=0, num_speculative_tokens=0)
    prompts = [[*p, *text] for p, text in zip(held_out, begun, strict=False)]
    told, _ = run(llm, prompts, temperature=0, num_speculative_tokens=0)
    copies = [(p, text) for p, text in zip(prompts, told, strict=True) if repeats(text, p)]
    assert len(copies) > len(told) / 2
    for prompt, text in copies:
        got, spec = run(llm, [prompt], temperature=0)
        assert got == [text]
        assert spec.acceptance_length >= 4
        assert spec.of(Origin.SUFFIX).accepted > spec.of(Origin.NEXTN).accepted


@pytest.mark.parametrize("depth", [1, 3, DEPTH])
def test_held_out_text(llm: LLM, held_out: list[list[int]], depth: int) -> None:
    """Of all drafts verified, a larger share is accepted than of the NextN layer's alone.

    That holds of the prompts together. A single match may be wrong where the NextN layer is right.
    """
    params = {"temperature": 0, "num_speculative_tokens": depth}
    text, both = run(llm, held_out, **params)
    told, alone = run(llm, held_out, suffix_drafts=False, **params)
    assert text == told
    assert both.of(Origin.SUFFIX).accepted > 0
    assert alone.accepted > 0
    assert rate(both) >= rate(alone)


def test_held_out_text_that_is_sampled(llm: LLM, held_out: list[list[int]]) -> None:
    """It keeps its NextN drafts, and with them all that is accepted; whoever asks for matches has them."""
    for i, prompt in enumerate(held_out[:4]):
        told = run(llm, [prompt], temperature=0.6, seed=i, suffix_drafts=False)
        assert run(llm, [prompt], temperature=0.6, seed=i) == told
        assert told[1].accepted > 0
    _, asked = run(llm, held_out[:8], temperature=0.6, seed=0, suffix_drafts=True)
    assert asked.of(Origin.SUFFIX).accepted > 0
