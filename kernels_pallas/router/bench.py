"""Baselines that choose experts on a GPU."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kernels_pallas.router import reference
from kernels_pallas.router.rule import Rule


def baselines(rule: Rule) -> Mapping[str, Callable[..., Any]]:
    """Baselines by name: functions of the kernel's inputs."""
    return MappingProxyType({"xla": partial(_by_xla, rule)})


def _by_xla(rule: Rule, logits: Any, bias: Any, counted: Any) -> Any:
    return reference.choose(logits, bias, rule, counted > 0)
