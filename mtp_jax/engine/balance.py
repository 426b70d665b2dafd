"""Moves experts between devices while serving, by the number of times that each was chosen.

At intervals of launches the engine asks for the counts, and reads them a few launches later. Layer by layer
it makes a placement; where that is better than the present one, experts move towards it, a few per launch.
After each move the map of the experts fits the weights, so that every launch between two moves is right.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtp_jax.decode.arrays import ExpertLayout
from mtp_jax.decode.launches import MoveExpert, Pending, ReadExperts, Runner
from mtp_jax.model.placement import aligned, copies_of, first_placement, imbalance, moves, place

# Moves per launch. A move takes a fraction of a millisecond within a host, some milliseconds between hosts.
MOVES = 2
# The share of the imbalance that a new placement must remove before any expert moves.
GAIN = 0.05
# Launches between the request for counts and their reading, so that they have arrived by then.
LATE = 3


@dataclass(frozen=True)
class ExpertStats:
    """Counts and moves of a balancer.

    Attributes:
        readings: number of times that counts were read.
        moves: number of experts copied from slot to slot.
        imbalance: ratio of the busiest device's load to the mean, by the counts read last, the mean of all
            layers.
        worst: the imbalance of the layer where it is largest.
        over: number of passes through a layer whose all-to-all had no room for all rows, so that they were
            gathered.
    """

    readings: int = 0
    moves: int = 0
    imbalance: float = 1.0
    worst: float = 1.0
    over: int = 0


class Balancer:
    """The balancer of one engine's experts. Not thread-safe.

    Attributes:
        placed: the expert of each slot, int [layers, slots].
    """

    def __init__(self, layout: ExpertLayout, runner: Runner, period: int) -> None:
        """period: number of launches between two readings; 0: never."""
        self._layout, self._runner, self._period = layout, runner, period
        self.placed = np.tile(first_placement(layout.experts, layout.slots), (layout.layers, 1))
        # Placements keep groups on hosts where hosts divide the groups.
        self._nodes = layout.domains if layout.groups % layout.domains == 0 else 1
        self._pending: Pending[tuple[np.ndarray, np.ndarray]] | None = None
        self._plan: Iterator[tuple[int, int, int] | None] | None = None
        self._age = self._readings = self._moves = self._over = 0
        self._imbalance = np.ones(layout.layers)

    def launched(self) -> None:
        """Balance a little; the engine calls this after each launch."""
        self._age += 1
        if self._pending is not None and self._age >= LATE:
            self._count(*self._pending.read())
            self._pending = None
        elif self._period and self._age >= self._period and not (self._pending or self._plan):
            self._pending, self._age = self._runner.do(ReadExperts()), 0
        for _ in range(MOVES):
            if self._plan is None or (move := next(self._plan, None)) is None:
                break
            layer, source, target = move
            self._move(layer, source, target)

    def stats(self) -> ExpertStats:
        """Counts and moves so far."""
        of = self._imbalance
        return ExpertStats(self._readings, self._moves, float(of.mean()), float(of.max()), self._over)

    def _count(self, load: np.ndarray, over: np.ndarray) -> None:
        self._readings += 1
        self._over += int(over.sum())
        devices, now = self._layout.devices, load.astype(float)
        self._imbalance = np.array([imbalance(p, x, devices) for p, x in zip(self.placed, now, strict=True)])
        if self._layout.redundant:
            self._plan = self._planned(now)

    def _planned(self, loads: np.ndarray) -> Iterator[tuple[int, int, int] | None]:
        """Moves (layer, from slot, over slot); None after a layer, so that a launch plans one at most."""
        of, nodes = self._layout, self._nodes
        for layer, load in enumerate(loads):
            now = self.placed[layer].copy()
            goal = place(load, of.slots, of.devices, nodes, of.groups, of.width)
            if imbalance(now, load, of.devices) - imbalance(goal, load, of.devices) > GAIN:
                for source, target in moves(now, aligned(goal, now, of.devices, nodes)):
                    yield layer, source, target
            yield None
        self._plan = None

    def _move(self, layer: int, source: int, target: int) -> None:
        placed, of = self.placed[layer], self._layout
        placed[target] = placed[source]
        copies = copies_of(placed, of.experts, of.width)
        self._runner.do(MoveExpert(layer, source, target, copies))
        self._moves += 1
