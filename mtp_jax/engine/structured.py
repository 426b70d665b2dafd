"""Masks of constraints for the rows of a launch."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from mtp_jax.engine.request import Request
from mtp_jax.text.grammar import WORD, Grammars, MaskWindow


def allowed(
    grammars: Grammars | None,
    requests: Iterable[tuple[int, Request]],
    shape: tuple[int, int],
    vocab_size: int,
    drafts: np.ndarray | None = None,
    parents: np.ndarray | None = None,
) -> np.ndarray:
    """Packed masks uint32 [rows, width, ceil(V / 32)]; all bits are set for requests without constraints.

    requests: requests and their rows. shape: (rows, width). drafts: [rows, width - 1], which the masks
    follow. Before there are any, the masks follow the tokens that a grammar leaves no choice about; outputs
    whose matcher is ``alone`` get none, as a draft that is not kept could end them. parents: [rows,
    width - 1] of trees, each mask of which follows the drafts on the way to its node; None: chains.
    """
    rows, width = shape
    if parents is not None:
        assert drafts is not None, "a tree is one of drafts"
        asked = [(row, r) for row, r in requests if r.constraints is not None]
        chains = partial(allowed, grammars, asked, shape, vocab_size)
        return _of_trees(drafts, parents, [row for row, _ in asked], chains)
    windows, others = [], []
    for row, r in requests:
        if r.constraints is None:
            continue
        matcher, ahead = r.constraints.matcher, [] if drafts is None else drafts[row].tolist()
        if matcher and drafts is None:
            ahead = matcher.forced()
        ahead = _tokens(ahead[: min(r.depth, width - 1)])
        if matcher:
            windows.append(MaskWindow(row, matcher, ahead))
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


def _of_trees(
    drafts: np.ndarray, parents: np.ndarray, rows: Iterable[int], chains: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Masks of every node, by the masks that ``chains`` makes along one path of each row at a time."""
    paths = {row: _paths(parents[row].tolist()) for row in rows}
    masks = None
    for turn in range(max(map(len, paths.values()), default=1)):
        chosen = {row: own[turn % len(own)] for row, own in paths.items()}
        along = np.full_like(drafts, -1)
        for row, path in chosen.items():
            along[row, : len(path) - 1] = drafts[row, np.array(path[1:], int) - 1]
        found = chains(along)
        masks = found.copy() if masks is None else masks
        for row, path in chosen.items():
            masks[row, path] = found[row, : len(path)]
    assert masks is not None, "there is a path, if of nobody"
    return masks


def _paths(parents: list[int]) -> list[list[int]]:
    """The nodes from the root to every leaf."""
    paths = [[0]]
    for parent in parents:
        paths.append([*paths[parent], len(paths)])
    return [path for node, path in enumerate(paths) if node not in parents]


def _tokens(drafts: list[int]) -> list[int]:
    """The drafts before the first that a broken drafter left without a token."""
    return drafts[: next((i for i, t in enumerate(drafts) if t < 0), len(drafts))]
