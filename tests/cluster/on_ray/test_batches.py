"""The actor of Ray Data, in this process: rows in, the same rows and their answers out."""

import json

import numpy as np
import pytest

from mtp_jax import EngineStopped
from mtp_jax.cluster.on_ray.batches import BatchEngine
from tests import golden, tiny_tokenizer

pytestmark = pytest.mark.slow  # it compiles an engine of its own
EXPECTED = golden.expected("rigged")
SIZES = {"max_model_len": 96, "page_size": 16, "prefill_chunk": 16, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> BatchEngine:
    model = tiny_tokenizer.model(tmp_path_factory.mktemp("batches") / "rigged")
    more = {"num_speculative_tokens": 1, "adaptive_depth": False, "mesh": (1, 1)}
    return BatchEngine(model, model_name="name", strict=True, **SIZES, **more)


def body(**changed) -> str:
    known = {"prompt": EXPECTED["input_ids"].tolist(), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return json.dumps(known | {"return_token_ids": True} | changed)


def test_every_row_has_its_answer_and_keeps_its_columns(engine):
    bodies = [body(), body(temperature=-1), "{", body(unknown=1), body(model="other"), body(model="name")]
    batch = {"body": np.array(bodies, object), "name": np.arange(6)}
    found = engine(batch)
    assert {len(column) for column in found.values()} == {6}
    assert found["name"].tolist() == list(range(6))
    assert found["status"] == [200, 400, 400, 400, 404, 200]
    answers = [json.loads(answer) for answer in found["answer"]]
    for row in (0, 5):
        assert answers[row]["choices"][0]["token_ids"] == EXPECTED["greedy_ids"].tolist()
    assert "temperature" in answers[1]["error"]["message"]
    assert all(found["request_id"])


def test_a_column_may_name_the_route(engine):
    chat = json.dumps({"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2, "temperature": 0})
    found = engine({"body": [chat, body(max_tokens=1)], "url": ["/v1/chat/completions", "/v1/completions"]})
    assert found["status"] == [200, 200]
    kinds = [json.loads(answer)["object"] for answer in found["answer"]]
    assert kinds == ["chat.completion", "text_completion"]


def test_an_engine_that_fails_ends_the_job(engine, monkeypatch):
    def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine._allm.llm.engine, "step", broken)
    with pytest.raises(EngineStopped, match="broken"):
        engine({"body": [body()]})
