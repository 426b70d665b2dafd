"""What the watchdog counts as the age of a step."""

from typing import cast

import pytest

from mtp_jax import AsyncLLM
from serve.watch.watchdog import STUCK_STATUS, Watchdog


class Paused:
    """An engine in a step since ``began``, and a clock that jumps once."""

    def __init__(self, jump: float) -> None:
        self.now, self.jump, self.looks = 0.0, jump, 0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.looks += 1
        self.now += seconds + (self.jump if self.looks == 3 else 0)
        return self.looks > 200

    @property
    def step_age(self) -> float:
        return self.now


@pytest.mark.parametrize("jump", [0.0, 5.0])
def test_a_pause_of_the_whole_process_is_no_age_of_a_step(jump, monkeypatch):
    paused, ended = Paused(jump), []
    watchdog = Watchdog(cast(AsyncLLM, paused), 3.0, lambda status: ended.append((status, paused.now)))
    monkeypatch.setattr(watchdog, "_report", lambda: None)
    monkeypatch.setattr(watchdog, "_stop", paused)
    monkeypatch.setattr("serve.watch.watchdog.time", paused)
    watchdog._watch()
    ((status, at),) = ended
    assert status == STUCK_STATUS
    assert jump + 3 < at < jump + 3.5
