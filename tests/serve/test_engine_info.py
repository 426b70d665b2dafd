"""/model_info, /health_generate and the other routes that SGLang's trainers and gateway ask an engine."""

import pytest

from mtp_jax import EngineStopped
from mtp_jax.engine import results
from serve.routes.table import ROUTES
from tests.serve.conftest import live, wait_until


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(client, path):
    info = client.get(path).json()
    assert (info["model_path"], info["is_generation"]) == ("tiny", True)
    assert info["weight_version"] == client.get("/get_weight_version").json()["weight_version"]


def test_server_info_has_two_names(client):
    assert client.get("/get_server_info").json().keys() == client.get("/server_info").json().keys()


def test_health_is_a_token(client, compiled):
    before = compiled.engine.stats().generation_tokens
    assert client.get("/health_generate").status_code == 200
    assert compiled.engine.stats().generation_tokens == before + 1


def test_health_needs_a_key(server):
    keyed = server.variant(api_keys=("user",))
    assert keyed.get("/health_generate").status_code == 401
    assert keyed.get("/health_generate", headers={"x-api-key": "user"}).status_code == 200


@pytest.mark.parametrize("queue", [256, 1])
def test_a_busy_engine_that_advances_is_healthy(server, client, ask, stop_after, monkeypatch, queue):
    """Its slots are taken, and perhaps its queue is full."""
    gate = stop_after(4)
    running = [ask(), ask(), ask()]
    gate.wait()
    live(server, 3)
    monkeypatch.setattr(server.allm.admission, "max_requests", queue)
    health = ask("/health_generate", method="GET")
    if queue > 1:
        live(server, 4)
    gate.open()
    assert health.result(60) == {"status": "ok"}
    assert [len(r.result(60)["output_ids"]) for r in running] == [200] * 3


def test_a_pause_is_healthy(server, client):
    paused = server.variant(admin_key="admin")
    key = {"Authorization": "Bearer admin"}
    paused.post("/pause_generation", headers=key)
    try:
        assert client.get("/health_generate").status_code == 200
    finally:
        paused.post("/continue_generation", headers=key)


def test_an_engine_that_stands_still_is_not(server, stop_after):
    gate = stop_after(0)
    impatient = server.variant(ready_seconds=0.01)
    answer = impatient.get("/health_generate")
    assert answer.status_code == 503
    gate.open()
    wait_until(lambda: server.allm.live == 0)


def test_an_engine_that_has_failed_is_not(server, monkeypatch):
    monkeypatch.setattr(server.allm._thread, "error", EngineStopped("gone"))
    answer = server.variant().get("/health_generate")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the engine has failed")


def test_numbers_that_are_not_finite_are_not(client, monkeypatch):
    """A token counts for nothing where its request has failed."""
    monkeypatch.setattr(results, "REASONS", dict.fromkeys(results.REASONS, "error"))
    assert client.get("/health_generate").status_code == 503


def test_some_routes_take_both_methods(client, server):
    assert client.get("/flush_cache").json() == {"success": True}
    admin = server.variant(admin_key="admin")
    key = {"Authorization": "Bearer admin"}
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert admin.get(path).status_code == 401
    assert admin.get("/release_memory_occupation", headers=key).json()["released"] == ["cache"]
    assert admin.get("/resume_memory_occupation", headers=key).json()["released"] == []


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.changed_by_get])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_origins_change_nothing_by_links(client, path, site):
    """Browsers send no Origin with an image's GET, but say that it is of another site."""
    assert client.get(path, headers={"sec-fetch-site": site}).status_code == 403
    assert client.get(path, headers={"sec-fetch-site": "same-origin"}).status_code == 200
