"""Baselines that choose the best scores on a GPU."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kernels_pallas.top_k import reference


def baselines(count: int) -> Mapping[str, Callable[..., Any]]:
    """Baselines by name: functions of the kernel's inputs."""
    return MappingProxyType({"xla": partial(reference.top_k, count=count)})
