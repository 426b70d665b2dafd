"""Stop strings of a model that thinks: they end its answer, not its thought, wherever the two are split."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.conftest import Running, simulated, start, weightless
from tests.serve.helpers import events, post

TAGS = ["<think>", "</think>"]
ASK: dict[str, Any] = {"temperature": 0, "max_tokens": 80}
TURNS: dict[str, Any] = {"messages": [{"role": "user", "content": "how"}], "thinking": {"type": "enabled"}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A simulated model that says a few letters and ends its thoughts."""
    folder = weightless(tmp_path_factory.mktemp("stops"), TAGS)
    with start(simulated(folder, [*"abcdef", "</think>"], simulated_step=0.0), spec_metrics="none") as found:
        yield found


def said(client, path: str, stream: bool, stop: list[str], **more: Any) -> tuple[str, str, str | None]:
    """The thought, the answer and the end."""
    body = {**TURNS, **ASK, **more, **({"stop": stop} if "messages" in path or "chat" in path else {})}
    if path == "/v1/messages":
        body |= {"stop_sequences": body.pop("stop")}
        answer = client.post(path, json=body).json()
        texts = {block["type"]: block.get("thinking") or block.get("text") for block in answer["content"]}
        return texts.get("thinking", ""), texts.get("text", ""), answer["stop_sequence"]
    if not stream:
        (choice,) = post(client, path=path, **body)["choices"]
        message = choice["message"]
        return message.get("reasoning", ""), message["content"], choice["stop_reason"]
    choices = [c["choices"][0] for c in events(client, path, **body)]
    thought, answer = (
        "".join(c["delta"].get(name) or "" for c in choices) for name in ("reasoning_content", "content")
    )
    return thought, answer, choices[-1]["stop_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_ends_in_its_answer(running, stream):
    with running.client() as client:
        thought, answer, end = said(client, "/v1/chat/completions", stream, ["not in it"])
        assert end is None
        assert thought
        assert answer
        inside = next(s for a in range(len(thought)) if (s := thought[a : a + 2]) in answer)
        assert said(client, "/v1/chat/completions", stream, [inside]) == (
            thought,
            answer[: answer.index(inside)],
            inside,
        )
        # No stop string begins in a thought unless it has the tag.
        over = thought[-1] + answer[0]
        found = said(client, "/v1/chat/completions", stream, [over])
        assert found[0] == thought
        assert said(client, "/v1/chat/completions", stream, ["</think>"]) == (thought, "", "</think>")
        cut = said(client, "/v1/chat/completions", stream, [inside], stop_in_thoughts=True)
        assert cut == (thought[: thought.index(inside)], "", inside)


def test_a_message_ends_in_its_answer(running):
    with running.client() as client:
        thought, answer, _ = said(client, "/v1/messages", False, ["zz"], max_tokens=80)
        inside = next(s for a in range(len(thought)) if (s := thought[a : a + 2]) in answer)
        found = said(client, "/v1/messages", False, [inside])
        assert found == (thought, answer[: answer.index(inside)], inside)


def test_completions_are_raw_unless_told_otherwise(running):
    """As in vLLM: nothing is split there, and a search over steps of a thought stops within it."""
    with running.client() as client:
        ask = {"prompt": "q<think>", **ASK}
        text = post(client, **ask)["choices"][0]["text"]
        thought, _, answer = text.partition("</think>")
        inside = next(s for a in range(len(thought)) if (s := thought[a : a + 2]) in answer)
        assert post(client, **ask, stop=inside)["choices"][0]["text"] == thought[: thought.index(inside)]
        for stream in (False, True):
            more = {"stop": inside, "stop_in_thoughts": False}
            if stream:
                found = "".join(c["choices"][0]["text"] for c in events(client, **ask, **more))
            else:
                found = post(client, **ask, **more)["choices"][0]["text"]
            assert found == f"{thought}</think>{answer[: answer.index(inside)]}"
        params = {"temperature": 0, "max_new_tokens": 80, "stop": [inside], "stop_in_thoughts": False}
        answer = client.post("/generate", json={"text": "q<think>", "sampling_params": params}).json()
        assert answer["text"] == found


def test_no_text_of_a_thought_waits_for_a_stop_string(running):
    """Which may be long: each token of the thought is shown as it comes."""
    with running.client() as client:
        thought = said(client, "/v1/chat/completions", False, ["zz"])[0]
        lines = events(
            client, "/v1/chat/completions", **TURNS, **ASK, stop=[thought + "zz"], return_token_ids=True
        )
        shown = ids = 0
        for choice in (line["choices"][0] for line in lines):
            shown += len(choice["delta"].get("reasoning") or "")
            ids += len(choice["token_ids"])
            assert shown == min(ids, len(thought))
            if shown == len(thought):
                return
    raise AssertionError(json.dumps(lines))
