"""Holds functions to the shapes and dtypes in their signatures, whenever a test calls or traces them.

An axis that may also be 1, to be broadcast, is written "#B".
"""

from collections.abc import Callable

from beartype import beartype
from jaxtyping import install_import_hook

# The code that computes. Elsewhere functions take what users pass, and say themselves what is wrong with it.
CHECKED = (
    "kernels_pallas",
    "mtp_jax.decode",
    "mtp_jax.model",
)


def check(function: Callable) -> Callable:
    """Leave constructors alone: jax puts shapes, shardings and batched arrays into trees of arrays."""
    return function if function.__name__ == "__init__" else beartype(function)


def install() -> None:
    """Check the modules imported from now on."""
    install_import_hook(CHECKED, f"{__name__}.{check.__name__}")
