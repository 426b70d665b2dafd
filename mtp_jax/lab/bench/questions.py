"""Acceptance of drafts in answers to questions of several kinds, for models that follow a conversation."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_jax.api.demo import path_of
from mtp_jax.api.llm import LLM
from mtp_jax.api.outputs import RequestOutput
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench.acceptance import figures_of
from mtp_jax.lab.bench.report import Report
from mtp_jax.text.tokenizer import Tokenizer

QUESTIONS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""The questions of each kind. Nothing is trained on them."""

_ALL = "all"


@dataclass(frozen=True)
class QuestionLoad:
    """The answers that acceptance is measured over: to every question, at every temperature.

    Attributes:
        depth: number of drafts per step.
        max_tokens: largest number of tokens of an answer.
        draft_model: folder of a head; None: the model's own drafts.
    """

    temperatures: Sequence[float]
    depth: int
    max_tokens: int
    draft_model: Path | None


def run(model: str, asked: QuestionLoad) -> Report:
    """Answer the questions eight at a time.

    Raises ConfigError for a depth below 1 and for a model without a chat template.
    """
    if asked.depth < 1:
        raise ConfigError(
            f"depth = {asked.depth}; expected at least 1: without drafts there is nothing to accept"
        )
    directory = path_of(model)
    tokenizer = Tokenizer.from_dir(directory)
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ConfigError(f"{directory} has no tokenizer with a chat template; name a model that answers")
    prompts = [(kind, _prompt(tokenizer, text)) for kind, texts in QUESTIONS.items() for text in texts]
    llm = LLM(
        directory,
        draft_model=asked.draft_model,
        num_speculative_tokens=asked.depth,
        max_num_seqs=8,
        max_model_len=max(len(ids) for _, ids in prompts) + asked.max_tokens,
        compile_cache=None,
    )
    found = []
    for temperature in asked.temperatures:
        params = [
            SamplingParams(temperature=temperature, max_tokens=asked.max_tokens, seed=i)
            for i in range(len(prompts))
        ]
        outputs = llm.generate([ids for _, ids in prompts], params)
        for kind in (*QUESTIONS, _ALL):
            of_kind = [o for (its, _), o in zip(prompts, outputs, strict=True) if kind in (its, _ALL)]
            found.append(_level(kind, temperature, of_kind, asked.depth))
    headers = "questions", "temperature", "acceptance length", *(f"draft {i + 1}" for i in range(asked.depth))
    rows = [
        (
            f["kind"],
            f"{f['temperature']:g}",
            f"{f['acceptance_length']:.3f}",
            *(f"{share:.3f}" for share in f["acceptance_per_position"]),
        )
        for f in found
    ]
    note = (
        f"{len(prompts)} questions, up to {asked.max_tokens} tokens each, depth {asked.depth}, batch 8. "
        "draft i: share of steps in which drafts 1 to i were all accepted."
    )
    return Report(f"Acceptance by kind of question: {model}", headers, rows, [note], {"levels": found})


def _prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    conversation = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tuple(tokenizer.encode(conversation, add_special_tokens=False))


def _level(kind: str, temperature: float, outputs: Sequence[RequestOutput], depth: int) -> JsonObject:
    return {"kind": kind, "temperature": temperature, **figures_of(outputs, depth)}
