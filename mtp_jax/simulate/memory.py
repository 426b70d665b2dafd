"""Memory of a simulated device: slots, pages of rows, and a drafter's entries. No jax here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mtp_jax.decode.arrays import SamplingState
from mtp_jax.simulate.language import MASK, NAN, mix


class Violation(AssertionError):
    """The host asked for a launch that would be wrong on any device."""


@dataclass
class Slot:
    """See ``decode.state.Slots``.

    Attributes:
        table: a row of the page table.
        heat: a number that a request samples by; 0: it takes the likeliest token.
        plain: whether nothing adjusts the logits.
        begun: whether a chunk has been read.
        pending: the hidden state that the next entry of the drafter merges.
        deferred: rows of committed tokens whose entries are to be written, and the hidden states after them.
    """

    remaining: int
    generated: int
    depth: int
    table: np.ndarray
    sampling: SamplingState
    counts: np.ndarray
    heat: int
    plain: bool
    length: int = 0
    newest: int = 0
    active: bool = False
    begun: bool = False
    pending: int = 0
    deferred: list[tuple[int, int]] = field(default_factory=list)


class SlotMemory:
    """Slots, and pages of all data shards: each shard has ``pages`` and a spare page, for padding.

    Attributes:
        slots: slots by number, once a request was put there.
        arrays: contents of pages: rows and the drafter's entries, uint64 [pages, page_size], and beside each
            page the hidden state at its end.
        page_size: entries of a page.
        shards: number of data shards.
    """

    def __init__(self, slots: int, pages: int, page_size: int, shards: int) -> None:
        self._sizes, self.shards = (slots, pages, page_size, shards), shards
        self._per_shard, self._spare, self.page_size = slots // shards, pages, page_size
        every = (pages + 1) * shards
        self._rows, self._entries = (np.zeros((every, page_size), np.uint64) for _ in range(2))
        self._boundary = np.zeros(every, np.uint64)
        self.arrays = self._rows, self._entries, self._boundary
        self.slots: dict[int, Slot] = {}

    def anew(self) -> "SlotMemory":
        """An empty memory of the same sizes."""
        return SlotMemory(*self._sizes)

    def numbers(self, shard: int, pages: Sequence[int]) -> list[int]:
        """Pages of a data shard, counted over all shards."""
        if any(not 0 <= p < self._spare for p in pages):
            raise Violation(f"pages {pages} of {self._spare}")
        return [shard * (self._spare + 1) + p for p in pages]

    def boundary(self, number: int, page: int | None) -> int:
        """The hidden state at the end of a page of a slot's data shard; None: of the spare page."""
        return int(self._boundary[self._first(number) + (self._spare if page is None else page)])

    def _first(self, number: int) -> int:
        """The first page of a slot's data shard."""
        return number // self._per_shard * (self._spare + 1)

    def _at(self, number: int, positions: Sequence[int] | range) -> tuple[np.ndarray, np.ndarray]:
        """The pages, counted over all shards, and the entries in them, of a slot's positions."""
        where = np.asarray(positions, np.int64)
        pages = self.slots[number].table[where // self.page_size]
        return self._first(number) + pages, where % self.page_size

    def fit(self, number: int, rows: int, columns: int) -> None:
        """Raises Violation if ``rows`` of a slot do not fit in a program's columns of the page table."""
        if rows > columns * self.page_size:
            raise Violation(f"{rows} rows of slot {number} in {columns} pages of {self.page_size}")

    def check(self, number: int, rows: int, columns: int) -> None:
        """Raises Violation unless a program's columns, and the slot, have pages for ``rows``."""
        self.fit(number, rows, columns)
        held = self.slots[number].table[: -(-rows // self.page_size)]
        if (held >= self._spare).any():
            raise Violation(f"{rows} rows of slot {number}, whose pages are {held.tolist()}")

    def _extend(self, number: int, rows: Sequence[int], hidden: Sequence[int], end: int) -> None:
        """Write the drafter's entries of committed tokens, the last of which is before position ``end``."""
        slot, positions = self.slots[number], range(end - len(rows), end)
        before = [slot.pending, *hidden[:-1]]
        entries = [mix((h + row) & MASK) for h, row in zip(before, rows, strict=True)]
        pages, at = self._at(number, positions)
        self._entries[pages, at] = np.array(entries, np.uint64)
        for page, position, h in zip(pages, positions, hidden, strict=True):
            if position % self.page_size == self.page_size - 1:
                self._boundary[page] = h
        slot.pending = hidden[-1]

    def flush(self) -> None:
        """Write the entries that were deferred."""
        for number, slot in self.slots.items():
            if slot.deferred:
                rows, hidden = zip(*slot.deferred, strict=True)
                # Work deferred for a slot that has begun anew belongs to nobody.
                if slot.length >= len(rows):
                    self._extend(number, rows, hidden, slot.length)
                slot.deferred = []

    def drafts_well(self, number: int) -> bool:
        """Whether the drafter's entries and its pending hidden state follow from the slot's tokens."""
        slot = self.slots[number]
        at = self._at(number, range(slot.length))
        rows = self._rows[at]
        hidden = mix(np.cumsum(rows, dtype=np.uint64))
        entries = mix(hidden[:-1] + rows[1:])
        return bool((self._entries[at][1:] == entries).all()) and slot.pending == int(hidden[-1])

    def read(self, number: int, length: int) -> tuple[int, bool]:
        """The sum of a slot's first rows, and whether all of them are finite."""
        rows = self._rows[self._at(number, range(length))]
        return int(rows.sum(dtype=np.uint64)), not (rows == NAN).any()

    def write(self, number: int, begin: int, rows: Sequence[int]) -> None:
        """Write rows of a slot from this position on."""
        self._rows[self._at(number, range(begin, begin + len(rows)))] = np.array(rows, np.uint64)

    def commit(self, number: int, rows: Sequence[int], hidden: Sequence[int], defer: bool) -> None:
        """Let the drafter observe the last tokens of a slot. defer: keep the last token for ``flush``."""
        slot = self.slots[number]
        if defer:
            slot.deferred.append((rows[0], hidden[0]))
        else:
            self._extend(number, rows, hidden, slot.length)
