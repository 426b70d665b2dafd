"""The picture of a forecast: the share of requests that take a time or less, for each run."""

from pathlib import Path

import numpy as np

from mtp_jax.lab.forecast.report import TIMES, Forecast
from mtp_jax.lab.planning.plot import COLOURS, load_pyplot


def draw(forecast: Forecast, path: Path) -> None:
    """Write a PNG with a panel for each of ``TIMES``. Raises ConfigError without matplotlib."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(TIMES), figsize=(15, 4), layout="constrained", sharey=True)
    for axis, (time, value) in zip(axes, TIMES.items(), strict=True):
        for (name, outcome), colour in zip(forecast.outcomes.items(), COLOURS[1::-1], strict=False):
            times = sorted(v for s in outcome.served if (v := value(s)) is not None)
            axis.step(times, np.arange(1, len(times) + 1) / max(len(times), 1), color=colour, label=name)
        axis.set(xlabel=f"{time}, s")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="share of requests")
    axes[-1].legend(fontsize="small")
    figure.suptitle(forecast.title[0], fontsize="medium")
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)
