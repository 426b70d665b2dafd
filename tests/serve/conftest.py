"""One tiny model behind the whole application, for all tests of a process."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mtp_jax import LLM, AsyncLLM
from serve.app import make_app
from serve.settings import Settings
from tests import tiny_tokenizer

RIGGED = Path(__file__).parent.parent / "golden" / "rigged" / "model"
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "page_size": 16, "prefill_chunk": 64}
# The template of a model that thinks when told to, and has tokens for it.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if thinking is defined and thinking %}<think>{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rigged golden checkpoint with a tokenizer of one token per character."""
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(RIGGED, folder)
    return tiny_tokenizer.write(folder, 160, TEMPLATE)


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    """Compiled programs stay with it, so that every server of a process shares them."""
    return LLM(model, compile_cache=None, **SIZES)


@pytest.fixture(scope="session")
def client(llm: LLM) -> Iterator[TestClient]:
    """Speaks to the application without a socket."""
    with serving(llm) as client:
        yield client


def serving(llm: LLM, limits: dict[str, int] | None = None, **settings: Any) -> TestClient:
    """A client of a server of its own; enter it. The LLM must not be served by another meanwhile."""
    allm = AsyncLLM(llm, **(limits or {}))
    app = make_app(allm, Settings("tiny", **settings))
    client = TestClient(app, "http://127.0.0.1", raise_server_exceptions=False)
    client.allm = allm  # type: ignore[attr-defined]
    return client
