"""Seconds of an engine's launches: a step of some slots, with or without a chunk of prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.fit import BAND
from mtp_jax.lab.planning.prefill import prompt_tokens_per_second
from mtp_jax.lab.planning.step_time import entries, step

Software = Literal["usual", "middle", "lean"]
"""The end of the band by which launches are timed; "middle": the geometric mean of both ends."""


@dataclass(frozen=True)
class LaunchWork:
    """One launch.

    Attributes:
        slots: number of rows of windows, of all groups of GPUs; 0: no windows.
        depth: number of drafts of each.
        context: number of cached tokens of a slot, on average over the slots of the busiest group.
        prompts: number of rows of prompts, of each group, idle rows included; 0: no chunk.
        seen: number of tokens that a token of the chunk attends to, on average.
    """

    slots: int
    depth: int = 0
    context: int = 0
    prompts: int = 0
    seen: int = 0


class LaunchTimes:
    """Predicted seconds of the launches of one deployment.

    A chunk's rows and the windows' rows pass through the same weights, which are read once: a launch takes
    the longer of two times, of one pass over all rows and of the chunk at the rate of prompts, and the time
    that windows need besides, for their cached rows and their drafts.
    """

    def __init__(self, base: Deployment, software: Software = "middle") -> None:
        """base: its requests, context and depth are replaced by a launch's."""
        self._base, self._known = base, dict[LaunchWork, float]()
        self._ends: Sequence[int] = {"usual": (0,), "middle": (0, 1), "lean": (1,)}[software]

    def launch(self, work: LaunchWork) -> float:
        """Seconds of a launch."""
        if work not in self._known:
            self._known[work] = self._seconds(work)
        return self._known[work]

    def flush(self, slots: int, steps: int) -> float:
        """Seconds of writing the NextN entries that ``steps`` steps of ``slots`` slots deferred."""
        d = replace(self._base, requests=slots)
        return self._mean([entries(d, BAND[end].on(d.gpu), steps) for end in self._ends])

    def _seconds(self, work: LaunchWork) -> float:
        windows = self._step(work.slots, work.depth, work.context)
        if not work.prompts:
            return windows
        d, rows = self._base, work.slots * (work.depth + 1)
        rates = prompt_tokens_per_second(d, work.seen)
        chunk = self._mean([work.prompts / d.model / rates[end] for end in self._ends])
        return windows - self._step(rows) + max(self._step(rows + work.prompts * d.data), chunk)

    def _step(self, slots: int, depth: int = 0, context: int = 0) -> float:
        """Seconds of a step without a chunk; without ``context``, of a pass over the weights."""
        if not slots:
            return 0.0
        context = min(max(context, 1), self._base.cfg.max_position_embeddings)
        d = replace(self._base, requests=slots, depth=depth, context=context)
        return self._mean([step(d, BAND[end].on(d.gpu)).total for end in self._ends])

    def _mean(self, ends: Sequence[float]) -> float:
        return math.prod(ends) ** (1 / len(ends))
