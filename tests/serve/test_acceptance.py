"""The alarm needs evidence, tells a broken layer from a sound one, and ends when the layer is sound again."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_jax import Speculation
from mtp_jax.decode.keys import Origin
from mtp_jax.errors import ConfigError
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
    assert "0.0% of the drafter's first drafts are accepted, below 0.2" in caplog.messages[0]


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


def checked(alarm: AcceptanceAlarm, accepted: int, strict: bool = False) -> None:
    """The check of a head whose first draft was accepted in ``accepted`` of 100 steps."""
    counts = [1] * accepted + [0] * (100 - accepted)
    found = Speculation(counts, [2] * 100, [Origin.NEXTN] * 100)

    async def on_engine(function: Any) -> Speculation:
        return function()

    llm = SimpleNamespace(folders=("model", "head"), probe_drafts=lambda prepare: found)
    allm: Any = SimpleNamespace(llm=llm, on_engine=on_engine)
    asyncio.run(alarm.check(allm, strict))


def test_a_head_is_checked_at_the_start(alarm, caplog):
    caplog.set_level(logging.INFO)
    checked(alarm, 60, strict=True)
    assert "of head: 60%, 0% of its drafts accepted at positions 1 to 2, 1.60 tokens per step" in caplog.text
    assert "--acceptance-floor" not in caplog.text
    text = still_metrics(alarm).text().decode()
    assert 'mtp_jax:draft_check_acceptance{model_name="tiny",position="0"} 0.6' in text


def test_a_head_of_another_model_is_named_at_the_start(alarm, caplog):
    checked(alarm, 1)
    assert "1%, 0% of its drafts accepted" in caplog.text
    assert "below --acceptance-floor 0.2: the head may be another model's" in caplog.text
    with pytest.raises(ConfigError, match="leave out --strict-draft to serve with it"):
        checked(alarm, 1, strict=True)


def test_a_model_s_own_layers_are_not_checked(alarm):
    allm: Any = SimpleNamespace(llm=SimpleNamespace(folders=("model",)))
    asyncio.run(alarm.check(allm, strict=True))
    assert alarm.at_start == ()
