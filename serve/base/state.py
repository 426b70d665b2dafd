"""State that all routes share."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mtp_jax import RequestError
from serve.base.settings import Settings

if TYPE_CHECKING:  # imports jax, which the ingress of a cluster does without
    from mtp_jax import AsyncLLM, Tokenizer
    from serve.watch.metrics import Metrics
    from serve.watch.traces import Traces


@dataclass(frozen=True)
class Server:
    """The engine, the settings, the metrics.

    Attributes:
        traces: spans of requests; None: there are none.
        created: seconds since the epoch, when the server began.
    """

    allm: "AsyncLLM"
    settings: Settings
    metrics: "Metrics"
    traces: "Traces | None" = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer. Raises RequestError if it has none."""
        tokenizer = self.allm.about.tokenizer
        if tokenizer is None:
            raise RequestError("the model directory has no tokenizer; use /v1/completions with token ids")
        return tokenizer

    @property
    def fingerprint(self) -> dict[str, str]:
        """A field of every answer that is not the model's own; empty where answers are."""
        mark = self.allm.about.mark
        return {"system_fingerprint": mark} if mark else {}

    @property
    def tool_format(self) -> str:
        """The format of the model's calls of tools. Raises RequestError if it has no chat template."""
        name = self.settings.tool_parser
        return self.tokenizer.tool_format if name == "auto" else name

    def unready(self) -> str | None:
        """The reason why a router should send requests elsewhere now; None if there is none."""
        if self.allm.error is not None:
            return "the engine has failed"
        if self.allm.draining:
            return "shutting down"
        if self.allm.warm_up.keeps_away:
            return "programs are being prepared, beside which nothing should be served on this device"
        if released := self.allm.released:
            return f"the memory of {', '.join(released)} is released"
        if self.allm.step_age > self.settings.ready_seconds:
            return f"the engine has been in one step for {self.allm.step_age:.0f} s"
        return None
