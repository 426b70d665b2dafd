"""Simulated machines and loads in which depth controllers are compared: seeded, no clock, no device.

A world charges what an engine pays. The seconds of a launch have log-normal noise, and one launch in fifty
has a hiccup on top. The whole machine may be slow for a spell. A step may be slower right after a deeper one,
whose data fill the caches. A catch-up writes the entries that steps at depth 0 deferred. A prefill stops all
rows, unless steps take its chunks along. The host reads a launch after the next one has begun: a row that
ended takes part in that one in vain, and only then is its slot free. All controllers meet the same noise and
the same luck.

``python -m tests.engine.worlds`` prints the table of worlds, and how far each number of ``DepthPolicy``,
halved and doubled, moves it.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from statistics import mean, median
from typing import Protocol

import numpy as np

from mtp_jax.engine.depth import DepthController
from mtp_jax.engine.depth_policy import DepthPolicy, DepthRow, StepDepths, adaptive_depths

MOST = 3
DEPTHS = adaptive_depths(MOST)
BACKLOG = 16  # steps at depth 0 whose entries one catch-up writes at most
TOGETHER = 4  # prompts that one prefill takes at most
PROMPT = 1024  # tokens of a prompt
SETTLES = 16  # steps after a deeper one until the caches are a step's own
SEEDS = range(7)


@dataclass(frozen=True)
class Key:
    """A step's program. ``chunk``: prompt tokens that it takes along. kept: see ``StepKey``."""

    slots: int
    depth: int
    chunk: int = 0
    kept: int | None = None

    @property
    def bucket(self) -> "Key":
        """The same work, whatever its number of drafts."""
        return replace(self, depth=0, kept=None)

    @property
    def way(self) -> StepDepths:
        """Drafts made and drafts verified for each slot."""
        return self.depth, self.depth if self.kept is None else self.kept


class Controller(Protocol):
    """What runs in a world, as ``DepthController`` does."""

    def choose(self, keys: Sequence[Key], depths: Sequence[int], price: float | None = None) -> Key: ...
    def learn(self, key: Key, seconds: float, depths: Sequence[int], rows: Sequence[DepthRow]) -> None: ...
    def rate(self, keys: Sequence[Key], depths: Sequence[int]) -> float | None: ...


@dataclass(frozen=True)
class World:
    """A machine and a load.

    Attributes:
        seconds: of a step: launch, key.
        rates: chance that the draft at each position is accepted once those before it are: launch.
        slots: rows that run together at most.
        clients: requests at a time, after so many tokens; None: as many as slots.
        tokens: fewest and most tokens of a request; None: requests never end.
        prefill: seconds of a prefill, and further ones for each prompt that it takes.
        chunk: prompt tokens that a step takes along while prompts wait; 0: prefills run by themselves.
        caps: most drafts of the rows, in turn.
        noise: standard deviation of the logarithm of the seconds.
        spells: whether the machine takes 1.5 or 2 times as long for 100 to 800 launches now and then. They
            mislead a controller, but runs are compared without them: chance decides what runs in one.
        settle: how much longer a step takes right after a deeper one, fading over ``SETTLES`` steps.
        catch_up: seconds of a catch-up.
        launches: of a run, at most.
        work: tokens after which a run ends. Where the load follows the tokens all runs must do the same.
    """

    seconds: Callable[[int, Key], float]
    rates: Callable[[int], Sequence[float]]
    slots: int = 1
    clients: Callable[[float], int] | None = None
    tokens: tuple[int, int] | None = None
    prefill: tuple[float, float] = (1.5, 0.5)
    chunk: int = 0
    caps: tuple[int, ...] = (MOST,)
    noise: float = 0.08
    spells: bool = False
    settle: float = 0.0
    catch_up: float = 0.25
    launches: int = 3000
    work: float = math.inf

    def luck(self, seed: int) -> tuple[list[float], list[float], list[list[int]]]:
        """Of each launch its noise and its spell, and how many first drafts of each slot are right."""
        rng, n = np.random.default_rng(seed), self.launches
        noise = np.exp(rng.normal(0, self.noise, n)) * (1 + (rng.random(n) < 0.02) * rng.exponential(1, n))
        spells, begin = np.ones(n), 0
        while self.spells and begin < n:
            end = begin + int(rng.integers(100, 801))
            spells[begin:end] = rng.choice((1.0, 1.0, 1.5, 2.0))
            begin = end
        chance = np.array([self.rates(i) for i in range(n)])[:, None, :]
        right = np.logical_and.accumulate(rng.random((n, self.slots, MOST)) < chance, axis=2).sum(axis=2)
        return noise.tolist(), spells.tolist(), right.tolist()


