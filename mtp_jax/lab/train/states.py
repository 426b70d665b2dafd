"""Hidden states of texts, computed once and kept in shards on disk, and windows of them.

A shard is a safetensors file with the tokens of some texts, one text after the other, and with their hidden
states. All shards of a folder are one stream.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int
from safetensors.numpy import save_file

from mtp_jax.api.llm import LLM
from mtp_jax.api.progress import Reporter
from mtp_jax.checkpoint.safetensors_file import open_file
from mtp_jax.decode.drafter.protocol import FINAL
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.train.prompts import PromptLine

# Waves of requests in a shard. Slots run empty at its end: the more waves, the less; but a run that is
# interrupted repeats a shard.
_WAVES = 8


@struct.dataclass
class StateWindows:
    """Windows of a stream.

    Attributes:
        tokens: their ids.
        text: number of each token's text.
        answer: whether each token belongs to an answer, which is to be drafted.
        states: hidden states by number (see ``Drafter.features``), always that after the final norm.
        anchors: the newest tokens that blocks follow.
    """

    tokens: Int[Array, "B n"]
    text: Int[Array, "B n"]
    answer: Bool[Array, "B n"]
    states: dict[int, Float[Array, "B n D"]]
    anchors: Int[Array, "B a"]


def write_states(
    llm: LLM,
    texts: Sequence[PromptLine],
    folder: Path,
    taps: Sequence[int],
    sampling: JsonObject,
    report: Reporter,
    phase: str,
) -> None:
    """Write the shards that are missing: answers by the engine, then hidden states of prompts and answers.

    taps: residual streams to keep beside the state after the final norm. sampling: options for the answers.
    phase: the name that ``report`` shows. Raises RequestError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = _WAVES * llm.engine.config.max_num_seqs
    shards = {first: folder / f"{first:09d}.safetensors" for first in range(0, len(texts), size)}
    with report.phase(phase, "text") as update:
        for first, path in shards.items():
            if not path.exists():
                _write_shard(llm, texts[first : first + size], first, path, tuple(taps), sampling)
            update(min(first + size, len(texts)), len(texts))


def _answers(
    llm: LLM, texts: Sequence[PromptLine], first: int, sampling: JsonObject
) -> list[tuple[int, ...]]:
    """The answer of every text: its own, or else the model's."""
    asked = [i for i, text in enumerate(texts) if text.answer is None]
    params = [replace(SamplingParams(**sampling | texts[i].sampling), seed=first + i) for i in asked]
    outputs = llm.generate([texts[i].prompt for i in asked], params) if asked else ()
    made = {i: tuple(output.outputs[0].token_ids) for i, output in zip(asked, outputs, strict=True)}
    return [made.get(i, ()) if text.answer is None else text.answer for i, text in enumerate(texts)]


def _write_shard(
    llm: LLM, texts: Sequence[PromptLine], first: int, path: Path, taps: tuple[int, ...], sampling: JsonObject
) -> None:
    answers = _answers(llm, texts, first, sampling)
    rows = [(first + i, texts[i].prompt, answer) for i, answer in enumerate(answers) if answer]
    rows.sort(key=lambda row: len(row[1]) + len(row[2]))  # texts of about a length are computed together
    names, parts = [FINAL, *taps], []
    slots = llm.engine.config.max_num_seqs
    for at in range(0, len(rows), slots):
        some = rows[at : at + slots]
        sequences = [prompt + answer for _, prompt, answer in some]
        found = llm.features(sequences + sequences[:1] * (slots - len(some)), taps)
        for (number, prompt, answer), ids, states in zip(some, sequences, found, strict=False):
            here = np.arange(len(ids))
            parts.append(
                {
                    "tokens": np.asarray(ids, np.int32),
                    "text": np.full(len(ids), number, np.int32),
                    "answer": here >= len(prompt) if prompt else here >= 0,
                    **{_name(k): state for k, state in zip(names, states, strict=True)},
                }
            )
            assert len(prompt) + len(answer) == len(ids)
    if not parts:
        raise RequestError(
            f"all answers to prompts {first + 1} to {first + len(texts)} are empty; check the model's end of "
            "text and its chat template"
        )
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    part = path.with_suffix(".part")
    save_file({name: np.ascontiguousarray(array) for name, array in whole.items()}, part)
    os.replace(part, path)


def _name(number: int) -> str:
    return "hidden" if number == FINAL else f"tap.{number}"


class StateStream:
    """The shards of a folder as one stream; hidden states are read when they are needed."""

    def __init__(self, folder: Path, taps: Sequence[int]) -> None:
        """Raises CheckpointError for a damaged shard."""
        self._shards = [open_file(path) for path in sorted(folder.glob("*.safetensors"))]
        self._starts = [0, *accumulate(shard["tokens"].shape[0] for shard in self._shards)]
        self._names = (FINAL, *taps)
        whole = range(len(self))
        self._small = {name: self._read(name, whole) for name in ("tokens", "text", "answer")}

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def answered(self) -> int:
        """Number of tokens in answers."""
        return int(self._small["answer"].sum())

    @property
    def answers(self) -> np.ndarray:
        """The tokens of all answers, int32 [n]."""
        return self._small["tokens"][self._small["answer"]]

    def windows(self, starts: np.ndarray, length: int, anchors: np.ndarray) -> StateWindows:
        """Windows of ``length`` tokens that begin at ``starts``."""
        spans = [range(start, start + length) for start in map(int, starts)]
        small = {name: np.stack([a[s.start : s.stop] for s in spans]) for name, a in self._small.items()}
        states = {k: np.stack([self._read(_name(k), span) for span in spans]) for k in self._names}
        given: Any = (small["tokens"], small["text"], small["answer"], states, anchors)
        return StateWindows(*given)

    def _read(self, name: str, span: range) -> np.ndarray:
        parts = []
        for shard, start, stop in zip(self._shards, self._starts, self._starts[1:], strict=False):
            a, b = max(span.start, start), min(span.stop, stop)
            if a < b:
                parts.append(shard[name].array(range(a - start, b - start)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
