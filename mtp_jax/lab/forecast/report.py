"""Figures of a load that was served in virtual time, with drafts and without, as text and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_jax.json_object import JsonObject
from mtp_jax.lab.forecast.load import Arrival
from mtp_jax.lab.forecast.replay import Outcome, RequestTimes
from mtp_jax.lab.planning.deployment import Deployment

SHARES = (50, 90, 99)
"""Percentiles that are shown."""

TIMES: Mapping[str, Callable[[RequestTimes], float | None]] = {
    "first token": lambda s: s.first,
    "token to token": lambda s: s.per_token,
    "whole answer": lambda s: s.whole,
    "wait for a slot": lambda s: s.waited,
}
"""Times of a request, in seconds; None where it has none."""


@dataclass(frozen=True)
class Forecast:
    """The outcomes of serving one load, with drafts and without, by the name of the run.

    Attributes:
        title: the deployment and the load, in lines.
        price: cost of a GPU per hour; None: not given.
    """

    title: Sequence[str]
    base: Deployment
    outcomes: Mapping[str, Outcome]
    price: float | None = None

    def to_dict(self) -> JsonObject:
        """The forecast as a JSON object; times have their percentiles, in seconds."""
        runs = [
            {
                "run": name,
                **{_key(time): dict(zip(map(str, SHARES), of(outcome, time), strict=True)) for time in TIMES},
                **{_key(total): value for total, (value, _) in self._totals(outcome).items()},
            }
            for name, outcome in self.outcomes.items()
        ]
        return {"about": list(self.title), "gpu": self.base.gpu.name, "gpus": self.base.gpus, "runs": runs}

    def __str__(self) -> str:
        """A column for each percentile of each run, then totals."""
        names, columns = [f"{'':<26}"], [f"{'':<26}"]
        for name in self.outcomes:
            names.append(f"{name:>30}")
            columns += [f"{f'{share} %':>10}" for share in SHARES]
        lines = [*self.title, "", "".join(names).rstrip(), "".join(columns)]
        for time in TIMES:
            found = [at for outcome in self.outcomes.values() for at in of(outcome, time)]
            lines.append(f"{time + ', s':<26}" + "".join(_seconds(at) for at in found))
        totals = [self._totals(outcome) for outcome in self.outcomes.values()]
        for total in totals[0]:
            texts = (format(value, shown) for value, shown in (own[total] for own in totals))
            lines.append(f"{total:<26}" + "".join(f"{text:>30}" for text in texts))
        return "\n".join(lines)

    def _totals(self, o: Outcome) -> dict[str, tuple[float, str]]:
        """Figures of a whole run, and the formats in which they are shown."""
        rate, gpus = o.stats.generation_tokens / o.seconds, self.base.gpus
        totals: dict[str, tuple[float, str]] = {
            "tokens/s": (rate, ",.1f"),
            "tokens/s per GPU": (rate / gpus, ",.1f"),
            "prompt tokens/s": (o.stats.prompt_tokens / o.seconds, ",.1f"),
        }
        if self.price is not None:
            dollars = self.price * gpus * o.seconds / 3600 / o.stats.generation_tokens * 1e6
            totals["$ per million tokens"] = dollars, ",.2f"
        return totals | {
            "tokens per step": (o.speculation.acceptance_length, ".2f"),
            "drafts per step": (o.depth, ".2f"),
            "drafts accepted": (o.speculation.accepted / max(o.speculation.drafted, 1), ".0%"),
            "prompt tokens cached": (o.stats.prefix_hits / max(o.stats.prefix_queries, 1), ".0%"),
            "time busy": (1 - o.idle / o.seconds, ".0%"),
            "seconds": (o.seconds, ",.1f"),
            "requests served": (len(o.served), ",d"),
            "requests refused": (o.refused, ",d"),
            "outputs cut": (o.cut, ",d"),
            "preemptions": (o.stats.preemptions, ",d"),
        }


def of(outcome: Outcome, time: str) -> list[float | None]:
    """Percentiles of one of ``TIMES`` over requests; None where no request has it."""
    values = [value for s in outcome.served if (value := TIMES[time](s)) is not None]
    return np.percentile(values, SHARES).tolist() if values else [None] * len(SHARES)


def described(load: Sequence[Arrival], concurrency: int | None = None) -> str:
    """A load in words; concurrency as of ``Service``."""
    when = f"in {load[-1].at:,.1f} s" if concurrency is None else f"{concurrency:,} at a time"
    prompts, outputs = ([getattr(a, name) for a in load] for name in ("prompt", "output"))
    return (
        f"{len(load):,} requests {when}; prompts of {np.mean(prompts):,.0f} tokens on "
        f"average and {max(prompts):,} at most, outputs of {np.mean(outputs):,.0f} and {max(outputs):,}"
    )


def _key(name: str) -> str:
    """The name of a figure in JSON."""
    name = name.replace("$", "dollars").replace("/s", "_per_second")
    return name.replace(" ", "_").lower() + ("_seconds" if name in TIMES else "")


def _seconds(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>10.3f}"
