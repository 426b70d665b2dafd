"""What else normalises and quantises on a GPU."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kernels_pallas.rms_norm import reference


def baselines(**options: Any) -> Mapping[str, Callable[..., Any]]:
    """By name: functions of the kernel's inputs."""
    return MappingProxyType({"xla": partial(reference.rms_norm, **options)})


def baselines_of_quantise() -> Mapping[str, Callable[..., Any]]:
    """Likewise for ``quantise``."""
    return MappingProxyType({"xla": reference.quantise})
