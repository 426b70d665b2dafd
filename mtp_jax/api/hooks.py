"""Hooks of an ``AsyncLLM``, for work beside the engine: hand-overs between servers, for example."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtp_jax.engine.request import Request

MetricTotals = Mapping[tuple[str, str, str], Mapping[Any, float]]
"""Totals for ``/metrics``: name, description and label, and the total of each value of the label."""


@dataclass(frozen=True)
class Hooks:
    """Functions that an ``AsyncLLM`` calls, in order.

    Attributes:
        at_start: functions awaited once the engine runs.
        before_submit: functions awaited with the first request of each prompt, before the engine gets it.
        at_close: functions called on closing, while the engine still runs.
        counters: functions called for each ``/metrics``; their totals are shown there.
    """

    at_start: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    before_submit: list[Callable[[Request], Awaitable[None]]] = field(default_factory=list)
    at_close: list[Callable[[], None]] = field(default_factory=list)
    counters: list[Callable[[], MetricTotals]] = field(default_factory=list)
