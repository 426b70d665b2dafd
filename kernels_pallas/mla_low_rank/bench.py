"""Baselines that rotate and write rows on a GPU."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def baselines(reference: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    """Baselines by name: functions of the kernel's inputs. XLA's own way is the reference, compiled."""
    return MappingProxyType({"xla": reference})
