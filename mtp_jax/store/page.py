"""One page of the cache outside of the device: its arrays, and a checksum of them."""

import zlib
from collections.abc import Sequence

import numpy as np

from mtp_jax.decode.arrays import PageData

Page = tuple[np.ndarray, ...]
"""Contents of one page: the arrays of ``PageData`` without their first axis, each with memory of its own."""


def split(data: PageData) -> list[Page]:
    """The pages of a ``PageData``, each copied, so that its memory can be freed by itself."""
    return [tuple(array[i].copy() for array in data) for i in range(len(data[0]))]


def join(pages: Sequence[Page]) -> PageData:
    """One page or more in one ``PageData``."""
    return tuple(np.stack([page[i] for page in pages]) for i in range(len(pages[0])))


def size(page: Page) -> int:
    """Number of bytes of a page."""
    return sum(array.nbytes for array in page)


def checksum(page: Page) -> int:
    """CRC32 over the bytes of all arrays, in order: a change of up to 32 neighbouring bits shows."""
    crc = 0
    for array in page:
        crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, crc)
    return crc
