"""What else chooses experts on a GPU."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kernels_pallas.router import reference
from kernels_pallas.router.rule import Rule


def baselines(rule: Rule) -> Mapping[str, Callable[..., Any]]:
    """By name: functions of the kernel's inputs."""
    return MappingProxyType({"xla": partial(reference.choose, rule=rule)})
