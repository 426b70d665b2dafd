"""Figures of a report."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.json_object import JsonMapping
from mtp_jax.lab.bench.latency import median_of
from mtp_jax.lab.bench.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#888888", "#1f77b4", "#d62728", "#2ca02c")


def can_draw() -> bool:
    """Whether matplotlib is installed, for a check before hours of measurement."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Report, path: Path, made_by: JsonMapping) -> None:
    """Write a PNG of ``report``.

    report: its figures have "depths", or "levels" by mode and concurrency, or "levels" of a server's "loop".
    made_by: the argument of ``report.write``; it is written below the figure.
    """
    import matplotlib  # imported here: slow

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
    if "depths" in report.figures:
        _depths(report.figures["depths"], axes.flat)
    elif "loop" in report.figures:
        _served(report.figures["levels"], report.headers[0], axes.flat)
    else:
        _levels(report.figures["levels"], axes.flat)
    figure.suptitle(report.title)
    about = made_by["environment"]
    load = about["load_average"]
    busy = f", load {load[0]:.1f} at the start" if load else ""
    machine = f"{about['cpu']}, {about['cores']} cores, {about['device']}{busy}, {about['date']}"
    figure.supxlabel(f"{made_by['command']}\n{machine}", fontsize="small")
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _levels(levels: Sequence[JsonMapping], axes: "Iterable[Axes]") -> None:
    """Throughput, speed-up, latencies and acceptance by level, a line per mode."""
    modes = list(dict.fromkeys(f["mode"] for f in levels))
    at_a_time = sorted({f["concurrency"] for f in levels})

    def lines(axis: "Axes", name: str, value: Callable[[JsonMapping], float], style: str = "o-") -> None:
        for mode, colour in zip(modes, _COLOURS, strict=False):
            own = [f for f in levels if f["mode"] == mode]
            at, values = [f["concurrency"] for f in own], [value(f) for f in own]
            axis.plot(at, values, style, color=colour, label=f"{mode}{name}", markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks(at_a_time, map(str, at_a_time))
        axis.set_xlabel("requests at a time (logarithmic)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")

    def spread(axis: "Axes", value: str) -> None:
        """A line per mode through the medians, with the quartiles as bars."""
        lines(axis, "", lambda f: f[value].median)
        for mode, colour in zip(modes, _COLOURS, strict=False):
            points = [(f["concurrency"], f[value]) for f in levels if f["mode"] == mode]
            for at, s in points:
                axis.plot([at, at], [s.low, s.high], color=colour, linewidth=1)

    throughput, gain, first, per_token, whole, accepted = axes
    spread(throughput, "tokens_per_second")
    throughput.set(title="throughput, tokens/s; median and quartiles of the rounds")
    throughput.set_ylim(bottom=0)
    spread(gain, "speedup")
    gain.axhline(1, color="black", linewidth=0.5)
    gain.set_title(f"throughput over that of {modes[0]}")
    for axis, latency, title in (
        (first, "ttft", "time to first token, ms"),
        (per_token, "tpot", "time per output token, ms"),
        (whole, "e2e", "end to end, ms"),
    ):
        lines(axis, " p50", lambda f, latency=latency: median_of(f["rounds"], latency, "p50") * 1e3)
        lines(axis, " p99", lambda f, latency=latency: median_of(f["rounds"], latency, "p99") * 1e3, "x:")
        axis.set(title=f"{title} (logarithmic)", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    _acceptance(levels, dict(zip(modes, _COLOURS, strict=False)), accepted)


def _acceptance(levels: Sequence[JsonMapping], colours: Mapping[str, str], axis: "Axes") -> None:
    """A line per mode and level over the positions of drafts."""
    from matplotlib.ticker import MaxNLocator

    for level in levels:
        shown = level["acceptance_per_position"]
        if shown and (colour := colours.get(level["mode"])):
            axis.plot(range(1, len(shown) + 1), shown, "o-", color=colour, alpha=0.6, markersize=4)
            end = len(shown), shown[-1]
            axis.annotate(f" {level['concurrency']}", end, color=colour, fontsize="small")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(
        title="drafts accepted by position; at each line's end, requests at a time",
        xlabel="position",
        ylim=(0, 1.02),
    )
    axis.grid(alpha=0.3)


def _served(levels: Sequence[JsonMapping], unit: str, axes: "Iterable[Axes]") -> None:
    """Throughput over latency and over load, latencies, and acceptance. unit: the levels' unit."""
    names = [str(f["level"]) for f in levels]
    at = range(len(levels))
    over, throughput, first, per_token, whole, accepted = axes
    per_user = [f["latencies"].tpot.p50 * 1e3 for f in levels]
    for name, key in (("all tokens", "total_tokens_per_second"), ("generated", "output_tokens_per_second")):
        values = [f[key] for f in levels]
        over.plot(per_user, values, "o-", label=name, markersize=4)
        throughput.plot(at, values, "o-", label=name, markersize=4)
        for name, x, y in zip(names, per_user, values, strict=True):
            over.annotate(f" {name}", (x, y), fontsize="small")
    over.set(title=f"tokens/s over latency; at each point, {unit}", xlabel="time per output token, p50, ms")
    throughput.set(title="throughput, tokens/s", xlabel=unit)
    for axis, latency, title in (
        (first, "ttft", "time to first token, ms"),
        (per_token, "tpot", "time per output token, ms"),
        (whole, "e2e", "end to end, ms"),
    ):
        for percentile, style in (("p50", "o-"), ("p99", "x:")):
            values = [getattr(getattr(f["latencies"], latency), percentile) * 1e3 for f in levels]
            axis.plot(at, values, style, label=percentile, markersize=4)
        axis.set(title=title, xlabel=unit)
    for axis in (throughput, first, per_token, whole):
        axis.set_xticks(at, names)
    for axis in (over, throughput, first, per_token, whole):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    _acceptance([{**f, "mode": "", "concurrency": f["level"]} for f in levels], {"": _COLOURS[1]}, accepted)
    accepted.set_title(f"drafts accepted by position; at each line's end, {unit}")


def _curves(depths: Sequence[JsonMapping]) -> dict[str, list[JsonMapping]]:
    """The figures of each temperature and number of drafted tokens, with depth 0, by name."""
    drafting = [f for f in depths if f["depth"]] or depths
    several, found = len({f["draft_vocab"] for f in drafting}) > 1, {}
    for temperature, among in dict.fromkeys((f["temperature"], f["draft_vocab"]) for f in drafting):
        name = f"temperature {temperature:g}" if temperature else "greedy"
        own = [f for f in depths if f["temperature"] == temperature and f["draft_vocab"] in (None, among)]
        found[name + (f", of {among:,} tokens" if several else "")] = own
    return found


def _depths(depths: Sequence[JsonMapping], axes: "Iterable[Axes]") -> None:
    """Speed, step time and acceptance by depth, a colour per temperature and number of drafted tokens."""
    from matplotlib.ticker import MaxNLocator

    shown = (
        ("tokens/s", lambda f: f["tokens_per_second"]),
        ("speed-up over depth 0; median and quartiles of the prompts", lambda f: f["speedup"].median),
        ("ms per step", lambda f: f["step_seconds"] * 1e3),
        ("acceptance length", lambda f: f["acceptance_length"]),
        ("share of repeated 8-token runs", lambda f: f["repeated"]),
    )
    *first, last = axes
    for number, (name, own) in enumerate(_curves(depths).items()):
        colour = _COLOURS[(number + 1) % len(_COLOURS)]
        for axis, (_, value) in zip(first, shown, strict=True):
            axis.plot([f["depth"] for f in own], [value(f) for f in own], "o-", color=colour, label=name)
        for f in own:
            s, accepted = f["speedup"], f["acceptance_per_position"]
            first[1].plot([f["depth"]] * 2, [s.low, s.high], color=colour, linewidth=1)
            if accepted:
                last.plot(range(1, len(accepted) + 1), accepted, "o-", color=colour, alpha=0.6, markersize=4)
                last.annotate(f" {f['depth']}", (len(accepted), accepted[-1]), color=colour, fontsize="small")
    for axis, (title, _) in zip(first, shown, strict=True):
        axis.set(title=title, xlabel="depth")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(bottom=0)
        axis.margins(y=0.1)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    first[1].axhline(1, color="black", linewidth=0.5)
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    last.set(
        title="drafts accepted by position; at each line's end, its depth", xlabel="position", ylim=(0, 1.02)
    )
    last.grid(alpha=0.3)