@lru_cache(maxsize=1)
def _luck(world: World, seed: int) -> tuple[list[float], list[float], list[list[int]]]:
    """``World.luck``, which all controllers meet one after the other."""
    return world.luck(seed)


@cache
def keys_of(slots: int, chunk: int) -> list[Key]:
    """The programs of a bucket."""
    return [Key(slots, depth, chunk) for depth in DEPTHS]


class Run:
    """One controller in one world."""

    def __init__(self, world: World, controller: Controller, seed: int) -> None:
        self.world, self.controller, self.rng = world, controller, random.Random(seed)
        self.noise, self.spells, self.right = _luck(world, seed)
        self.caps = [world.caps[slot % len(world.caps)] for slot in range(world.slots)]
        powers = {min(1 << i, world.slots) for i in range(world.slots.bit_length() + 1)}
        self.sizes = sorted(powers) if world.clients else [world.slots]
        self.tokens = self.seconds = 0.0
        self.left: dict[int, float] = {}  # tokens to come of the rows that go on, by slot
        self.ended: dict[int, bool] = {}  # rows that the newest launch ended; whether that was sure before
        self.waiting: list[int] = []  # slots whose prompts wait
        self.prefilled = 0  # tokens of the first of them
        self.deferred = 0  # steps whose entries are deferred
        self.caught_up: deque[tuple[float, int]] = deque([(0.0, 1)], maxlen=2)
        self.last = dict.fromkeys(DEPTHS, -SETTLES)  # launch at which each depth ran
        self.unread: list[tuple[Key, float, list[int], list[DepthRow]]] = []

    def warm_up(self) -> None:
        """Measure every program over empty slots, where it takes somewhat more or less time than else."""
        assert isinstance(self.controller, DepthController)
        for slots in self.sizes:
            keys = [k for chunk in {0, self.world.chunk} for k in keys_of(slots, chunk)]
            typical = {k: self.world.seconds(0, k) * math.exp(self.rng.gauss(0, 0.1)) for k in keys}
            for key in self.controller.warm_up(keys):
                noise = math.exp(self.rng.gauss(0, self.world.noise))
                self.controller.learn(key, typical[key] * noise, [], [])

    def rate(self) -> float:
        """Tokens per second of the whole run."""
        for i in range(self.world.launches):
            if self.tokens >= self.world.work:
                break
            self._fill(i)
            key, rows = self._next()
            if self.unread:
                self.controller.learn(*self.unread.pop())
            if key:
                self._launch(i, key, rows)
            else:
                self.ended = {}
        return self.tokens / self.seconds

    def _fill(self, i: int) -> None:
        """Give free slots prompts, and prefill what steps do not take along."""
        world = self.world
        clients = min(world.clients(self.tokens), world.slots) if world.clients else world.slots
        if len(self.left) < clients:
            taken = {*self.left, *self.waiting, *self.ended}
            self.waiting += [slot for slot in range(clients) if slot not in taken]
        while self.waiting and not world.chunk:
            some, self.waiting = self.waiting[:TOGETHER], self.waiting[TOGETHER:]
            self._catch_up(i)
            self.seconds += (world.prefill[0] + world.prefill[1] * len(some)) * self.noise[i]
            for slot in some:
                self._begin(slot)

    def _begin(self, slot: int) -> None:
        """A prompt's first token."""
        self.left[slot] = self.rng.randint(*self.world.tokens) - 1 if self.world.tokens else math.inf
        self.tokens += 1

    def _next(self) -> tuple[Key | None, list[int]]:
        """What to launch, for the rows of which slots."""
        rows = sorted([*self.left, *(slot for slot, sure in self.ended.items() if not sure)])
        chunk = self.world.chunk if self.waiting else 0
        if not self.left:
            return (Key(self.sizes[0], 0, chunk) if chunk else None), []
        slots = next(size for size in self.sizes if size > rows[-1])
        keys, asked = keys_of(slots, chunk), [self.caps[slot] for slot in rows]
        if self.world.tokens:
            room = max(min(self.caps[slot], left - 1) for slot, left in self.left.items())
            keys = [key for key in keys if key.depth <= room]
        price = self.controller.rate(keys_of(slots, 0)[: len(keys)], asked) if chunk else None
        return self.controller.choose(keys, asked, price), rows

    def _launch(self, i: int, key: Key, slots: list[int]) -> None:
        world, depth = self.world, key.depth
        if depth or self.deferred == BACKLOG:
            self._catch_up(i)
        self.deferred += not depth
        since = min((i - n - 1 for d, n in self.last.items() if d > depth), default=SETTLES)
        self.last[depth] = i
        seconds = world.seconds(i, key) * (1 + world.settle * max(1 - since / SETTLES, 0)) * self.noise[i]
        self.seconds += seconds
        self.ended = {}
        rows = [self._row(slot, depth, self.right[i][slot]) for slot in slots]
        if key.chunk:
            self.prefilled += key.chunk
            if self.prefilled >= PROMPT:
                self.prefilled = 0
                self._begin(self.waiting.pop(0))
        if rows:
            # The engine charges a step at depth 0 for writing its entries later, by the last two catch-ups.
            later = 0 if depth else sum(s for s, _ in self.caught_up) / sum(n for _, n in self.caught_up)
            self.unread.append((key, (seconds + later) * self.spells[i], [self.caps[s] for s in slots], rows))

    def _row(self, slot: int, depth: int, right: int) -> DepthRow:
        """One row of a step. right: how many first drafts would be accepted."""
        left = self.left.get(slot)
        if left is None:  # it had ended
            return 0, 0, 0
        drafted = min(depth, self.caps[slot])
        accepted = min(drafted, right)
        emitted = accepted + 1
        if emitted >= left:
            emitted = int(left)
            del self.left[slot]
            self.ended[slot] = left == 1
        else:
            self.left[slot] = left - emitted
        self.tokens += emitted
        return drafted, accepted, emitted

    def _catch_up(self, i: int) -> None:
        if self.deferred:
            seconds = self.world.catch_up * self.noise[i]
            self.seconds += seconds
            self.caught_up.append((seconds * self.spells[i], self.deferred))
            self.deferred = 0


