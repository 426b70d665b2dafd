"""The picture of a plan: tokens per second of a GPU against the tokens per second of a user."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_jax.errors import ConfigError
from mtp_jax.lab.planning.table import Plan, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#888888", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")


def draw(plan: Plan, title: str, path: Path) -> None:
    """Write a PNG: a band for each depth, from usual to lean software, through the numbers of requests.

    Raises ConfigError without matplotlib.
    """
    pyplot = load_pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axis = pyplot.subplots(figsize=(9, 6), layout="constrained")
    depths = dict.fromkeys(row.deployment.depth for row in plan.rows)
    for depth, colour in zip(depths, COLOURS, strict=False):
        name = f"MTP, depth {depth}" if depth else "without MTP"
        _shade(axis, [row for row in plan.rows if row.deployment.depth == depth], colour, name)
    axis.set(
        title=title,
        xlabel="tokens/s of a user (logarithmic)",
        ylabel="tokens/s of a GPU (logarithmic)",
        xscale="log",
        yscale="log",
    )
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter("{x:g}")
        scale.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3, which="both")
    axis.legend(title="usual to lean software; at points, requests", fontsize="small")
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def load_pyplot() -> Any:
    """The module ``matplotlib.pyplot``, which draws into files. Raises ConfigError where there is none."""
    try:
        import matplotlib  # imported here: slow
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the picture needs matplotlib: pip install matplotlib; or leave --output out"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _shade(axis: "Axes", rows: Sequence[Row], colour: str, name: str) -> None:
    """The band of one depth; both of its ends as lines."""
    ends = [[(row.user[end], row.gpu[end]) for row in rows] for end in (0, 1)]
    outline = [*ends[0], *reversed(ends[1])]
    axis.fill([x for x, _ in outline], [y for _, y in outline], color=colour, alpha=0.2, linewidth=0)
    for points, style in zip(ends, ("o:", "o-"), strict=True):
        label = name if style == "o-" else None
        at, height = [x for x, _ in points], [y for _, y in points]
        axis.plot(at, height, style, color=colour, markersize=3, label=label)
    for row, point in zip(rows, ends[1], strict=True):
        axis.annotate(f" {row.deployment.requests}", point, color=colour, fontsize="x-small")
