"""Output of a training run: a progress bar or a line now and then, metrics.jsonl, a plot of the losses."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from mtp_jax.api.progress import left
from mtp_jax.json_object import JsonMapping, JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING_STEPS = 20  # the smoothed loss is an exponential mean with this time constant


class RunReporter:
    """Progress of one run, written to `out_dir/metrics.jsonl` and to the terminal."""

    def __init__(self, out_dir: Path, first_step: int, total_steps: int, every_s: float) -> None:
        """`every_s`: seconds between two lines when standard error is not a terminal."""
        self._path = out_dir / "metrics.jsonl"
        self._first, self._total, self._every_s = first_step, total_steps, every_s
        self._last_line = time.monotonic()
        self._start: float | None = None  # the end of this run's first step, which compiles
        self._tokens = 0
        _drop_after(self._path, first_step)
        tty = sys.stderr.isatty()
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step") if tty else None

    def step(self, step: int, step_tokens: int, metrics: JsonObject) -> None:
        """Record step number `step` (0-based), which predicted `step_tokens` tokens."""
        now = time.monotonic()
        pace, speed = "the first step compiles", None
        if self._start is None:
            self._start = now
        else:
            self._tokens += step_tokens
            passed = max(now - self._start, 1e-9)
            speed = round(self._tokens / passed, 1)
            remaining = (self._total - step - 1) * passed / (step - self._first)
            pace = f"{speed:.0f} tokens/s, {left(remaining)}"
        self._write({"step": step, **metrics, "tokens_per_s": speed})
        text = " ".join(f"{key} {_short(value)}" for key, value in metrics.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif now - self._last_line >= self._every_s or step + 1 == self._total:
            self._last_line = now
            self.say(f"step {step + 1}/{self._total} {text} | {pace}")

    def evaluation(self, step: int, metrics: JsonObject) -> None:
        """Record held-out numbers after `step` steps."""
        self._write({"step": step, "held_out": metrics})
        self.say(f"step {step} held out: " + " ".join(f"{k} {_short(v)}" for k, v in metrics.items()))

    def say(self, text: str) -> None:
        """One line for the reader, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def _write(self, record: JsonObject) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


@dataclass(frozen=True)
class Panel:
    """A plot of one kind of figure, of which each record has several.

    Attributes:
        key: its name in the records.
        says: its name and unit, for the axis.
        names: names of its curves; the last one serves all further curves, with their number.
    """

    key: str
    says: str
    names: tuple[str, ...]

    def name(self, curve: int) -> str:
        """The name of a curve by its number, which counts from 0."""
        last = len(self.names) - 1
        return self.names[curve] if curve < last else f"{self.names[last]} {curve - last + 1}"


LOSSES = (Panel("losses", "cross entropy, nats per token", ("next token", "MTP depth")),)


def _curve(points: Sequence[tuple[int, Sequence[float]]], number: int) -> tuple[list[int], list[float]]:
    """Steps and values of one curve, at the steps that have it."""
    found = [(step, values[number]) for step, values in points if len(values) > number]
    return [step for step, _ in found], [value for _, value in found]


def _draw(panel: Panel, axes: "Axes", records: Sequence[JsonMapping]) -> None:
    train = [(r["step"], r[panel.key]) for r in records if panel.key in r]
    held = [(r["step"], r["held_out"][panel.key]) for r in records if "held_out" in r]
    for number in range(max((len(values) for _, values in train), default=0)):
        steps, values = _curve(train, number)
        (line,) = axes.plot(steps, smoothed(values), label=f"{panel.name(number)}, smoothed", zorder=2)
        axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=0.8, zorder=1)
        axes.plot(*_curve(held, number), "o", color=line.get_color(), markersize=4)
    axes.set(xlabel="step", ylabel=panel.says, title="training (lines), held out (dots)")
    axes.grid(alpha=0.3)
    if train:
        axes.legend(title=f"exponential mean over about {SMOOTHING_STEPS} steps; light: single steps")


def plot_losses(out_dir: Path, panels: Sequence[Panel] = LOSSES) -> Path | None:
    """Draw `loss.png` from `metrics.jsonl`: training and held-out figures against steps.

    The training figures stand there as they are, light, and smoothed, in full colour; the legend says so.
    Without matplotlib there is no figure.
    """
    try:
        import matplotlib  # imported here: slow, and only needed at checkpoints
    except ModuleNotFoundError:
        return None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = _read(out_dir / "metrics.jsonl")
    figure, rows = pyplot.subplots(len(panels), figsize=(8, 5 * len(panels)), squeeze=False)
    for panel, axes in zip(panels, rows[:, 0], strict=True):
        _draw(panel, axes, records)
    path = out_dir / "loss.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path


def smoothed(values: Sequence[float]) -> list[float]:
    """The exponential mean up to each value, which moves it by 1 / `SMOOTHING_STEPS` of the way to itself."""
    means: list[float] = []
    for value in values:
        before = means[-1] if means else value
        means.append(before + (value - before) / SMOOTHING_STEPS)
    return means


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(_short(v) for v in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _read(path: Path) -> list[JsonObject]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _drop_after(path: Path, first_step: int) -> None:
    """Forget the steps that a resumed run is going to repeat."""
    kept = [r for r in _read(path) if r["step"] < first_step or ("held_out" in r and r["step"] == first_step)]
    path.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
