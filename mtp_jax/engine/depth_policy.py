"""The depths of steps, and the numbers by which adaptive depth chooses among them. No jax."""

from dataclasses import dataclass

StepDepths = tuple[int, int]
"""Drafts that a step makes for each row, and drafts that it verifies: of each row where both are equal, else
on average over its slots."""

PLAIN: StepDepths = (0, 0)


DepthRow = tuple[int, int, int]
"""Drafts verified, drafts accepted and tokens emitted by one row of a step."""


@dataclass(frozen=True)
class DepthPolicy:
    """The parameters of adaptive depth.

    Attributes:
        budget: share of a bucket's time that the probes of one depth may lose.
        memory: number of steps after which an observation of drafts and of ended rows counts 1/e.
        kept: number of newest measurements whose lower median is a depth's cost, whose median the pace.
        block: number of steps of a probe: its first half settles the caches, its second half is measured.
        margin: share of a step's time that another depth must save before it replaces the incumbent; a probe
            is taken to lose this share at least.
        prior: share of drafts that are accepted before any was observed.
        weight: number of drafts that the prior counts for.
        horizon: number of steps for which a hoped gain counts against the loss of a probe.
        doubt: share by which a cost may be too high that was measured over empty slots alone.
    """

    budget: float = 0.005
    memory: float = 200
    kept: int = 9
    block: int = 4
    margin: float = 0.02
    prior: float = 0.7
    weight: float = 1
    horizon: float = 6
    doubt: float = 0.25


def adaptive_depths(most: int, steps: int | None = None) -> tuple[int, ...]:
    """The depths that adaptive steps choose from: 0, odd depths and the deepest.

    steps: ``TreeShape.steps``: more drafts than these are a tree, fewer a chain. None: all are chains.
    """
    chain = most if steps is None else min(most, steps)
    return tuple(sorted({0, *range(1, chain + 1, 2), chain, most}))
