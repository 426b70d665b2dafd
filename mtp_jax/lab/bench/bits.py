"""Bits per byte: the cost of a given text to a model, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtp_jax.api.llm import LLM
from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench import corpus
from mtp_jax.text.tokenizer import Tokenizer

CONTEXT = 512  # most tokens of a piece; earlier tokens of its piece predict a token


@dataclass(frozen=True)
class Bits:
    """Cost of pieces of text to the model, in bits: the sum of -log2 p of every token but a piece's first.

    Attributes:
        context: number of tokens of a piece; the first is not predicted.
        tokens: number of predicted tokens, all pieces together.
        bits: bits of each piece. bytes: for each piece, the UTF-8 bytes that its predicted tokens decode to.
    """

    context: int
    tokens: int
    bits: list[float]
    bytes: list[int]

    @property
    def per_byte(self) -> float:
        """Bits per byte of all pieces together."""
        return sum(self.bits) / sum(self.bytes)


def held_out(llm: LLM, pieces: int) -> Bits | None:
    """Score pieces of the standard library that are held out of the embedded model's training.

    A piece begins at a line that a hash picks, one piece per file and round, with bos where the tokenizer has
    one. None without a tokenizer. Raises ConfigError if there is too little text.
    """
    if pieces < 1:
        raise ConfigError(f"{pieces} pieces of text; expected at least 1")
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return None
    length = min(CONTEXT, llm.config.max_position_embeddings)
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    files = corpus.split(corpus.read_files()).held_out
    return score(llm, tokenizer, corpus.held_out_prompts(tokenizer.backend, files, pieces, length, start))


def score(llm: LLM, tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> Bits:
    """Score pieces of equal length, at least 2 tokens each, by teacher forcing."""
    bits, sizes = [], []
    for ids in pieces:
        logits = llm.score(ids).logits[:-1].astype(np.float64)
        top = logits.max(axis=-1, keepdims=True)
        total = np.log(np.exp(logits - top).sum(axis=-1)) + top[:, 0]
        log_p = logits[np.arange(len(logits)), ids[1:]] - total
        bits.append(float(-log_p.sum() / np.log(2)))
        sizes.append(sum(len(tokenizer.token_bytes(i, skip_special_tokens=False)) for i in ids[1:]))
    length = len(pieces[0])
    return Bits(length, len(pieces) * (length - 1), bits, sizes)
