"""Masks of constraints for the rows of a launch."""

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
    """Packed masks uint32 [rows, width, ceil(V / 32)]; all ones for requests without constraints.

    requests: requests and their rows. shape: (rows, width). drafts: [rows, width - 1], which the masks
    follow. Before there are any, the masks follow the tokens that a grammar leaves no choice about; outputs
    whose matcher is ``alone`` get none, as a draft that is not kept could end them.
    """
    rows, width = shape
    windows, others = [], []
    for row, r in requests:
        if r.constraints is None:
            continue
        matcher, ahead = r.constraints.matcher, [] if drafts is None else drafts[row].tolist()
        if matcher and drafts is None:
            ahead = matcher.forced()
        ahead = _tokens(ahead[: min(r.depth, width - 1)])
        if matcher:
            windows.append(Window(row, matcher, ahead))
        others.append((row, r.constraints.rules, ahead))
    if grammars is None or not windows:
        masks = np.full((*shape, -(-vocab_size // WORD)), 2**WORD - 1, np.uint32)
    else:
        masks = grammars.masks(windows, rows, width)
        if drafts is None and width > 1:
            masks[[w.row for w in windows if w.matcher.alone]] = 0
    for row, rules, ahead in others:
        for rule in rules:
            rule.narrow(masks[row], ahead)
    return masks


def _tokens(drafts: list[int]) -> list[int]:
    """The drafts before the first that a broken drafter left without a token."""
    return drafts[: next((i for i, t in enumerate(drafts) if t < 0), len(drafts))]
