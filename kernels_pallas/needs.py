"""The choice of an operation's implementation, and errors for inputs that a kernel cannot take."""

from typing import Literal

import jax

Implementation = Literal["xla", "mosaic_gpu"]

ArrayOrShape = jax.Array | jax.ShapeDtypeStruct
"""An array, or its shape and dtype: the input of a check."""


def need(kernel: str, *needs: tuple[str, object, tuple[object, ...]]) -> None:
    """Raise ValueError for the first of ``needs`` - name, value, values allowed - with another value."""
    for what, got, allowed in needs:
        if got not in allowed:
            choice = " or ".join(str(a) for a in allowed)
            raise ValueError(
                f"{kernel} on mosaic_gpu: {what} is {got}, must be {choice}; use implementation='xla'"
            )
