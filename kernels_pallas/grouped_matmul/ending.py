"""The way from a product's sums to its results."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProductEnding:
    """Number of rows and activation of a product's results.

    Attributes:
        slots: number of rows of the results, if all tiles multiply the first rows of x; None: of x.
        limit: largest gate of a gated product, and largest magnitude of up; None: no limit.
    """

    slots: int | None = None
    limit: float | None = None


PLAIN = ProductEnding()
"""Results with rows of x, and no limit."""
