"""What stopped an answer, on every route that says so, streamed or not, with drafts."""

import json
from typing import Any

import pytest

from tests.serve.helpers import events, post

TEXT: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], **TEXT}
CASES = [("/v1/completions", {"prompt": "abc", **TEXT}), ("/v1/chat/completions", CHAT)]


def content(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(("path", "body"), CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_says_what_stopped_it(client, path, body, stream):
    def choices(**more: Any) -> list[dict[str, Any]]:
        """The last of each stream; the one of a whole answer."""
        if not stream:
            return post(client, path=path, **body, **more)["choices"]
        *earlier, last = [c["choices"][0] for c in events(client, path, **body, **more)]
        assert not any("stop_reason" in choice for choice in earlier)
        return [last]

    whole = post(client, path=path, **body, return_token_ids=True)["choices"][0]
    stop, token = content(whole)[9:12], whole["token_ids"][7]
    found = {
        "the string": choices(stop=["not in it", stop]),
        "the token": choices(stop_token_ids=[token]),
        "neither": choices(),
    }
    reasons = {name: [(c["finish_reason"], c["stop_reason"]) for c in cs] for name, cs in found.items()}
    assert reasons == {
        "the string": [("stop", stop)],
        "the token": [("stop", token)],
        "neither": [("length", None)],
    }


def test_a_prompt_that_is_only_scored_was_not_stopped(client):
    whole = post(client, **TEXT, return_token_ids=True)["choices"][0]
    asked = {"max_tokens": 0, "echo": True, "logprobs": 1, "stop_token_ids": whole["token_ids"][:1]}
    (choice,) = post(client, **{**TEXT, **asked})["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_names_its_stop_sequence(client, stream):
    ask: dict[str, Any] = {"messages": CHAT["messages"], "max_tokens": 24, "temperature": 0}

    def end(**more: Any) -> tuple[str, str | None]:
        response = client.post("/v1/messages", json={**ask, **more, "stream": stream})
        assert response.status_code == 200, response.text
        if stream:
            lines = [e.split("data: ", 1)[1] for e in response.text.strip().split("\n\n")]
            begun, *_, last, _ = map(json.loads, lines)
            assert begun["message"]["stop_reason"] is begun["message"]["stop_sequence"] is None
            return last["delta"]["stop_reason"], last["delta"]["stop_sequence"]
        return response.json()["stop_reason"], response.json()["stop_sequence"]

    text = client.post("/v1/messages", json=ask).json()["content"][0]["text"]
    assert end(stop_sequences=["not in it", text[9:12]]) == ("stop_sequence", text[9:12])
    assert end(stop_sequences=["not in it"]) == end()
    assert end() in (("max_tokens", None), ("end_turn", None))
