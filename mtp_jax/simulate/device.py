"""A device that speaks a ``Language``: slots, pages and a drafter's deferred work, in numpy. No jax here.

Steps read rows from pages through page tables, and write the rows of their windows there, so that a wrong
table, a stale page or a length off by one shows in the text, or as a ``Violation``. The drafter has entries
and boundary states of its own, as ``drafter/recursive.py`` has: where they differ from the text's, no draft
is right.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mtp_jax.decode import launches
from mtp_jax.decode.arrays import Chunk, MaskMaker, Result, SlotRow, TopLogprobs
from mtp_jax.decode.keys import EXTRA_COLUMNS, Finish, Origin, StepKey
from mtp_jax.decode.launches import Launch
from mtp_jax.simulate.language import MASK, NAN, Language, mix
from mtp_jax.simulate.memory import Slot, SlotMemory, Violation
from mtp_jax.simulate.no_programs import NoPrograms
from mtp_jax.simulate.ranking import likeliest

DEFERRED = 16
"""Number of steps whose work one flush does, as with the NextN drafter."""

_WORD = 32  # tokens of a word of a mask
_FREE = 2**_WORD - 1  # the word that allows all of them
_Scored = tuple[int, int]  # a token, after the hidden state that it follows


@dataclass
class ResultRow:
    """A row of a result."""

    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    finish: Finish = Finish.RUNNING
    before: list[int] = field(default_factory=list)  # the hidden state that each token follows


class Simulated(NoPrograms):
    """See ``launches.Runner``.

    Attributes:
        language: says the next token. Another language of the same size may take its place, as other weights
            may.
        launched: steps so far.
    """

    def __init__(
        self,
        language: Language,
        memory: SlotMemory,
        *,
        seconds: float = 0.0,
        margins: bool = False,
        routing: tuple[int, int, int] = (0, 0, 1),
    ) -> None:
        """seconds: seconds of a step on the device.

        margins: whether results have margins of drafts; right drafts have higher margins, mostly. routing:
        numbers of MoE layers, of choices in each, and of experts.
        """
        super().__init__(memory.shards)
        self.language, self._seconds, self._margins = language, seconds, margins
        self.launched, self._busy_until, self._routing = 0, 0.0, routing
        self._memory = memory

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(a[0].nbytes for a in self._memory.arrays)

    @property
    def _slots(self) -> dict[int, Slot]:
        return self._memory.slots

    # Launches

    @property
    def deferral(self) -> int:
        """Steps whose work the drafter can defer."""
        return DEFERRED if self.language.rates else 0

    def _launch(self, launch: Launch[Any], masks: MaskMaker | None) -> Callable[[], Any]:
        match launch:
            case launches.StepLaunch(key, chunk, estimate):
                return self._step(key, chunk, estimate, masks)
            case launches.Admit(slot, row, page):
                self._admit(slot, row, page)
            case launches.Move(source, target):
                self._move(source, target)
            case launches.Update(keep, page_table):
                for i, slot in self._slots.items():
                    slot.active &= bool(keep[i])
                    slot.table = np.array(page_table[i])
            case launches.ReadPages(shard, pages):
                data = tuple(a[self._memory.numbers(shard, pages)] for a in self._memory.arrays)
                return lambda: data
            case launches.WritePages(shard, pages, data):
                for array, new in zip(self._memory.arrays, data, strict=True):
                    array[self._memory.numbers(shard, pages)] = new
            case launches.ReadRouted(shard, pages, rows):
                chosen = self._routed(self._memory.arrays[0][self._memory.numbers(shard, pages)], rows)
                return lambda: chosen
            case launches.DraftLaunch(key, slot):
                return self._draft(key.depth, slot)
            case launches.ReleaseCache():
                self._release()
            case launches.AllocateCache():
                self._memory = self._memory.anew()
            case _:
                raise TypeError(f"a simulated device has no {type(launch).__name__}: nothing is counted")
        return lambda: None

    def _routed(self, pages: np.ndarray, count: int) -> np.ndarray:
        """Experts of the first rows in pages, which a row's number chooses."""
        layers, chosen, experts = self._routing
        each = pages.reshape(-1, 1)[:count] + np.arange(layers * chosen, dtype=np.uint64)
        return (mix(each) % np.uint64(experts)).astype(np.uint16).reshape(count, layers, chosen)

    def _admit(self, number: int, row: SlotRow, page: int | None) -> None:
        if number in self._slots and self._slots[number].active:
            raise Violation(f"slot {number} is in use; another request was put there")
        s = row.sampling
        changed = (s.presence, s.frequency, s.repetition - 1, s.min_tokens, s.logit_bias)
        slot = Slot(
            remaining=int(row.remaining[0]),
            generated=int(row.generated[0]),
            depth=int(row.depth[0]),
            table=np.array(row.page_table[0]),
            sampling=s,
            counts=np.array(s.counts[0]),
            heat=int(s.seed[0]) + 1 if s.temperature[0] > 0 else 0,
            plain=not any(a.any() for a in changed),
        )
        slot.pending = self._memory.boundary(number, page)
        # Work deferred for the slot's last request is lost, or goes wrong, unless it was flushed.
        slot.deferred = self._slots[number].deferred if number in self._slots else []
        self._slots[number] = slot

    def _move(self, source: int, target: int) -> None:
        if target in self._slots and self._slots[target].active:
            raise Violation(f"slot {target} is in use; {source} cannot move there")
        self._slots[target] = self._slots[source]
        self._slots[source] = replace(self._slots[source], active=False, deferred=[])

    def _release(self) -> None:
        if any(slot.active for slot in self._slots.values()):
            raise Violation("the cache was released while slots were in use")
        for array in self._memory.arrays:
            array[:] = 0

    def _launch_flush(self) -> Callable[[], object]:
        self._memory.flush()
        return lambda: None

    # Steps

    def _step(
        self, key: StepKey, chunk: Chunk | None, estimate: np.ndarray | None, masks: MaskMaker | None
    ) -> Callable[[], Result]:
        if key.program not in self._compiled:
            raise Violation(f"{key} was never compiled")
        if key.mode.structured and masks is None:
            raise ValueError(f"{key} is structured: it needs masks")
        active = [i for i in range(key.slots) if i in self._slots and self._slots[i].active]
        drafts, allowed = self._propose(key, active, masks if key.mode.structured else None)
        margins = self._margins_of(key, drafts) if self._margins and key.room else None
        if key.kept is not None and estimate is not None and margins is not None:
            drafts = self._ranked(key, drafts, margins, estimate)
        rows = [ResultRow() for _ in range(key.slots)]
        for i in active:
            bits = None if allowed is None else allowed[i]
            rows[i] = self._window(i, key, drafts[i], bits, chunk is None)
        prompt = None
        if chunk is not None:
            filled = [self._fill(chunk, g, key) for g in range(len(chunk.slot))]
            rows += [row for row, _ in filled]
            if key.prompt_logprobs is not None:
                prompt = self._scores([top for _, top in filled], key.tokens, key.prompt_logprobs)
        self.launched += 1
        at = self._ends()
        result = replace(self._result(key, rows, prompt), margins=margins)
        return lambda: self._arrived(at, result)

    def _ends(self) -> float:
        """The time at which a step that is launched now ends: it begins when the step before it has ended."""
        self._busy_until = max(self._busy_until, self.clock()) + self._seconds
        return self._busy_until

    def _arrived(self, at: float, result: Result) -> Result:
        if self._seconds and (left := at - self.clock()) > 0:
            time.sleep(left)
        return result

    def _propose(
        self, key: StepKey, active: Sequence[int], masks: MaskMaker | None
    ) -> tuple[dict[int, list[int]], np.ndarray | None]:
        """Drafts of the active slots; and, if there are masks, the tokens that grammars allow behind them."""
        along = masks(None) if masks else None
        depths = {i: min(key.depth, self._slots[i].depth) for i in active}
        drafts = {i: self._drafts_of(i, n, None if along is None else along[i]) for i, n in depths.items()}
        if masks is None:
            return drafts, None
        padded = np.zeros((key.slots, key.room), np.int32)
        for i, tokens in drafts.items():
            padded[i, : len(tokens)] = tokens
        return drafts, masks(padded)

    def _drafts_of(self, number: int, count: int, along: np.ndarray | None = None) -> list[int]:
        """Drafts after a slot's newest token."""
        slot, drafts = self._slots[number], list[int]()
        if not count:
            return drafts
        well, (total, _) = self._memory.drafts_well(number), self._memory.read(number, slot.length)
        total = (total + self.language.row(slot.newest, slot.length)) & MASK
        newest, counts = mix(total), slot.counts
        for k in range(count):
            hidden = mix(total)
            token = self._choose(slot, hidden, None if along is None else along[k], k, counts)
            if not (well and self.language.right(newest, k)):
                token = self.language.another(token)
            drafts.append(token)
            if not slot.plain:
                counts = counts.copy()
                counts[token] += 1
            total = (total + self.language.row(token, slot.length + 1 + k)) & MASK
        return drafts

    def _margins_of(self, key: StepKey, drafts: dict[int, list[int]]) -> np.ndarray:
        """The margin of every draft."""
        margins = np.zeros((key.slots, key.room), np.float32)
        for i in drafts:
            slot, (total, _) = self._slots[i], self._memory.read(i, self._slots[i].length)
            newest = mix((total + self.language.row(slot.newest, slot.length)) & MASK)
            margins[i] = [self.language.margin(newest, k) for k in range(key.room)]
        return margins

    def _ranked(
        self, key: StepKey, drafts: dict[int, list[int]], margins: np.ndarray, estimate: np.ndarray
    ) -> dict[int, list[int]]:
        """The drafts that a step verifies which does not verify all."""
        shards, most = self._memory.shards, np.array([len(drafts.get(i, ())) for i in range(key.slots)])
        given, count = estimate[Origin.NEXTN], (key.kept or 0) * key.slots // shards
        parts = zip(np.split(margins, shards), np.split(most, shards), strict=True)
        counts = np.concatenate([likeliest(own, room, given, count) for own, room in parts])
        return {i: own[: counts[i]] for i, own in drafts.items()}

    def _choose(
        self, slot: Slot, hidden: int, allowed: np.ndarray | None, ahead: int, counts: np.ndarray
    ) -> int:
        """The next token after ``ahead`` tokens of a window; -1 where nothing is allowed."""
        if allowed is not None and (allowed == _FREE).all():
            allowed = None
        if slot.plain and allowed is None:
            return self.language.next(hidden, slot.heat)
        s, logits = slot.sampling, self.language.logits(hidden, slot.heat)
        if not slot.plain:
            seen = (counts > 0) | s.prompt_mask[0]
            logits = np.where(
                seen, np.where(logits > 0, logits / s.repetition, logits * s.repetition), logits
            )
            logits = logits - s.presence * (counts > 0) - s.frequency * counts + s.logit_bias[0]
            if slot.generated + ahead < s.min_tokens[0]:
                logits[s.stop_mask[0]] = -np.inf
        if allowed is not None:
            bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(logits)]
            logits[bits == 0] = -np.inf
        best = int(logits.argmax())
        return best if np.isfinite(logits[best]) else -1

    def _window(
        self, number: int, key: StepKey, drafts: Sequence[int], allowed: np.ndarray | None, alone: bool
    ) -> ResultRow:
        """Verify a slot's drafts, emit, commit."""
        slot = self._slots[number]
        self._memory.fit(number, slot.length + len(drafts) + 1, key.pages)
        before = self._memory.read(number, slot.length)
        window = [slot.newest, *drafts]
        rows = [self.language.row(token, slot.length + i) for i, token in enumerate(window)]
        self._memory.write(number, slot.length, rows)
        tokens, hidden, sound = self._targets(slot, before, rows, drafts, allowed)
        count, finish = _ended(slot, tokens, sound)
        row = ResultRow(tokens[:count], len(tokens) - 1, len(drafts), finish, hidden[:count])
        self._memory.check(number, slot.length + count, key.pages)
        slot.length += count
        if count and self.deferral:
            self._memory.commit(number, rows[:count], hidden[:count], defer=not key.room and alone)
        slot.newest = (slot.newest, *tokens)[count]
        slot.remaining -= count
        slot.generated += count
        slot.active = finish is Finish.RUNNING
        self._count_tokens(slot, row.tokens)
        return row

    def _targets(
        self,
        slot: Slot,
        before: tuple[int, bool],
        rows: Sequence[int],
        drafts: Sequence[int],
        allowed: np.ndarray | None,
    ) -> tuple[list[int], list[int], int]:
        """The tokens that a window may emit, up to the first that is no draft, and their hidden states.

        before: the sum of the rows before the window, and whether all are finite. Returns also the number of
        the first of these tokens that have a distribution.
        """
        (total, healthy), targets, hidden, counts = before, list[int](), list[int](), slot.counts
        sound = 0
        for i, row in enumerate(rows):
            total = (total + row) & MASK
            healthy &= row != NAN
            hidden.append(mix(total))
            targets.append(self._choose(slot, hidden[-1], None if allowed is None else allowed[i], i, counts))
            if sound == i and healthy and targets[-1] >= 0:
                sound += 1
            if i == len(drafts) or drafts[i] != targets[-1]:
                break
            if not slot.plain:
                counts = counts.copy()
                counts[drafts[i]] += 1
        return targets, hidden, sound

    def _count_tokens(self, slot: Slot, tokens: Sequence[int]) -> None:
        if not slot.plain:
            np.add.at(slot.counts, list(tokens), 1)

    def _fill(self, chunk: Chunk, g: int, key: StepKey) -> tuple[ResultRow, list[_Scored]]:
        """A row of a chunk: the next tokens of a prompt, and the first of its output."""
        begin, count = int(chunk.start[g]), int(chunk.count[g])
        if not count:
            return ResultRow(), []
        number, end, say = int(chunk.slot[g]), begin + count, self.language
        if number not in self._slots:
            raise Violation(f"a chunk for slot {number}, which has no request")
        slot = self._slots[number]
        if (
            slot.active
            or (slot.begun and begin != slot.length)
            or (not slot.begun and begin % self._memory.page_size)
        ):
            raise Violation(f"a chunk of slot {number} begins at {begin}, its rows end at {slot.length}")
        self._memory.check(number, end, key.pages)
        total, healthy = self._memory.read(number, begin)
        rows, hidden = list[int](), list[int]()
        for i, token in enumerate(chunk.tokens[g, :count].tolist()):
            rows.append(say.row(token, begin + i))
            total = (total + rows[-1]) & MASK
            hidden.append(mix(total))
        healthy &= NAN not in rows
        self._memory.write(number, begin, rows)
        slot.length, slot.begun = end, True
        if self.deferral:
            self._memory.commit(number, rows, hidden, defer=False)
        row, follows = ResultRow(before=hidden[-1:]), int(chunk.follows[g])
        if not healthy:
            row.finish = Finish.NAN
        elif chunk.final[g] and follows >= 0:
            slot.newest, slot.active = follows, True
        elif chunk.final[g]:
            token = self._choose(slot, hidden[-1], chunk.allowed[g], 0, slot.counts)
            self._begin(slot, token, row)
        targets = chunk.targets[g, :count].tolist()
        return row, [*zip(hidden, targets, strict=True)]

    def _begin(self, slot: Slot, token: int, row: ResultRow) -> None:
        """Emit the first token of an output."""
        if token < 0:
            row.finish = Finish.NAN
            return
        row.tokens, slot.newest = [token], token
        slot.remaining -= 1
        slot.generated += 1
        if slot.sampling.stop_mask[0, token]:
            row.finish = Finish.STOP
        elif not slot.remaining:
            row.finish = Finish.LENGTH
        slot.active = row.finish is Finish.RUNNING
        self._count_tokens(slot, row.tokens)

    def _draft(self, depth: int, number: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        slot, tokens = self._slots[number], self._drafts_of(number, depth)
        total, _ = self._memory.read(number, slot.length)
        logits = []
        for i, token in enumerate((slot.newest, *tokens[:-1])):
            total = (total + self.language.row(token, slot.length + i)) & MASK
            logits.append(self.language.logits(mix(total)))
        found = np.array(tokens, np.int32), np.stack(logits)
        return lambda: found

    # Results

    def _result(self, key: StepKey, rows: Sequence[ResultRow], prompt: TopLogprobs | None) -> Result:
        width = key.room + 1
        packed = np.full((len(rows), width + EXTRA_COLUMNS), -1, np.int32)
        for i, row in enumerate(rows):
            packed[i, : len(row.tokens)] = row.tokens
            packed[i, width:] = [len(row.tokens), row.accepted, row.drafted, row.finish, Origin.NEXTN]
        top = None
        if key.mode.logprobs is not None:
            scored = [[*zip(row.before, row.tokens, strict=False)] for row in rows]
            top = self._scores(scored, width, key.mode.logprobs)
        return Result(packed, top, prompt)

    def _scores(self, rows: Sequence[Sequence[_Scored]], width: int, count: int) -> TopLogprobs:
        """Log-probabilities of tokens, and of the ``count`` likeliest tokens in their places."""
        say, shape = self.language, (len(rows), width)
        chosen, rank = np.zeros(shape, np.float32), np.ones(shape, np.int32)
        ids, values = np.zeros((*shape, count), np.int32), np.zeros((*shape, count), np.float32)
        values[:] = [say.logprob(n) for n in range(count)]
        for i, row in enumerate(rows):
            for j, (hidden, token) in enumerate(row):
                place = say.rank(hidden, max(token, 0))
                chosen[i, j], rank[i, j] = say.logprob(place), place + 1
                ids[i, j] = say.likeliest(hidden, count)
        return TopLogprobs(chosen, rank, ids, values)


def _ended(slot: Slot, tokens: Sequence[int], sound: int) -> tuple[int, Finish]:
    """The number of these tokens that a slot emits, and how its output ends.

    sound: number of the first tokens that have a distribution.
    """
    never = len(tokens) + 1
    stop = next((i for i, t in enumerate(tokens) if t >= 0 and slot.sampling.stop_mask[0, t]), never)
    broken = sound if sound < len(tokens) else never
    count = min(len(tokens), stop + 1, slot.remaining, broken)
    if stop < count:
        return count, Finish.STOP
    if count == slot.remaining:
        return count, Finish.LENGTH
    return count, Finish.NAN if broken <= count else Finish.RUNNING
