"""Holds functions to the shapes and dtypes in their signatures, while tests of a room that computes run.

An axis that may also be 1, to be broadcast, is written "#B".
"""

from collections.abc import Callable

from beartype import beartype
from jaxtyping import config, install_import_hook

from tests.layers import modules

# The code that computes. Elsewhere functions take what users pass, and say themselves what is wrong with it.
CHECKED = ("kernels_pallas", "mtp_jax/decode", "mtp_jax/heads", "mtp_jax/model")
# The folders of tests that trace all of it. The others trace the same functions for engines and servers.
ROOMS = ("decode", "heads", "kernels", "model", "sharding", "lab/train")


def check(function: Callable) -> Callable:
    """Leave constructors alone: jax puts shapes, shardings and batched arrays into trees of arrays."""
    return function if function.__name__ == "__init__" else beartype(function)


def install() -> None:
    """Check the modules imported from now on whose signatures have shapes."""
    found = [
        name for package in CHECKED for name, text in modules(package).items() if "from jaxtyping" in text
    ]
    install_import_hook(found, f"{__name__}.{check.__name__}")


def check_in(room: str) -> None:
    """Check while tests of this folder run, or let be: tracing takes a third longer with checks."""
    config.update("jaxtyping_disable", not room.startswith(ROOMS))
