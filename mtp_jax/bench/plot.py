"""Figures of a report."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_jax.bench.report import Report
from mtp_jax.errors import ConfigError

_COLOURS = ("#888888", "#1f77b4", "#d62728", "#2ca02c")


def check() -> None:
    """Before hours are spent. Raises ConfigError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the figure needs matplotlib; install it with: pip install 'mtp-jax[bench]'")


def draw(report: Report, path: Path) -> None:
    """Write a PNG of ``report``, whose figures have "levels" (by concurrency) or "depths"."""
    import matplotlib  # imported here: slow

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
    if "depths" in report.figures:
        _depths(report.figures["depths"], axes.flat)
    else:
        _levels(report.figures["levels"], axes.flat)
    figure.suptitle(report.title)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _levels(levels: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """Throughput, speed-up, latencies and acceptance by level, a line per mode."""
    modes = list(dict.fromkeys(f["mode"] for f in levels))
    at_a_time = sorted({f["concurrency"] for f in levels})

    def lines(axis: Any, name: str, value: Callable[[Mapping[str, Any]], float], style: str = "o-") -> None:
        for mode, colour in zip(modes, _COLOURS, strict=False):
            points = [(f["concurrency"], value(f)) for f in levels if f["mode"] == mode]
            axis.plot(*zip(*points, strict=True), style, color=colour, label=f"{mode}{name}", markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks(at_a_time, map(str, at_a_time))
        axis.set_xlabel("requests at a time")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")

    def of_rounds(f: Mapping[str, Any], latency: str, at: str) -> float:
        runs = [getattr(getattr(s, latency), at) for s in f["rounds"]]
        return sorted(runs)[len(runs) // 2] * 1e3

    throughput, gain, first, per_token, whole, accepted = axes
    lines(throughput, "", lambda f: f["tokens_per_second"].median)
    throughput.set(title="throughput, tokens/s")
    throughput.set_ylim(bottom=0)
    lines(gain, "", lambda f: f["speedup"].median)
    gain.axhline(1, color="black", linewidth=0.5)
    gain.set_title(f"throughput over that of {modes[0]}")
    for axis, latency, title in (
        (first, "ttft", "time to first token, ms"),
        (per_token, "tpot", "time per output token, ms"),
        (whole, "e2e", "end to end, ms"),
    ):
        lines(axis, " p50", lambda f, latency=latency: of_rounds(f, latency, "p50"))
        lines(axis, " p99", lambda f, latency=latency: of_rounds(f, latency, "p99"), "x:")
        axis.set(title=title, yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    for mode, colour in zip(modes, _COLOURS, strict=False):
        rates = [f["acceptance_per_position"] for f in levels if f["mode"] == mode]
        for shown in rates:
            accepted.plot(range(1, len(shown) + 1), shown, "o-", color=colour, alpha=0.6, markersize=4)
            accepted.set_xticks(range(1, max(map(len, rates)) + 1))
    accepted.set(title="drafts accepted by position, a line per level", xlabel="position", ylim=(0, 1.02))
    accepted.grid(alpha=0.3)


def _depths(depths: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """Speed, step time and acceptance by depth."""
    shown = (
        ("tokens/s", lambda f: f["tokens_per_second"]),
        ("speed-up over depth 0", lambda f: f["speedup"].median),
        ("ms per step", lambda f: f["step_seconds"] * 1e3),
        ("acceptance length", lambda f: f["acceptance_length"]),
        ("share of repeated 8-token runs", lambda f: f["repeated"]),
    )
    *first, last = axes
    for axis, (title, value) in zip(first, shown, strict=True):
        axis.plot([f["depth"] for f in depths], [value(f) for f in depths], "o-", color=_COLOURS[1])
        axis.set(title=title, xlabel="depth")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for f in depths:
        accepted = f["acceptance_per_position"]
        last.plot(range(1, len(accepted) + 1), accepted, "o-", label=f"depth {f['depth']}", markersize=4)
    last.set(title="drafts accepted by position", xlabel="position", ylim=(0, 1.02))
    last.grid(alpha=0.3)
    last.legend(fontsize="small")
