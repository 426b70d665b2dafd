"""A store of outputs, among whose tokens later requests with the same salt find drafts. No jax.

SuffixDecoding (arXiv 2411.04975) keeps a suffix tree of past outputs on the host, which it asks in every
step. Here the host hands a request a row of texts together with its slot, and the device looks through the
row as it looks through the request's own text (``decode/drafter/suffix.py``): no step waits for the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
from jaxtyping import Int

from mtp_jax.engine.request import Request

MOST = 10_000
"""Outputs that a store keeps: the default of vLLM's suffix_decoding_max_cached_requests."""
GAP = -1
"""Ends a text in a row of texts, and fills the row where there is none."""


@dataclass(frozen=True)
class KeptText:
    """An output. prompt: a digest of its prompt. tokens: its first tokens, int32."""

    salt: str
    prompt: bytes
    tokens: bytes


Order = dict[KeptText, Literal[None]]
"""Texts in order, the oldest first."""


class TextStore:
    """The newest outputs, which only requests with the same salt see. Not thread-safe."""

    def __init__(self, width: int, most: int = MOST) -> None:
        """Keeps nothing yet.

        width: number of tokens of a row, and more than a text has; 0: nothing is kept. most: number of texts.
        """
        self.width, self._most = width, most
        self._all: Order = {}
        self._of: dict[tuple[str, bytes | None], Order] = {}  # by salt alone, and by salt and prompt

    def __len__(self) -> int:
        return len(self._all)

    def add(self, request: Request) -> None:
        """Keep the output of a request that has ended; an equal text of an equal prompt is the newest now."""
        tokens = np.array(request.progress.output[: max(self.width - 1, 0)], np.int32).tobytes()
        if not tokens:
            return
        text = KeptText(request.salt, _digest(request), tokens)
        if text in self._all:
            self._drop(text)
        for index in self._indices(text):
            index[text] = None
        if len(self._all) > self._most:
            self._drop(next(iter(self._all)))

    def forget(self) -> None:
        """Forget all texts."""
        self._all.clear()
        self._of.clear()

    def row(self, request: Request) -> Int[np.ndarray, "1 N"] | None:
        """The texts that a request sees, the best last, as the latest of equal matches is taken.

        An output of an equal prompt is better than another output, and a newer one better than an older one.
        None where nothing is kept.
        """
        if not self.width:
            return None
        row = np.full((1, self.width), GAP, np.int32)
        if not request.other_texts:
            return row
        end = self.width - 1  # behind the last text is a gap, too
        held = set[bytes]()
        for kept in self._seen(request):
            if kept.tokens in held:
                continue
            held.add(kept.tokens)
            text = np.frombuffer(kept.tokens, np.int32)[:end]
            row[0, end - len(text) : end] = text
            end -= len(text) + 1
            if end <= 0:
                break
        return row

    def _seen(self, request: Request) -> Iterator[KeptText]:
        """The texts that a request may see, the best first."""
        for prompt in (_digest(request), None):
            yield from reversed(self._of.get((request.salt, prompt), {}))

    def _indices(self, text: KeptText) -> list[Order]:
        """The indices that a text belongs to."""
        return [self._all, *(self._of.setdefault((text.salt, p), {}) for p in (text.prompt, None))]

    def _drop(self, text: KeptText) -> None:
        for index in self._indices(text):
            del index[text]
        for prompt in (text.prompt, None):
            if not self._of[text.salt, prompt]:
                del self._of[text.salt, prompt]


def _digest(request: Request) -> bytes:
    return blake2b(np.array(request.prompt, np.int32).tobytes(), digest_size=16).digest()
