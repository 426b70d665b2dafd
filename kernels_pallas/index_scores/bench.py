"""Baselines that score index keys on a GPU."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kernels_pallas.index_scores import reference


def baselines() -> Mapping[str, Callable[..., Any]]:
    """Baselines by name: functions of the kernel's inputs. XLA's own way is the reference, compiled."""
    return MappingProxyType({"xla": reference.index_scores})
