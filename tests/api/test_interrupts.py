"""Ctrl-C in the midst of an LLM's work: what was read is not lost, what was begun is not held."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mtp_jax import LLM, SamplingParams
from mtp_jax.engine.engine import Engine
from tests import golden
from tests.models import RATES

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = golden.expected("rigged")["input_ids"].tolist()


@pytest.fixture(scope="module")
def llm() -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 96, "page_size": 16, "prefill_chunk": 16}
    return LLM(golden.model_dir("rigged"), simulate=RATES, **sizes)


@contextlib.contextmanager
def ctrl_c(engine: Engine) -> Iterator[None]:
    """Pressed once, while a result is being read, as it mostly is."""
    collect, pressed = engine._collect, []

    def press_once(launch):
        if not pressed:
            pressed.append(launch)
            signal.raise_signal(signal.SIGINT)
        return collect(launch)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_collect", press_once)
            yield
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed


def test_no_token_of_another_stream_is_lost(llm):
    (expected,) = llm.generate(PROMPT, GREEDY)
    with contextlib.closing(llm.stream(PROMPT, GREEDY)) as stream:
        next(stream)
        with ctrl_c(llm.engine), pytest.raises(KeyboardInterrupt):
            llm.generate([3, 4, 5], GREEDY)
        *_, last = stream
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    assert last.speculation.accepted > 0


def test_a_draft_leaves_nothing_behind(llm):
    expected = llm.draft(PROMPT, 3).token_ids
    with ctrl_c(llm.engine), pytest.raises(KeyboardInterrupt):
        llm.draft(PROMPT, 3)
    assert not llm.engine.busy
    assert llm.engine.stats().pages_used == 0
    assert llm.draft(PROMPT, 3).token_ids == expected
