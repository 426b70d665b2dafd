"""Failures in the words by which clients know them, and answers that are cut, on every route."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "q"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "q"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "q"}]},
    "/v1/responses": {"input": "q"},
}


def said(path: str, text: str) -> dict[str, Any]:
    """The body of a route with a text in the place of its question."""
    (name,) = ROUTES[path]
    return {name: text if isinstance(ROUTES[path][name], str) else [{"role": "user", "content": text}]}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("tokens", [300, 100_000])
def test_clients_see_that_a_prompt_is_too_long(client, path, tokens):
    """They compact a conversation then; a text of many characters is not even encoded."""
    error = client.post(path, json={"max_tokens": 9, **said(path, "a" * tokens)}).json()["error"]
    says = error["message"]
    claude_code = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", says, re.IGNORECASE)
    assert claude_code, says
    assert 252 <= int(claude_code[1]) <= tokens + 20
    assert int(claude_code[2]) == 251
    assert "This model's maximum context length is 252 tokens" in says  # litellm
    assert "context_length_exceeded" in says  # langchain, which sees nothing else of the error
    assert "shorten the prompt" in says
    if path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"


CALL: dict[str, Any] = {  # of at least 100 characters, which are tokens
    "type": "object",
    "properties": {"to": {"type": "string", "pattern": "^[a-z]{100}$"}},
    "required": ["to"],
}
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "tools": [{"name": "go", "input_schema": CALL}],
        "tool_choice": {"type": "tool", "name": "go"},
    },
    "/v1/responses": {
        "tools": [{"type": "function", "name": "go", "parameters": CALL}],
        "tool_choice": "required",
    },
}


@pytest.fixture
def cut(server, client, compiled, monkeypatch) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Asks a route for an answer of 200 tokens that ends after about 60 (``after``) for a reason.

    Returns the status, and the answer, or the events of its stream.
    """

    def ask(why: str, path: str, after: int = 60, stream: bool = False, **more: Any) -> Any:
        engine, before = compiled.engine, compiled.engine.stats().generation_tokens
        step, aborted = engine.step, []

        def step_until_late() -> Any:
            if not aborted and engine.scheduler.live() and engine.stats().generation_tokens >= before + after:
                if why == "abort":
                    aborted.append(server.call(lambda: server.allm.abort(None)))
                    return []
                for request in engine.scheduler.live():
                    object.__setattr__(request, "deadline", 0.0)
            return step()

        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        limits = {most: 200 if why != "length" else after, "temperature": 0}
        with monkeypatch.context() as patch:
            if why != "length":
                patch.setattr(engine, "step", step_until_late)
            answer = client.post(path, json={**ROUTES[path], **limits, "stream": stream, **more})
        if not stream:
            return answer.status_code, [answer.json()]
        return answer.status_code, [
            json.loads(line[6:]) for line in answer.text.split("\n") if line[:6] == "data: "
        ]

    return ask


@pytest.mark.parametrize(("why", "kind"), [("timeout", "timeout_error"), ("abort", "api_error")])
def test_a_message_that_is_cut_did_not_end(cut, why, kind):
    status, (message,) = cut(why, "/v1/messages")
    assert (status, message["stop_reason"]) == (200, "max_tokens")
    assert 0 < len(message["content"][0]["text"]) < 200
    _, (*events, error) = cut(why, "/v1/messages", stream=True)
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert re.search(r"(over|aborted) after \d+ tokens", error["error"]["message"])
    assert [event["type"] for event in events][:2] == ["message_start", "content_block_start"]
    assert {event["type"] for event in events[2:]} == {"content_block_delta"}
    status, (nothing,) = cut(why, "/v1/messages", after=0)
    assert (status, nothing["error"]["type"]) == (408 if why == "timeout" else 500, kind)


@pytest.mark.parametrize("why", ["timeout", "abort", "length"])
def test_a_call_that_is_cut_is_none(cut, why):
    """An agent would run it."""
    status, (message,) = cut(why, "/v1/messages", **TOOLS["/v1/messages"])
    if why == "length":
        assert (status, message["stop_reason"], message["content"]) == (200, "max_tokens", [])
    else:
        assert message["type"] == "error"
    _, (*events, last) = cut(why, "/v1/messages", stream=True, **TOOLS["/v1/messages"])
    kinds = [event["type"] for event in events]
    assert events[1]["content_block"]["name"] == "go"
    assert (last["type"] == "error") == ("content_block_stop" not in kinds) == (why != "length")
    assert why != "length" or events[-1]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("why", ["timeout", "abort"])
@pytest.mark.parametrize("calls", [False, True])
def test_a_response_that_is_cut_has_failed(cut, why, calls):
    """A client raises its limit where the answer names one."""
    more = TOOLS["/v1/responses"] if calls else {}
    _, (answer,) = cut(why, "/v1/responses", **more)
    _, (*events, last) = cut(why, "/v1/responses", stream=True, **more)
    assert last["type"] == "response.failed"
    assert [event["sequence_number"] for event in (*events, last)] == [*range(len(events) + 1)]
    assert not any(event["type"].endswith(".done") for event in events)
    for response in (answer, last["response"]):
        assert (response["status"], response["incomplete_details"]) == ("failed", None)
        assert response["error"]["code"] == "server_error"
        assert re.search(r"(over|aborted) after \d+ tokens", response["error"]["message"])
        (item,) = response["output"]
        assert (item["type"], item["status"]) == ("function_call" if calls else "message", "incomplete")
    _, (*_, last) = cut(why, "/v1/responses", after=0, stream=True)
    assert (last["type"], last["response"]["output"]) == ("response.failed", [])


@pytest.mark.parametrize("path", ROUTES)
def test_a_timeout_is_no_wrong_request(server, path):
    answer = server.variant(request_seconds=1e-6).post(path, json={"max_tokens": 9, **ROUTES[path]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (408, "timeout_error")
