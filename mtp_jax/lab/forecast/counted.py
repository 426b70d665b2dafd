"""A device without text: it counts tokens, and launches take predicted seconds of virtual time. No jax here.

An engine on it schedules a load as it would on the GPUs that the times are predicted for.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from mtp_jax.decode import launches
from mtp_jax.decode.arrays import Chunk, MaskMaker, Result
from mtp_jax.decode.keys import COUNT, EXTRA_COLUMNS, FINISH, Finish, Origin, StepKey
from mtp_jax.decode.launches import Launch, Traits
from mtp_jax.lab.planning.launch_time import LaunchWork
from mtp_jax.simulate.device import DEFERRED
from mtp_jax.simulate.language import mix
from mtp_jax.simulate.no_programs import NoPrograms

_FRACTION = 53  # bits of a float64 below 1


class Times(Protocol):
    """Seconds of launches, as ``planning.launch_time.LaunchTimes`` predicts them."""

    def launch(self, work: LaunchWork) -> float:
        """Seconds of a launch."""
        ...

    def flush(self, slots: int, steps: int) -> float:
        """Seconds of writing the NextN entries that ``steps`` steps of ``slots`` slots deferred."""
        ...


class Clock:
    """A clock that stands still until it is moved.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The seconds."""
        return self.now

    def until(self, at: float) -> None:
        """Move on to a time, if it is not past."""
        self.now = max(self.now, at)


class Counted(NoPrograms):
    """See ``launches.Runner``. Every token is 0; a request ends at ``max_tokens``.

    A request's seed is its row of ``shares``. The number of drafts that a step keeps for it depends on
    ``seed``, on the request and on its length, and on nothing else: no schedule changes its luck.

    Attributes:
        time: the device's time, which moves when the host waits for a result.
        idle: seconds between programs, in which none ran.
    """

    def __init__(
        self,
        times: Times,
        shares: Float[np.ndarray, "n K"],
        *,
        slots: int,
        page_size: int,
        shards: int = 1,
        seed: int = 0,
    ) -> None:
        """shares: the share of steps that keeps each draft, of each request; K = 0: nothing is drafted.

        page_size: attention reads whole pages.
        """
        super().__init__(shards, Traits(any_depth=False, by_rows=False))
        self.clock = self.time = Clock()
        self._times, self._shares, self._page, self._seed = times, shares, page_size, seed
        self._active = np.zeros(slots, bool)
        self._length, self._remaining, self._depth, self._request = np.zeros((4, slots), np.int64)
        self.idle = self._ends = 0.0
        self._slots = 1  # of the newest step

    @property
    def deferral(self) -> int:
        """Steps whose work the drafter can defer."""
        return DEFERRED if self._shares.shape[1] else 0

    def _launch(self, launch: Launch[Any], masks: MaskMaker | None) -> Callable[[], Any]:
        match launch:
            case launches.StepLaunch(key, chunk):
                end, result = self._runs(self._times.launch(self._work(key, chunk))), self._step(key, chunk)
                self._slots = max(key.slots, 1)
                return lambda: (self.time.until(end), result)[1]
            case launches.Admit(slot, row):
                self._remaining[slot], self._depth[slot] = row.remaining[0], row.depth[0]
                self._request[slot], self._active[slot] = row.sampling.seed[0], False
            case launches.Move(source, target):
                for array in (self._active, self._length, self._remaining, self._depth, self._request):
                    array[target] = array[source]
                self._active[source] = False
            case launches.Update(keep):
                self._active &= keep
            case _:
                raise TypeError(f"a device that counts has no {type(launch).__name__}")
        return lambda: None

    def _launch_flush(self) -> Callable[[], object]:
        end = self._runs(self._times.flush(self._slots, self._deferred))
        return lambda: self.time.until(end)

    def _runs(self, seconds: float) -> float:
        """The end of a program that is launched now: it begins when the program before it has ended."""
        begins = max(self._ends, self.time.now)
        self.idle += begins - self._ends
        self._ends = begins + seconds
        return self._ends

    def _work(self, key: StepKey, chunk: Chunk | None) -> LaunchWork:
        """The work of a step, before it changes lengths."""
        rows, prompts, seen = np.where(self._active, self._length, 0)[: key.slots], 0, 0
        busiest = rows.reshape(self.shards, -1).sum(axis=1).max() if key.slots else 0
        context = busiest * self.shards / max(key.slots, 1)
        if chunk is not None:
            started = chunk.start[chunk.count > 0]
            prompts = key.prompts * key.tokens
            seen = self._pages((started.mean() if started.size else 0) + key.tokens / 2)
        return LaunchWork(key.slots, key.room, self._pages(context), prompts, seen)

    def _pages(self, tokens: float) -> int:
        """A number of tokens, rounded up to whole pages."""
        return -int(-tokens // self._page) * self._page

    def _step(self, key: StepKey, chunk: Chunk | None) -> Result:
        prompts = 0 if chunk is None else len(chunk.slot)
        packed = np.zeros((key.slots + prompts, key.room + 1 + EXTRA_COLUMNS), np.int32)
        extra, at = packed[:, key.room + 1 :], np.flatnonzero(self._active[: key.slots])
        drafted = np.minimum(self._depth[at], key.depth)
        index = np.arange(key.depth)
        kept = self._luck(at)[:, None] < self._shares[self._request[at], : key.depth]
        accepted = (kept & (index < drafted[:, None])).sum(axis=1)
        count = np.minimum(accepted + 1, self._remaining[at])
        self._length[at] += count
        extra[at] = np.stack([count, accepted, drafted, self._emit(at, count), 0 * at + Origin.NEXTN], axis=1)
        if chunk is not None:
            rows = np.flatnonzero(chunk.count)
            slots, final, begins = chunk.slot[rows], chunk.final[rows], chunk.follows[rows] < 0
            self._length[slots] = chunk.start[rows] + chunk.count[rows]
            self._active[slots[final]] = True
            first = final & begins
            extra[key.slots + rows[first], COUNT] = 1
            extra[key.slots + rows[first], FINISH] = self._emit(slots[first], 1)
        return Result(packed, None, None)

    def _luck(self, at: np.ndarray) -> np.ndarray:
        """A number from 0 to 1 of each of these slots: one number decides for all its drafts."""
        own = mix(self._request[at].astype(np.uint64) + mix(self._seed))
        return (mix(own + self._length[at].astype(np.uint64)) >> (64 - _FRACTION)) * 2.0**-_FRACTION

    def _emit(self, at: np.ndarray, count: np.ndarray | int) -> np.ndarray:
        """Count emitted tokens of slots. Returns why each slot ended, or that it goes on."""
        self._remaining[at] -= count
        ended = self._remaining[at] <= 0
        self._active[at] = ~ended
        return np.where(ended, Finish.LENGTH, Finish.RUNNING)
