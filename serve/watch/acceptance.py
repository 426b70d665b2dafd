"""An alarm when the first draft of a step is accepted too seldom, or nearly always.

Too seldom: the drafter does not belong to the model, or was not loaded right. Drafts then cost, and gain
nothing.
Nearly always: the text repeats itself, which is easy to predict.
"""

import logging
from functools import partial
from math import exp, sqrt
from statistics import NormalDist
from typing import Literal

from mtp_jax import AsyncLLM, ConfigError, EngineStats

_LOG = logging.getLogger(__name__)
AlarmKind = Literal["low", "high"]
KINDS: tuple[AlarmKind, ...] = ("low", "high")

# A draft counts 1/e after this number of further drafts. From this number, an acceptance of 100 % can be told
# from one of 98 % with the confidence below.
_MEMORY = 1000
_DEVIATIONS = NormalDist().inv_cdf(0.999)


class AcceptanceAlarm:
    """Follows the drafter's first drafts; suffix matches say nothing of it.

    An alarm begins when acceptance is beyond its limit with a confidence of 99.9 %, and ends when it is
    within with the same confidence.
    """

    def __init__(self, floor: float, ceiling: float) -> None:
        """Shares of first drafts accepted. floor 0 and ceiling 1 never raise an alarm."""
        self._limits = {"low": floor, "high": ceiling}
        self._seen = (0, 0)  # drafts and accepted drafts at the last ``look``
        self._tried = self._held = 0.0
        self.kind: AlarmKind | None = None
        self.at_start: tuple[float, ...] = ()

    async def check(self, allm: AsyncLLM, strict: bool) -> None:
        """Let a drafter with a folder of its own draft for a text of the model, before requests come.

        The shares of drafts accepted at each position are logged and kept in ``at_start``. strict: raise
        ConfigError where the first is below the floor, which is a warning else.
        """
        if len(allm.llm.folders) == 1:
            return
        found = await allm.on_engine(partial(allm.llm.probe_drafts, prepare=False))
        found = found and found.drafter
        if not found or not found.steps:
            return
        self.at_start = tuple(n / found.steps for n in found.accepted_per_position)
        shares = ", ".join(f"{share:.0%}" for share in self.at_start)
        said = f"the drafter of {allm.llm.folders[-1]}: {shares} of its drafts accepted at positions 1 to "
        said += f"{len(self.at_start)}, {found.acceptance_length:.2f} tokens per step"
        floor = self._limits["low"]
        if _interval(found.accepted_per_position[0], found.steps)[1] >= floor:
            _LOG.info("%s", said)
            return
        said += (
            f"; the first is below --acceptance-floor {floor:g}: the head may be another model's, or read "
        )
        said += "other layers (--draft-captures)"
        if strict:
            raise ConfigError(f"{said}; leave out --strict-draft to serve with it")
        _LOG.warning("%s", said)

    def look(self, stats: EngineStats) -> None:
        """Add the drafts since the last call, and log an alarm that begins or ends."""
        before, self._seen = self._seen, (stats.first_drafts["nextn"], stats.accepted_first_drafts["nextn"])
        tried, held = (now - then for now, then in zip(self._seen, before, strict=True))
        if not tried:
            return
        fade = exp(-tried / _MEMORY)
        self._tried, self._held = self._tried * fade + tried, self._held * fade + held
        low, high = _interval(self._held, self._tried)
        kind = self._judge(low, high)
        if kind != self.kind:
            self.kind = kind
            self._log()

    def _judge(self, low: float, high: float) -> AlarmKind | None:
        floor, ceiling = self._limits["low"], self._limits["high"]
        if high < floor:
            return "low"
        if low > ceiling:
            return "high"
        still = {"low": low <= floor, "high": high >= ceiling}
        return self.kind if self.kind and still[self.kind] else None

    def _log(self) -> None:
        found = f"{self._held / self._tried:.1%} of the drafter's first drafts are accepted"
        if self.kind == "low":
            _LOG.warning(
                "%s, below %g: the drafter may not belong to this model, or was damaged when converted; "
                "--num-speculative-tokens 0 serves without it",
                found,
                self._limits["low"],
            )
        elif self.kind == "high":
            _LOG.warning(
                "%s, above %g: the answers may repeat themselves; look at some of them",
                found,
                self._limits["high"],
            )
        else:
            _LOG.warning("%s: the acceptance alarm is over", found)


def _interval(held: float, tried: float) -> tuple[float, float]:
    """The interval of the true share (Wilson's score interval)."""
    z = _DEVIATIONS**2
    middle = held + z / 2
    half = _DEVIATIONS * sqrt(held * (tried - held) / tried + z / 4)
    return (middle - half) / (tried + z), (middle + half) / (tried + z)
