"""What grammars allow, for the rows of a launch."""

from collections.abc import Iterable

import numpy as np

from mtp_jax.engine.request import Request
from mtp_jax.text.grammar import WORD, Grammars, Window


def allowed(
    grammars: Grammars | None,
    requests: Iterable[tuple[int, Request]],
    shape: tuple[int, int],
    vocab_size: int,
    drafts: np.ndarray | None = None,
) -> np.ndarray:
    """Packed masks uint32 [rows, width, ceil(V / 32)]; all ones for requests without a grammar.

    requests: with their rows. shape: (rows, width). drafts: [rows, width - 1], which the masks follow. Before
    there are any, the masks follow the tokens that a grammar leaves no choice about; outputs that go on alone
    get none, as one that nobody keeps could end them.
    """
    rows, width = shape
    windows = []
    for row, r in requests:
        if r.matcher:
            ahead = r.matcher.forced() if drafts is None else drafts[row].tolist()
            windows.append(Window(row, r.matcher, ahead[: min(r.depth, width - 1)]))
    if grammars is None or not windows:
        return np.full((*shape, -(-vocab_size // WORD)), 2**WORD - 1, np.uint32)
    masks = grammars.masks(windows, rows, width)
    if drafts is None and width > 1:
        masks[[w.row for w in windows if w.matcher.alone]] = 0
    return masks
