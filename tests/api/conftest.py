"""Servers of these tests compile what serves anything, and no more behind a test's back."""

import pytest

from mtp_jax.decode.keys import Key
from mtp_jax.engine.engine import Engine
from tests import tiny_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A golden checkpoint with a tokenizer."""
    return tiny_tokenizer.model(tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(autouse=True)
def _first_programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = Engine.warm_up_keys

    def first(engine: Engine) -> tuple[list[Key], list[Key]]:
        return all_of_them(engine)[0], []

    monkeypatch.setattr(Engine, "warm_up_keys", first)
    # Looking for garbage takes longer than the tests.
    for user in ("warm_up", "llm"):
        monkeypatch.setattr(f"mtp_jax.api.{user}.return_free_memory", lambda: None)
