"""Options that together leave no token: the client's mistake is named, and is not counted as the server's."""

from typing import Any

import pytest

from tests.serve.helpers import GREEDY


def ids(client, text: str) -> list[int]:
    return client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]


def refused(client, **fields: Any) -> tuple[str | None, str]:
    answer = client.post("/v1/completions", json={"prompt": "q", "max_tokens": 9, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["message"]


def choice(*texts: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": list(texts)}}


def test_what_can_be_seen_at_once_names_the_options(client, server):
    (a,) = ids(client, "a")
    eos = server.allm.about.model.eos_token_ids
    for fields, names in (
        (choice("b") | {"allowed_token_ids": [a]}, "structured output and allowed_token_ids"),
        (choice("b") | {"bad_words": ["b"]}, "structured output and bad_words"),
        ({"allowed_token_ids": [a], "bad_words": ["a"]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": list(eos), "min_tokens": 2}, "allowed_token_ids and min_tokens"),
        (
            choice("b") | {"allowed_token_ids": [a], "bad_words": ["b"]},
            "structured output, allowed_token_ids and bad_words",
        ),
    ):
        code, says = refused(client, **fields)
        assert f"{names} together leave no token to begin with" in says
        assert code != "no_token_allowed"


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "fields", [{"allowed": "ab"}, {"bad_words": ["c"]}, {"bad_words": ["bc"]}, {"bad_words": ["abc"]}]
)
def test_a_dead_end_on_the_way_has_a_reason_of_its_own(client, fields, drafts):
    more = dict(fields)
    if allowed := more.pop("allowed", None):
        more["allowed_token_ids"] = ids(client, allowed)
    ask = {**choice("abcd"), **more, "temperature": 0, "speculative": {"max_tokens": drafts}}
    code, says = refused(client, **ask)
    assert code == "no_token_allowed"
    assert "left no token" in says
    assert "finite" not in says
    stream = client.post("/v1/completions", json={"prompt": "q", "max_tokens": 9, "stream": True, **ask})
    *_, last, done = stream.text.strip().split("\n\n")
    assert done == "data: [DONE]" or "no_token_allowed" in done
    assert "no_token_allowed" in last + done
    # The next request of the same prompt finds a whole cache.
    post = client.post("/v1/completions", json={"prompt": "q", "max_tokens": 9, **choice("abcd")})
    assert post.json()["choices"][0]["text"] == "abcd"


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_output_that_is_complete_ends_though_its_end_is_not_allowed(client, drafts):
    fields = {**choice("ab"), "allowed_token_ids": ids(client, "ab")}
    body = {"prompt": "q", "max_tokens": 9, **fields, "speculative": {"max_tokens": drafts}}
    (found,) = client.post("/v1/completions", json=body).json()["choices"]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("ab", "stop", None)


def test_options_that_leave_a_token_do_as_they_say(client):
    """They narrow the same tokens, and are asked before each request that has two of them."""
    body = {
        "prompt": "q",
        "max_tokens": 6,
        **GREEDY,
        "allowed_token_ids": ids(client, "abc"),
        "min_tokens": 3,
    }
    text = client.post("/v1/completions", json={**body, "bad_words": ["b"]}).json()["choices"][0]["text"]
    assert set(text) <= {"a", "c"}
    assert len(text) == 6
