"""Pages of other origins: refused, unless they are allowed."""

import pytest

from mtp_jax import ConfigError
from serve.base.settings import Settings
from tests.serve.conftest import Running

SHORT = {"prompt": "ab", "max_tokens": 2}


def test_pages_of_allowed_origins_may_ask(server: Running):
    ours = server.variant(api_keys=("secret",), allowed_origins=("https://Chat.example",))
    origin, key = {"origin": "https://chat.example"}, {"authorization": "Bearer secret"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    allowed = ours.request("OPTIONS", "/v1/completions", headers=asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-headers"]) == (200, "x-a")
    answer = ours.get("/v1/models", headers={**origin, **key})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin["origin"])
    assert ours.get("/v1/models", headers=origin).status_code == 401
    other = {"origin": "https://evil.example"}
    assert ours.get("/v1/models", headers={**other, **key}).status_code == 403
    assert ours.request("OPTIONS", "/v1/models", headers={**asked, **other}).status_code == 400
    anybody = server.variant(allowed_origins=("*",))
    assert anybody.get("/v1/models", headers=other).headers["access-control-allow-origin"] == "*"
    for wrong in ("chat.example", "https://chat.example/", ""):
        with pytest.raises(ConfigError, match="--allowed-origin"):
            Settings("tiny", allowed_origins=(wrong,))


def test_pages_of_other_origins_are_refused(server: Running):
    guarded = server.variant()

    def status(origin: str) -> int:
        headers = {"host": "localhost:8000", "origin": origin}
        return guarded.post("/v1/completions", headers=headers, json=SHORT).status_code

    assert status("http://localhost:8000") == 200
    for origin in ("http://evil.example", "null", "http://localhost:9", "http://[", "localhost:8000"):
        assert status(origin) == 403
    answer = guarded.get("/v1/models", headers={"host": "localhost"})
    assert not any(name.startswith("access-control") for name in answer.headers)
