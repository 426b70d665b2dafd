"""Medusa heads made for a golden trunk, and the numbers that they must give, in the plainest way.

The trunk's next token is mostly a function of the last one. A head's table is the trunk's own with its rows
at the tokens that this function gives behind theirs; random residual blocks decide how often it is right.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np

from examples.medusa import MedusaConfig
from mtp_jax.checkpoint import Loaded, load
from mtp_jax.heads.kinds import add
from mtp_jax.model import trunk
from mtp_jax.model.backend import xla
from mtp_jax.model.params import Params
from tests import golden
from tests.checkpoint.files import Raw, Tensors, write_raw

TRUNK, HEADS = "dflash2", 4
LONGEST = 96
add(MedusaConfig)


@cache
def _trunk() -> Loaded:
    return load(golden.model_dir(TRUNK), dtype="float32")


@jax.jit
def _run(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = trunk.forward(params, _trunk().config, tokens, xla(experts="dense"))
    return hidden, trunk.logits(params, hidden)


def _forward(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Final hidden states and logits of texts [B, T]."""
    hidden, scores = _run(_trunk().params, tokens)
    return np.asarray(hidden), np.asarray(scores)


@cache
def arrays() -> dict[str, np.ndarray]:
    """The heads, in FasterDecoding's names."""
    found, rng = _trunk(), np.random.default_rng(0)
    vocab, width = found.config.vocab_size, found.config.hidden_size
    following = _forward(np.arange(vocab)[:, None])[1][:, 0].argmax(-1)
    own, at, heads = np.asarray(found.params.table), np.arange(vocab), {}
    for i in range(HEADS):
        at = following[at]
        heads[f"{i}.0.linear.weight"] = rng.normal(size=(width, width)) * (1 + 0.5 * i) / np.sqrt(width)
        heads[f"{i}.0.linear.bias"] = rng.normal(size=width) * 0.1
        heads[f"{i}.1.weight"] = rng.normal(size=own.shape) * own.std()
        heads[f"{i}.1.weight"][at] += own
    return {name: a.astype(np.float32) for name, a in heads.items()}


def write(folder: Path) -> Path:
    """The heads as a folder."""
    folder.mkdir(parents=True)
    tensors: Tensors = {n: Raw("F32", list(a.shape), a.tobytes()) for n, a in arrays().items()}
    write_raw(folder / "medusa_lm_head.safetensors", tensors)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "trunk"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def loaded() -> Loaded:
    """The trunk with the heads beside it."""
    with TemporaryDirectory() as folder:
        return load(golden.model_dir(TRUNK), write(Path(folder) / "heads"), dtype="float32")


def logits(hidden: np.ndarray) -> np.ndarray:
    """Logits [heads, T, V] from hidden states [T, D], in float64."""
    out, w = [], arrays()
    for i in range(HEADS):
        x = hidden.astype(np.float64)
        y = x @ w[f"{i}.0.linear.weight"].T + w[f"{i}.0.linear.bias"]
        out.append((x + y / (1 + np.exp(-y))) @ w[f"{i}.1.weight"].T)
    return np.stack(out)


class Text:
    """A prompt and its greedy text, with the drafts after every token."""

    def __init__(self, prompt: Sequence[int], tokens: int) -> None:
        self.ids, self.begin = list(prompt), len(prompt)
        for _ in range(tokens + HEADS + 1):
            row = np.zeros((1, LONGEST), np.int32)
            row[0, : len(self.ids)] = self.ids
            hidden, scores = (a[0, : len(self.ids)] for a in _forward(row))
            self.ids.append(int(scores[-1].argmax()))
        self.tokens, self.logits = tokens, logits(hidden)

    def accepted(self, ways: Sequence[Sequence[int]]) -> list[int]:
        """Accepted drafts of every step in which these ways of ranks are drafted."""
        at, counts, ranked = self.begin, list[int](), np.argsort(-self.logits, axis=-1)
        while at < self.begin + self.tokens - 1:
            drafted = [tuple(int(ranked[i, at - 1, r]) for i, r in enumerate(way)) for way in ways]
            right = (len(way) for way in drafted if tuple(self.ids[at + 1 : at + 1 + len(way)]) == way)
            counts.append(max(right, default=0))
            at += counts[-1] + 1
        return counts


@cache
def expected() -> dict[str, np.ndarray]:
    """Numbers in the golden variants' names."""
    prompt, greedy = (golden.expected(TRUNK)[name] for name in ("input_ids", "greedy_ids"))
    text, count = Text(prompt.tolist(), len(greedy)), len(prompt)
    assert text.ids[count : count + len(greedy)] == greedy.tolist()
    found = {"input_ids": prompt, "greedy_ids": greedy, "draft_ids": text.logits[:, count - 1].argmax(-1)}
    for n in range(1, HEADS + 1):
        found[f"spec_ids.{n}"] = greedy
        found[f"spec_accept.{n}"] = np.array(text.accepted([(0,) * i for i in range(1, n + 1)]))
    return found
