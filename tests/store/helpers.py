"""Small pages, and whether two are equal."""

import ml_dtypes
import numpy as np

from mtp_jax.store.page import Page

DTYPES = (np.float32, np.uint16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)


def page(seed: int) -> Page:
    """36 bytes."""
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=(2, 2)).astype(kind) for kind in DTYPES)


def same(a: Page, b: Page) -> bool:
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
