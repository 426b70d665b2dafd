"""Params to logits: pure functions over parameter pytrees (docs/research.md).

``trunk`` and ``nextn`` have the functions, ``Params`` is the tree, ``ModelConfig`` has its sizes, ``xla`` is
the backend that computes a pass as the papers write it. Names are imported when first used, because
``config`` is also imported without jax.

Axis letters: B slots, W window, T tokens, D hidden size, N heads, C latent rank, R rope dims, E experts,
V vocabulary, P pages, S page size, L cached rows of one slot.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_jax.model import nextn, trunk
    from mtp_jax.model.backend import Backend, xla
    from mtp_jax.model.config import ModelConfig
    from mtp_jax.model.params import Params

__all__ = ["Backend", "ModelConfig", "Params", "nextn", "trunk", "xla"]

_HOMES = {"Backend": "backend", "ModelConfig": "config", "Params": "params", "xla": "backend"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:  # modules are found by the import itself
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
