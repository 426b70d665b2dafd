"""Grammars that take too much are refused, what they took comes back, and nobody else notices."""

import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.errors import Overloaded, RequestError
from mtp_jax.text import trial
from mtp_jax.text.grammar import Grammars, Matcher, StructuredOutput
from tests.text.helpers import demo

MEMORY_FOR_EVER: dict[str, Any] = {
    "type": "string",
    "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 32)],
}
SLOW: dict[str, Any] = {
    "type": "object",
    "patternProperties": {f"^key{i}[a-z]{{1,9}}$": {"type": "integer"} for i in range(1000)},
}
SMALL = StructuredOutput(json_schema={"properties": {"a": {"type": "integer"}}, "required": ["a"]})
EOS = 1


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(demo(), demo().vocab_size, [EOS])


def resident() -> int:
    """Bytes of this process and of those that it started."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:
            continue
        if {fields["Pid"].strip(), fields["PPid"].strip()} & {str(os.getpid()), *helpers()}:
            total += int(fields.get("VmRSS", "0").split()[0]) * 1024
    return total


def helpers() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc")
@pytest.mark.parametrize("schema", [MEMORY_FOR_EVER, SLOW], ids=["memory", "time"])
def test_what_takes_too_much_ends_and_keeps_nothing_and_nobody_out(schema, grammars):
    grammars.matcher(SMALL, [EOS])
    before, most, refused, done = resident(), 0, [], threading.Event()

    def ask() -> None:
        try:
            grammars.matcher(StructuredOutput(json_schema=schema), [EOS])
        except RequestError as e:
            refused.append(str(e))
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    others = 0
    while not done.wait(0.2):
        grammars.matcher(StructuredOutput(regex=f"a{{{others + 1}}}"), [EOS])
        most, others = max(most, resident() - before), others + 1
    assert "to compile; simplify it" in refused[0]
    assert others
    assert most < trial.MEMORY + 128 * 2**20
    while resident() - before >= 64 * 2**20:  # until the system has taken it back
        time.sleep(0.01)


def test_small_grammars_share_a_process(grammars):
    """Starting one is what a trial costs."""
    grammars.matcher(SMALL, [EOS])
    process, _ = grammars._trials._helper
    for i in range(20):
        grammars.matcher(StructuredOutput(choice=[f"a{i}"]), [EOS])
    assert grammars._trials._helper[0] is process


def test_a_helper_that_was_ended_is_started_again(grammars):
    grammars.matcher(SMALL, [EOS])
    process, _ = grammars._trials._helper
    process.kill()
    process.wait()
    grammars.matcher(StructuredOutput(choice=["a"]), [EOS])
    assert grammars._trials._helper[0].pid != process.pid


def test_the_helper_ends_with_who_started_it(grammars):
    grammars.matcher(SMALL, [EOS])
    process, control = grammars._trials._helper
    control.close()
    assert process.wait(10) == 0


def test_as_many_trials_run_as_there_is_room_for(grammars, monkeypatch):
    monkeypatch.setattr(trial, "TURN_SECONDS", 0.01)
    for _ in range(trial._AT_A_TIME):
        assert grammars._trials._places.acquire(timeout=1)
    with pytest.raises(Overloaded, match="still being compiled"):
        grammars.matcher(SMALL, [EOS])
    grammars._trials._places.release()
    grammars.matcher(SMALL, [EOS])


def test_a_grammar_that_several_ask_for_is_compiled_once(grammars, monkeypatch):
    """Who asks while it is tried waits for it, as long as for a turn; a refusal is not kept."""
    tried = []

    def run(grammar: str) -> int:
        tried.append(grammar)
        if len(tried) == 1:
            with pytest.raises(Overloaded, match="the same structured output is being compiled"):
                grammars.matcher(SMALL, [EOS])
            raise RequestError("too large")
        waiting.append(pool.submit(grammars.matcher, SMALL, [EOS]))
        return 0

    monkeypatch.setattr("mtp_jax.text.grammar.TURN_SECONDS", 0.01)
    monkeypatch.setattr(grammars._trials, "run", run)
    waiting: list[Future[Matcher]] = []
    with pytest.raises(RequestError, match="too large"):
        grammars.matcher(SMALL, [EOS])
    monkeypatch.setattr("mtp_jax.text.grammar.TURN_SECONDS", 60)
    with ThreadPoolExecutor(1) as pool:
        found = grammars.matcher(SMALL, [EOS])
        assert waiting[0].result(60).compiled is found.compiled
    assert len(tried) == 2
    assert not grammars._compiling


def test_grammars_kept_are_bounded_in_bytes(grammars, monkeypatch):
    monkeypatch.setattr("mtp_jax.text.grammar._CACHED_BYTES", 100)
    monkeypatch.setattr(grammars._trials, "run", lambda _: 60)
    for choice in "abc":
        grammars.matcher(StructuredOutput(choice=[choice]), [EOS])
    assert len(grammars._cached) == 1
