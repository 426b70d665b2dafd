"""/pause_generation, /continue_generation, /update_weight_version: requests are kept, or end, as told."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.conftest import LONG, Gate, Running, Variant, live, wait_until

KEY = {"Authorization": "Bearer admin"}
SHORT = {"text": "abc", "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}


@pytest.fixture
def admin(server: Running):
    """The server with an admin key; nothing is paused, and its weights have their old name, at the end."""
    variant, version = server.variant(admin_key="admin"), server.allm.weight_version
    yield variant
    post(variant, "/continue_generation")
    server.allm.llm.engine.name_weights(version)


def post(admin: Variant, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = admin.post(path, json=body, headers=KEY)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture
def tell(server: Running, admin: Variant, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Tells the server something while its engine stands at a gate with some requests, and opens the gate."""
    calls, call = list[Any](), server.allm._thread.call
    monkeypatch.setattr(
        server.allm._thread, "call", lambda function: (call(function), calls.append(function))
    )

    def told(gate: Gate, requests: int, path: str, **body: Any) -> dict[str, Any]:
        gate.wait()
        wait_until(lambda: len(calls) == requests)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: post(admin, path, **body))
            wait_until(lambda: len(calls) > requests)
            gate.open()
            return answer.result(60)

    return told


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_kept_requests_go_on(server, client, admin, ask, stop_after, tell, mode):
    gate = stop_after(4)
    running = [ask(rid=f"r{i}") for i in range(3)]  # one of them waits
    assert tell(gate, 3, "/pause_generation", mode=mode)["status"] == "ok"
    assert client.get("/server_info").json()["paused"] is True
    assert server.allm.llm.engine.stats().running == 0
    new = ask(**SHORT)
    live(server, 4)
    assert not any(r.done() for r in (*running, new))
    assert post(admin, "/continue_generation")["status"] == "ok"
    whole = client.post("/generate", json={"text": "abc", "sampling_params": LONG}).json()["output_ids"]
    assert [r.result(60)["output_ids"] for r in running] == [whole] * 3
    assert new.result(60)["output_ids"] == whole[:2]
    assert client.get("/server_info").json()["paused"] is False


@pytest.mark.parametrize("body", [{}, {"mode": None}, {"mode": "abort"}])
def test_a_pause_ends_requests_unless_told_not_to(server, admin, ask, stop_after, tell, body):
    gate = stop_after(4)
    running = [ask()]
    gate.wait()
    running += [ask(text="b"), ask(text="c")]
    tell(gate, 3, "/pause_generation", **body)
    live(server, 0)
    answers = [r.result(60) for r in running]
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort"] * 3
    assert [bool(a["output_ids"]) for a in answers] == [True, False, False]
    new = ask(**SHORT)
    live(server, 1)
    post(admin, "/continue_generation")
    assert len(new.result(60)["output_ids"]) == 2


def test_a_kept_request_may_be_aborted(client, admin, ask, stop_after, tell):
    gate = stop_after(4)
    running = ask(rid="ended")
    gate.wait()
    kept = ask(rid="kept")
    tell(gate, 2, "/pause_generation", mode="in_place")
    assert client.post("/abort_request", json={"rid": "ended"}).status_code == 200
    answer = running.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"]
    assert not kept.done()
    post(admin, "/pause_generation", mode="abort")  # a pause may become stricter
    assert kept.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


def test_memory_is_released_in_a_pause(client, admin, ask, stop_after, tell):
    gate = stop_after(4)
    running = ask()
    tell(gate, 1, "/pause_generation", mode="retract")
    assert post(admin, "/release_memory_occupation", tags=["kv_cache"])["released"] == ["cache"]
    assert "resume it" in post(admin, "/continue_generation", 503)["error"]["message"]
    assert client.post("/generate", json=SHORT).status_code == 503
    assert admin.post("/resume_memory_occupation", headers=KEY).json()["released"] == []  # without a body
    post(admin, "/continue_generation")
    assert len(running.result(60)["output_ids"]) == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
def test_a_body_is_not_needed(admin, path):
    assert admin.post(path, headers=KEY).json()["status"] == "ok"


def test_other_modes_are_refused(admin):
    assert "mode" in post(admin, "/pause_generation", 400, mode="stop")["error"]["message"]
    assert "paused" in admin.get("/server_info", headers=KEY).json()


def test_a_name_of_weights_ends_no_request(client, ask, stop_after, tell):
    gate = stop_after(4)
    running = ask()
    answer = tell(gate, 1, "/update_weight_version", new_version="2", abort_all_requests=False)
    assert (answer["success"], answer["new_version"]) == (True, "2")
    assert client.get("/get_weight_version").json() == {"weight_version": "2"}
    assert running.result(60)["meta_info"]["finish_reason"]["type"] == "length"
    assert client.post("/generate", json=SHORT).json()["meta_info"]["weight_version"] == "2"


def test_a_name_of_weights_ends_requests_if_told_to(ask, stop_after, tell):
    gate = stop_after(4)
    running = ask()
    tell(gate, 1, "/update_weight_version", new_version="3", abort_all_requests=True)
    assert running.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("body", [{}, {"new_version": 2}, {"new_version": "a" * 257}])
def test_other_names_of_weights_are_refused(admin, body):
    assert post(admin, "/update_weight_version", 400, **body)["error"]["param"] == "new_version"
