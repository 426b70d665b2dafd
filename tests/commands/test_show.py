"""What a terminal gets to see."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_jax import SamplingParams, Speculation
from mtp_jax.commands import show


class Streaming:
    """An LLM that writes "ab", then a drafted "\\x1b[c" and "d", then what it held back."""

    tokenizer = object()

    def stream(self, prompt: Any, params: Any) -> Any:
        texts, drafted = ["ab", "\x1b[c", "d"], [False, True, True]
        for n, text in ((1, "ab"), (3, "ab\x1b[cd"), (3, "ab\x1b[cde")):
            c = SimpleNamespace(text=text, token_texts=texts[:n], drafted=drafted[:n])
            yield SimpleNamespace(outputs=[c])


def streamed(capsys: pytest.CaptureFixture[str]) -> str:
    llm: Any = Streaming()
    output = show.stream(llm, "x", SamplingParams())
    assert output is not None
    assert output.outputs[0].text == "ab\x1b[cde"
    return capsys.readouterr().out


def test_drafted_tokens_are_green_on_a_terminal_and_drive_it_nowhere(capsys, monkeypatch):
    assert streamed(capsys) == "ab\x1b[cde\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert streamed(capsys) == "ab\x1b[32m\ufffd[c\x1b[0m\x1b[32md\x1b[0me\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert streamed(capsys) == "ab\ufffd[cde\n"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert streamed(capsys) == "ab\ufffd[cde\n"


def test_steps_without_drafts_are_told():
    some = Speculation([1, 0, 0], [2, 0, 0], [])
    assert show.speculation(some)[-1] == "no drafts in 2 of 3 steps"
    assert not any("no drafts" in part for part in show.speculation(Speculation([1, 0], [2, 2], [])))
    assert show.speculation(Speculation()) == []
