"""The routes that an admin key opens: weights, memory, hidden states; every answer names its weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest

from mtp_jax import ConfigError
from mtp_jax.api.local import local_runner
from serve.base.settings import Settings
from serve.routes.table import ROUTES
from tests.checkpoint.files import edit_tensors
from tests.rounding import near, of_model
from tests.serve.conftest import Running, Variant

KEY = {"Authorization": "Bearer admin"}
SHORT = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}


@pytest.fixture
def client(real: Running) -> Iterator[httpx2.Client]:
    with real.client() as client:
        yield client


@pytest.fixture
def admin(real: Running) -> Iterator[Variant]:
    """The server with an admin key; it has all of its memory at the end."""
    yield real.variant(api_keys=("user",), admin_key="admin")
    real.variant(admin_key="admin").post("/resume_memory_occupation", json={}, headers=KEY)
    assert real.allm.llm.released == ()


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.access == "admin"])
def test_an_admin_key_alone_opens_them(server, admin, path):
    closed = server.variant().post(path, json={})
    assert closed.status_code == 403
    assert "--admin-key" in closed.json()["error"]["message"]
    for headers in ({}, {"Authorization": "Bearer user"}, {"x-api-key": "other"}):
        assert admin.post(path, json={}, headers=headers).status_code == 401


def test_an_admin_key_opens_everything_else(admin):
    assert admin.get("/get_weight_version").status_code == 401
    for key in ("user", "admin"):
        headers = {"Authorization": f"Bearer {key}"}
        assert admin.get("/get_weight_version", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["", "a b", "user"])
def test_a_bad_admin_key_is_refused(key):
    with pytest.raises(ConfigError, match="key"):
        Settings("tiny", api_keys=("user",), admin_key=key)


def test_every_answer_names_its_weights(admin, model):
    path = str(model)
    answer = admin.post(
        "/update_weights_from_disk", json={"model_path": path, "weight_version": "step-7"}, headers=KEY
    ).json()
    assert answer["success"] is True
    assert answer["weight_version"] == "step-7"
    # The model drafts, and a tokenizer is there: our own prompts are probed, with equal weights.
    before, after = answer["acceptance_length"]["before"], answer["acceptance_length"]["after"]
    assert before == after
    assert before >= 1
    assert admin.get("/get_weight_version", headers=KEY).json() == {"weight_version": "step-7"}
    assert admin.get("/server_info", headers=KEY).json()["weight_version"] == "step-7"

    def post(route: str, body: dict) -> dict:
        return admin.post(route, json=body, headers=KEY).json()

    assert post("/v1/completions", SHORT)["choices"][0]["weight_version"] == "step-7"
    assert post("/v1/chat/completions", CHAT)["choices"][0]["weight_version"] == "step-7"
    assert post("/generate", {"text": "abc"})["meta_info"]["weight_version"] == "step-7"
    assert post("/v1/responses", {"input": "abc", "max_output_tokens": 3})["weight_version"] == "step-7"
    assert post("/v1/messages", CHAT | {"model": "tiny"})["weight_version"] == "step-7"
    events = _events(admin.post("/v1/completions", json=SHORT | {"stream": True}, headers=KEY).text)
    assert [e["choices"][0].get("weight_version") for e in events][-1] == "step-7"
    events = _events(
        admin.post("/v1/messages", json=CHAT | {"model": "tiny", "stream": True}, headers=KEY).text
    )
    assert next(e for e in events if e["type"] == "message_delta")["weight_version"] == "step-7"


def _events(text: str) -> list[dict]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(each) for each in data]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model_path": "/a" * 2500}, "is not a directory; name one with config.json and safetensors"),
        ({}, "model_path: this field is required"),
        ({"model_path": "/nowhere"}, "/nowhere"),
        ({"model_path": "/nowhere", "load_format": "pt"}, "load_format"),
        ({"model_path": "MODEL", "draft_model_path": "MODEL", "keep_draft": True}, "exclude each other"),
        ({"model_path": "MODEL", "probe": [[10**6]]}, "token"),
    ],
)
def test_a_bad_update_is_refused(admin, model, body, message):
    body = {k: str(model) if v == "MODEL" else v for k, v in body.items()}
    before = admin.get("/get_weight_version", headers=KEY).json()
    answer = admin.post("/update_weights_from_disk", json=body, headers=KEY)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert admin.get("/get_weight_version", headers=KEY).json() == before


def test_a_damaged_file_changes_nothing(admin, model, tmp_path: Path, client):
    text = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
    damaged = edit_tensors(model, tmp_path / "damaged", lambda t: t.pop("model.norm.weight"))
    answer = admin.post("/update_weights_from_disk", json={"model_path": str(damaged)}, headers=KEY)
    assert answer.status_code == 400
    assert "missing (1): model.norm.weight" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == text


def test_while_memory_is_released_nothing_is_served(admin, client):
    text = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
    body = {"tags": ["kv_cache", "weights"]}
    assert admin.post("/release_memory_occupation", json=body, headers=KEY).json() == {
        "success": True,
        "released": ["weights", "cache"],
    }
    ready = client.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "the memory of weights, cache is released")
    refused = client.post("/v1/completions", json=SHORT)
    assert refused.status_code == 503
    assert "resume it" in refused.json()["error"]["message"]
    assert client.get("/health").status_code == 200
    resumed = admin.post("/resume_memory_occupation", json={}, headers=KEY)
    assert resumed.json() == {"success": True, "released": []}
    assert client.get("/ready").status_code == 200
    assert client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == text


def test_unknown_tags_are_refused(admin):
    answer = admin.post("/release_memory_occupation", json={"tags": ["gpu"]}, headers=KEY)
    assert answer.status_code == 400
    assert admin.post("/resume_memory_occupation", json={"tags": []}, headers=KEY).status_code == 400


def test_hidden_states(admin, real):
    ids = [5, 9, 11, 7]
    body = {"input_ids": ids, "positions": [0, -1]}
    answer = admin.post("/hidden_states", json=body, headers=KEY).json()
    # One program computes both, and JSON keeps all digits.
    np.testing.assert_array_equal(
        np.float32(answer["hidden_states"]), real.allm.llm.hidden_states(ids, [0, -1])
    )
    assert answer["weight_version"] == admin.get("/get_weight_version", headers=KEY).json()["weight_version"]
    streams = admin.post("/hidden_states", json={**body, "layers": [2, 0]}, headers=KEY).json()
    cfg, params = real.allm.llm.config, local_runner(real.allm.llm.engine).params
    found = np.array(streams["hidden_states"], np.float32)
    np.testing.assert_array_equal(found[1], np.asarray(params.embed)[[ids[0], ids[-1]]])
    found = real.allm.llm.hidden_states(ids, layers=[cfg.num_hidden_layers])[0]
    normed = found / np.sqrt((found**2).mean(-1, keepdims=True) + cfg.rms_norm_eps) * np.asarray(params.norm)
    near(normed, real.allm.llm.hidden_states(ids), of_model(cfg, len(ids)))
    for bad, says in (({"positions": [4]}, "position 4"), ({"layers": [-1]}, "from 0, the embedding")):
        wrong = admin.post("/hidden_states", json={"input_ids": ids, **bad}, headers=KEY)
        assert (wrong.status_code, says in wrong.text) == (400, True)