class Fixed:
    """Always the same depth, or the deepest below it for which there is room."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def choose(self, keys: Sequence[Key], depths: Sequence[int], price: float | None = None) -> Key:
        return max((key for key in keys if key.depth <= self.depth), key=lambda key: key.depth)

    def learn(self, key: Key, seconds: float, depths: Sequence[int], rows: Sequence[DepthRow]) -> None:
        pass

    def rate(self, keys: Sequence[Key], depths: Sequence[int]) -> float | None:
        return None


def table(depth_0: float, depth_1: float, depth_3: float) -> Callable[[int, Key], float]:
    """Seconds of a step by its depth."""
    by_depth = {0: depth_0, 1: depth_1, 3: depth_3}
    return lambda i, key: by_depth[key.depth]


def linear(token: float, prompt: float = 0.0) -> Callable[[int, Key], float]:
    """Seconds of a step: 1 to read the weights, 0.1 to draft a token, and so much for each token verified."""
    return lambda i, key: 1 + 0.1 * key.depth + token * key.slots * (key.depth + 1) + prompt * key.chunk


def accepts(*rates: float) -> Callable[[int], Sequence[float]]:
    """Rates by position that stay; the last holds for all after it."""
    return lambda i: (*rates, *rates[-1:] * MOST)[:MOST]


_one = table(1, 1.3, 1.75)

WORLDS = {
    "batch 1, drafts pay": World(_one, accepts(0.85)),
    "batch 1, drafts do not pay": World(_one, accepts(0.25)),
    "batch 1, slow spells": World(_one, accepts(0.85), spells=True),
    "batch 2, caches settle": World(table(1, 1.4, 2.1), accepts(0.8), slots=2, settle=0.4),
    "batch 8, a gain of 9 %": World(table(1, 1.62, 2.5), accepts(0.75), slots=8, noise=0.1),
    "batch 8, no depth better, spells, caches settle": World(
        table(1, 1.75, 2.8), accepts(0.75), slots=8, spells=True, settle=0.3
    ),
    "batch 16, hopeless, spells": World(table(1, 1.95, 3.8), accepts(0.85), slots=16, spells=True),
    "acceptance turns": World(_one, lambda i: (0.1 if i // 2000 % 2 else 0.9,) * MOST, launches=6000),
    "costs turn": World(
        lambda i, key: (table(1, 1.3, 1.9) if i < 4000 else table(1, 1.9, 3.7))(i, key),
        accepts(0.8),
        slots=4,
        launches=6000,
    ),
    "first draft good, third bad": World(_one, accepts(0.85, 0.4, 0.1)),
    "batch 16, drafts never pay": World(linear(0.2), accepts(0.6), slots=16, noise=0.1),
    "dear catch-ups": World(table(1, 1.62, 2.9), accepts(0.65), slots=8, catch_up=2.0),
    "depth capped by request": World(linear(0.07), accepts(0.8), slots=8, caps=(0, 1, 3, 3)),
    "drafts make rows end apart": World(linear(0.07), accepts(0.75), slots=8, tokens=(64, 64)),
    "rows end apart": World(linear(0.07), accepts(0.75), slots=8, tokens=(20, 200)),
    "load turns": World(
        linear(0.12),
        accepts(0.75),
        slots=16,
        tokens=(20, 100),
        clients=lambda tokens: (1, 16, 4, 12)[int(tokens) // 2000 % 4],
        launches=6000,
        work=16000,
    ),
    "steps take prompts along": World(
        linear(0.04, 0.004), accepts(0.8), slots=4, tokens=(20, 200), chunk=256
    ),
    "steps take prompts along, drafts never pay": World(
        linear(0.2, 0.02), accepts(0.6), slots=16, tokens=(20, 200), chunk=256
    ),
}


@cache
def best_fixed(name: str, seed: int) -> float:
    """Tokens per second of the depth that is best in this world."""
    return max(Run(WORLDS[name], Fixed(depth), seed).rate() for depth in DEPTHS)


def over_best_fixed(make: Callable[[], Controller], name: str, seed: int) -> float:
    """Tokens per second over those of the best fixed depth. A ``DepthController`` is warmed up first."""
    run = Run(WORLDS[name], make(), seed)
    if isinstance(run.controller, DepthController):
        run.warm_up()
    return run.rate() / best_fixed(name, seed)


@cache
def scores(make: Callable[[], Controller], name: str, seeds: range = SEEDS) -> list[float]:
    """``over_best_fixed`` by seed."""
    return [over_best_fixed(make, name, seed) for seed in seeds]


def mean_of(found: Iterable[Sequence[float]]) -> float:
    """Over worlds and seeds."""
    return mean(map(mean, found))


def _print_tables() -> None:
    found = {name: scores(partial(DepthController, MOST), name) for name in WORLDS}
    print("| world | best fixed depth | median | worst seed |\n| --- | ---: | ---: | ---: |")
    for name, ratios in found.items():
        best = max(DEPTHS, key=lambda depth: Run(WORLDS[name], Fixed(depth), 0).rate())
        print(f"| {name} | {best} | {median(ratios):.3f} | {min(ratios):.3f} |")
    print(f"| mean; worst | | {mean_of(found.values()):.4f} | {min(map(min, found.values())):.3f} |\n")
    print("| number | from | to | mean | worst |\n| --- | ---: | ---: | ---: | ---: |", flush=True)
    policy = DepthPolicy()
    for field in fields(policy):
        value = getattr(policy, field.name)
        for other in (type(value)(value / 2), type(value)(value * 2)):
            if field.name == "prior" and other > 1:
                other = 1 - (1 - value) / 2  # half the chance of a rejection
            make = partial(DepthController, MOST, DepthPolicy(**{field.name: other}))
            ratios = [scores(make, name) for name in WORLDS]
            shown = f"{mean_of(ratios):.4f} | {min(map(min, ratios)):.3f}"
            print(f"| {field.name} | {value:g} | {other:g} | {shown} |", flush=True)


if __name__ == "__main__":
    _print_tables()
