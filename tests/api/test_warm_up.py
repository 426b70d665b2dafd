"""When a server compiles its programs, and what it says of them. Nothing is compiled here."""

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_jax.api import warm_up
from mtp_jax.api.warm_up import WarmUp
from mtp_jax.decode.launches import ON_CPU, Traits


class Programs:
    """Stands for the executables of an engine."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.done: list[Any] = []
        self.go = threading.Semaphore(0)
        self.warm: list[Any] = []
        self.fails: set[Any] = set()
        self.traits = ON_CPU

    def compile(self, keys: list[Any], update: Any = None) -> None:
        for key in keys:
            self.begun.append(key)
            if update is None:
                assert self.go.acquire(timeout=60)
            if key in self.fails:
                raise RuntimeError(f"{key} does not compile")
            self.done.append(key)


@pytest.fixture
def programs() -> Programs:
    return Programs()


@pytest.fixture
def idle() -> threading.Event:
    return threading.Event()


@pytest.fixture
def warming(programs, idle):
    engine: Any = SimpleNamespace(
        runner=programs, warm_up_keys=lambda: (["a", "b"], ["c", "d", "e"]), warm_up=lambda keys: None
    )
    made = WarmUp(engine, idle, programs.warm.append, lambda: programs.warm.append("ended"))
    yield made
    made.stop()
    programs.go.release(9)


def until(holds: Any) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come")


def begin(warming: WarmUp, patience: float = 1e6) -> None:
    assert warming.state == "starting"
    warming.first(lambda done, total: None)
    warming._patience = patience
    warming.start()


def test_on_a_gpu_nothing_is_compiled_beside_requests(programs, idle):
    """However long they last; and no router sends any meanwhile."""
    programs.traits = Traits(by_rows=False)
    engine: Any = SimpleNamespace(
        runner=programs, warm_up_keys=lambda: (["a"], ["b"]), warm_up=lambda keys: None
    )
    warming = WarmUp(engine, idle, programs.warm.append, lambda: None)
    assert not warming.keeps_away
    programs.go.release(9)
    begin(warming, patience=0.0)
    time.sleep(0.2)
    assert (programs.done, warming.keeps_away) == (["a"], True)
    idle.set()
    until(lambda: not warming.running)
    assert (programs.done, warming.keeps_away) == (["a", "b"], False)


def test_the_rest_is_compiled_while_idle_alone(warming, programs, idle, caplog):
    programs.go.release(9)
    with caplog.at_level(logging.INFO):
        begin(warming)
        time.sleep(0.2)
        assert programs.done == ["a", "b"]
        assert (warming.running, warming.state) == (True, "compiling program 3 of 5")
        idle.set()
        until(lambda: not warming.running)
    assert programs.done == ["a", "b", "c", "d", "e"]
    assert programs.warm == ["c", "d", "e", "ended"]
    assert warming.state == "ready"
    (said,) = [r.getMessage() for r in caplog.records if "programs are ready" in r.getMessage()]
    assert said.startswith("5 programs are ready: ")
    assert int(said.split("; ")[1].split()[0]) > 10  # mappings


def test_a_request_lets_the_compiler_pause(warming, programs, idle):
    idle.set()
    begin(warming)
    programs.go.release()
    until(lambda: programs.begun == ["a", "b", "c", "d"])
    idle.clear()
    programs.go.release(9)
    until(lambda: warming.state == "compiling program 5 of 5")  # a program that had begun is finished
    time.sleep(0.2)
    assert programs.done == ["a", "b", "c", "d"]
    idle.set()
    until(lambda: warming.state == "ready")


def test_a_server_that_is_never_idle_gets_its_programs(warming, programs):
    programs.go.release(9)
    begin(warming, patience=0.01)
    until(lambda: warming.state == "ready")
    assert programs.done == ["a", "b", "c", "d", "e"]


def test_it_stops_waiting_when_it_is_closed(warming, programs):
    programs.go.release(9)
    begin(warming)
    warming.stop()
    until(lambda: not warming.running)
    assert programs.done == ["a", "b"]
    assert not programs.warm


def test_what_does_not_compile_is_left_out(warming, programs, idle, caplog):
    programs.fails.add("d")
    programs.go.release(9)
    idle.set()
    begin(warming)
    until(lambda: not warming.running)
    assert programs.done == ["a", "b", "c", "e"]
    assert "a program is not ready, and others do its work" in caplog.text


def test_it_ends_where_there_is_no_room(warming, programs, idle, monkeypatch, caplog):
    monkeypatch.setattr(warm_up, "room_for_programs", lambda: len(programs.done) < 3)
    programs.go.release(9)
    idle.set()
    begin(warming)
    until(lambda: not warming.running)
    assert programs.done == ["a", "b", "c"]
    assert "max_map_count" in caplog.text
    assert warming.state == "ready"
