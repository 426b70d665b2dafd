"""Widths of a head's keys and values, and the shared memory that a thread block takes for them."""

from dataclasses import dataclass
from itertools import count, takewhile
from math import prod

import jax.numpy as jnp

from kernels_pallas.mosaic import SHARED, SWIZZLE, WGMMA_ROWS

# Width of the key's part that all heads share.
ROPE = 64
ROWS = WGMMA_ROWS
COMPUTE = 2  # warpgroups
QUERIES = COMPUTE * ROWS  # of a thread block
STAGES = 2
# Columns that a row of a tensor-core operand grows by; columns of probabilities in shared memory at a time.
PART = SWIZZLE // jnp.dtype(jnp.bfloat16).itemsize
# Keys of a step: the first that leave room for two stages. A thread has 64 registers of 128 keys' scores.
KEYS = (2 * PART, PART)
# Columns of the widest wgmma. They are 128 of a thread's 240 registers; 64 keys' scores are 32.
_WIDEST = 256
# Bytes beside operands: sums of exponentials, scratch of reductions, barriers, and alignment to 1 KiB.
_BESIDE = 2048


@dataclass(frozen=True)
class HeadWidths:
    """Widths of one call.

    Attributes:
        key: width of a head's own keys, h, a multiple of 64.
        value: width of its values, v, a multiple of 64.
    """

    key: int
    value: int

    @property
    def query(self) -> int:
        """Width of a query."""
        return self.key + ROPE

    @property
    def keys(self) -> int:
        """Keys of a step."""
        return next(n for n in KEYS if self.fits(n))

    def fits(self, keys: int) -> bool:
        """Whether steps of ``keys`` keys leave room for two stages."""
        numbers = sum(map(prod, self.operands(keys)))
        return numbers * jnp.dtype(jnp.bfloat16).itemsize <= SHARED - _BESIDE

    def operands(self, keys: int) -> tuple[tuple[int, ...], ...]:
        """Shapes in shared memory: queries and keys, their shared parts apart; values; probabilities."""
        return (
            (COMPUTE, ROWS, self.key),
            (COMPUTE, ROWS, ROPE),
            (STAGES, keys, self.key),
            (STAGES, keys, ROPE),
            (STAGES, keys, self.value),
            (COMPUTE, ROWS, PART),
        )

    def stored(self) -> tuple[slice, ...]:
        """Columns of the output in the memory of queries, of their shared part, and of probabilities.

        The output is stored through this memory. A copy reads all of it: it is full, or has no column.
        """
        found, begin = [], 0
        for width in (self.key, ROPE, PART):
            end = begin + width if begin + width <= self.value else begin
            found.append(slice(begin, end))
            begin = end
        return tuple(found)


def value_widths(key: int) -> tuple[int, ...]:
    """Widths of values that the kernel takes beside keys of width ``key``."""
    sizes = (HeadWidths(key, value) for value in range(PART, _WIDEST + 1, PART))
    return tuple(s.value for s in sizes if s.fits(min(KEYS)) and s.stored()[-1].stop == s.value)


def key_widths() -> tuple[int, ...]:
    """Widths of keys, without the shared part, that the kernel takes with some width of values."""
    return tuple(takewhile(value_widths, count(PART, PART)))
