"""The alarm needs evidence, tells a broken layer from a sound one, and ends when the layer is sound again."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from serve.watch import stats_log
from serve.watch.acceptance import AcceptanceAlarm
from serve.watch.stats_log import log_stats
from tests.serve.helpers import STATS, still_metrics


class Drafts:
    """Counts of an engine that goes on drafting."""

    def __init__(self) -> None:
        self.tried, self.held = {"nextn": 0, "suffix": 0}, {"nextn": 0, "suffix": 0}

    def go_on(self, tried: int, held: int, source: str = "nextn"):
        self.tried[source] += tried
        self.held[source] += held
        return replace(STATS, first_drafts={**self.tried}, accepted_first_drafts={**self.held})


@pytest.fixture
def alarm():
    return AcceptanceAlarm(floor=0.2, ceiling=0.98)


def test_sound_acceptance_raises_nothing(alarm, caplog):
    drafts = Drafts()
    for share in (30, 60, 90, 95):
        for _ in range(50):
            alarm.look(drafts.go_on(100, share))
            assert alarm.kind is None
    assert not caplog.messages


def test_a_broken_layer(alarm, caplog):
    drafts = Drafts()
    alarm.look(drafts.go_on(10, 0))
    assert alarm.kind is None  # ten drafts prove nothing
    for _ in range(10):
        alarm.look(drafts.go_on(10, 0))
    assert alarm.kind == "low"
    assert len(caplog.messages) == 1
    assert "0.0% of the NextN layer's first drafts are accepted, below 0.2" in caplog.messages[0]


def test_a_loop(alarm, caplog):
    drafts = Drafts()
    for _ in range(10):
        alarm.look(drafts.go_on(100, 100))
    assert alarm.kind == "high"
    assert "may repeat themselves" in caplog.messages[0]


def test_it_ends_and_does_not_flap(alarm, caplog):
    drafts = Drafts()
    for _ in range(20):
        alarm.look(drafts.go_on(100, 2))
    for _ in range(40):  # at the floor itself nothing is certain: the alarm stays
        alarm.look(drafts.go_on(100, 20))
    assert alarm.kind == "low"
    assert len(caplog.messages) == 1
    for _ in range(40):
        alarm.look(drafts.go_on(100, 60))
    assert alarm.kind is None
    assert len(caplog.messages) == 2
    assert "over" in caplog.messages[1]


def test_suffix_matches_and_silence_say_nothing(alarm):
    drafts = Drafts()
    for _ in range(20):
        alarm.look(drafts.go_on(100, 0, "suffix"))
        alarm.look(drafts.go_on(0, 0))
    assert alarm.kind is None


def test_limits_that_never_warn():
    alarm, drafts = AcceptanceAlarm(floor=0, ceiling=1), Drafts()
    for share in (0, 100):
        for _ in range(100):
            alarm.look(drafts.go_on(100, share))
            assert alarm.kind is None


def test_the_server_looks_while_it_serves(alarm, caplog, monkeypatch):
    monkeypatch.setattr(stats_log, "_EVERY_SECONDS", 0.001)
    drafts = Drafts()
    allm: Any = SimpleNamespace(stats=lambda: drafts.go_on(10, 0))

    async def until_it_warns() -> None:
        task = asyncio.create_task(log_stats(allm, alarm))
        while alarm.kind is None:
            await asyncio.sleep(0.001)
        task.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(until_it_warns(), 60))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("kind", [None, "low", "high"])
def test_metric(alarm, kind):
    alarm.kind = kind
    text = still_metrics(alarm).text().decode()
    for name in ("low", "high"):
        line = f'mtp_jax:acceptance_alarm{{kind="{name}",model_name="tiny"}} {float(name == kind)}'
        assert line in text.splitlines()
