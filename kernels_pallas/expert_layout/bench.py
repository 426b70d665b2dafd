"""Baselines that lay out rows on a GPU."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kernels_pallas.expert_layout import reference


def baselines(experts: int, rows: int) -> Mapping[str, Callable[..., Any]]:
    """Baselines by name: functions of the kernel's inputs."""
    return MappingProxyType({"xla": partial(_transposed, experts=experts, rows=rows)})


def _transposed(ids: Any, *args: Any, **sizes: int) -> Any:
    return reference.arrange(ids.T, *args, **sizes)
