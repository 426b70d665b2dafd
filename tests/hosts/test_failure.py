"""Whatever happens to one rank, all end soon, with a line that says why; none goes on alone, none hangs."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from mtp_jax.checkpoint import save_checkpoint
from tests import rounding
from tests.hosts.ranks import Rank, ranks
from tests.hosts.worker import LOOPED
from tests.models import TINY, Reference, rigged

_SECONDS = 15
_START_SECONDS = 180  # with the imports of a busy computer
STOPPED, FAILED = 70, 2
SMALL = replace(TINY, num_hidden_layers=1).with_nextn(())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, SMALL, rigged(SMALL), "float32")
    return str(folder)


@contextmanager
def group(model: str, **more: Any) -> Iterator[list[Rank]]:
    """Two processes that complete prompts for ever."""
    sizes = {"max_num_seqs": 2, "max_model_len": 60, "page_size": 64, "prefill_chunk": 16}
    options = {"model": model, "dtype": "float32", "num_speculative_tokens": 0, **sizes}
    plan = {"mesh": [2, 2], "llm": options, "loop": True}
    plan["join_seconds"] = more.pop("join_seconds", 60)
    with ranks(
        ["-m", "tests.hosts.worker", "HOSTS", "RANK", "COORDINATOR", json.dumps(plan)], **more
    ) as found:
        yield found


def ended(found: list[Rank], *, status: int = STOPPED, seconds: float = _SECONDS) -> list[str]:
    """What each rank that still ran has printed, once all have ended with this status."""
    for rank in found:
        assert rank.process.wait(seconds) == status, rank.text
    return [rank.text for rank in found]


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed(model, victim):
    """Until then the group says what one process says."""
    reference = Reference(rigged(SMALL), SMALL, longest=48)
    told = [reference.speculate(prompt, 40) for prompt in LOOPED]
    largest = max(abs(reference.logits(p + t.ids)).max() for p, t in zip(LOOPED, told, strict=True))
    assert min(t.margin for t in told) > rounding.error(rounding.of_model(SMALL, 48), largest)
    with group(model) as found:
        found[0].wait_for("looping")
        said = re.search(r"^said (.*)$", found[0].text, re.MULTILINE)
        assert said
        assert json.loads(said[1]) == [t.ids for t in told]
        found[victim].process.kill()
        (text,) = ended([found[1 - victim]])
        assert f"rank {1 - victim} of 2 ends: rank {victim} is lost" in text


@pytest.mark.slow
def test_an_error_on_a_follower(model):
    """SIGUSR1 makes its next launch raise."""
    with group(model) as found:
        found[0].wait_for("looping")
        found[1].process.send_signal(signal.SIGUSR1)
        first, second = ended(found)
        assert "rank 1 of 2 ends: a launch of rank 0 could not be repeated: RuntimeError" in second
        assert "rank 0 of 2 ends: rank 1" in first or "rank 0 of 2 ends: a launch failed" in first


@pytest.mark.slow
def test_an_error_on_the_leader(model):
    with group(model) as found:
        found[0].wait_for("looping")
        found[0].process.send_signal(signal.SIGUSR1)
        first, second = ended(found)
        assert "rank 0 of 2 ends: a launch failed: RuntimeError: a bug" in first
        assert "rank 1 of 2 ends: rank 0" in second


@pytest.mark.slow
def test_a_connection_that_is_cut(model):
    """SIGUSR2 closes the log's connection on rank 1 under its feet."""
    with group(model) as found:
        found[0].wait_for("looping")
        found[1].process.send_signal(signal.SIGUSR2)
        for rank, text in enumerate(ended(found)):
            assert f"rank {rank} of 2 ends: rank {1 - rank} is lost" in text


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_stopped(model, victim):
    with group(model) as found:
        found[0].wait_for("looping")
        os.kill(found[victim].process.pid, signal.SIGSTOP)
        (text,) = ended([found[1 - victim]])
        assert f"rank {victim} is lost: nothing came for 6 s" in text


@pytest.mark.slow
def test_another_secret(model):
    """Its rank ends at once. The leader says so, and goes on waiting: it may have been a stranger."""
    with group(model, others={1: {"MTP_JAX_SECRET": "the secret of another"}}, join_seconds=300) as found:
        (text,) = ended(found[1:], status=1, seconds=_START_SECONDS)
        assert "rank 0 does not take rank 1 at 127.0.0.1" in text
        found[0].wait_for("wrong secret from 127.0.0.1", _START_SECONDS)
        assert found[0].process.poll() is None


@pytest.mark.slow
def test_another_configuration(model):
    """Found before weights are read."""
    with group(model, others={1: {"WORKER_OPTIONS": '{"max_num_seqs": 4}'}}) as found:
        for text in ended(found, status=FAILED, seconds=_START_SECONDS):
            assert "error: rank 1 differs from rank 0 in options: max_num_seqs = 4 there" in text
