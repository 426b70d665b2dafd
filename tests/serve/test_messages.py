"""The Messages API, through the official `anthropic` package."""

from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

from serve.routes import messages
from tests.serve.conftest import Running

ASK: Any = [{"role": "user", "content": "q"}]
PLAIN: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "extra_body": {"temperature": 0}}
GO: Any = {
    "name": "go",
    "input_schema": {
        "type": "object",
        "properties": {"to": {"enum": ["here", "there"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def api(server: Running):
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as api:
        yield api


def test_an_answer_is_the_chats(api, server):
    found = api.messages.create(messages=ASK, system="be brief", **PLAIN)
    chat = {
        "messages": [{"role": "system", "content": "be brief"}, *ASK],
        "temperature": 0,
        "max_tokens": 100,
    }
    with server.client() as client:
        same = client.post("/v1/chat/completions", json=chat).json()
    (block,) = found.content
    assert block.text.strip() == same["choices"][0]["message"]["content"].strip()
    assert (
        found.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[same["choices"][0]["finish_reason"]]
    )
    assert found.usage.output_tokens == same["usage"]["completion_tokens"]
    cached = found.usage.cache_read_input_tokens
    assert found.usage.input_tokens + cached == same["usage"]["prompt_tokens"]
    counted = api.messages.count_tokens(model="tiny", messages=ASK, system="be brief")
    assert counted.input_tokens == same["usage"]["prompt_tokens"]


def test_events_make_the_whole_message(api):
    whole = api.messages.create(messages=ASK, **PLAIN)
    with api.messages.stream(messages=ASK, **PLAIN) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text == final.content[0].text
    assert len(pieces) > 1
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_thought_is_a_block_of_its_own(api):
    found = api.messages.create(messages=ASK, thinking={"type": "adaptive"}, **PLAIN)
    assert found.content[0].type == "thinking"
    again = [*ASK, {"role": "assistant", "content": found.content}, *ASK]
    assert (
        api.messages.create(messages=again, thinking={"type": "disabled"}, **PLAIN).content[0].type == "text"
    )


def test_a_forced_call_and_its_result(api):
    ask: dict[str, Any] = {"tools": [GO], "tool_choice": {"type": "tool", "name": "go"}, **PLAIN}
    found = api.messages.create(messages=ASK, **ask)
    (call,) = found.content
    assert (call.type, call.name) == ("tool_use", "go")
    assert call.input["to"] in ("here", "there")
    assert found.stop_reason == "tool_use"
    with api.messages.stream(messages=ASK, **ask) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "ok"}]}
    turns = [*ASK, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    more = api.messages.create(messages=turns, tools=[GO], **PLAIN)
    assert more.usage.input_tokens + more.usage.cache_read_input_tokens > found.usage.input_tokens


@beta_tool
def walk(to: Literal["here", "there"]) -> str:
    """Walk somewhere.

    Args:
        to: where to.
    """
    return f"walked {to}"


def test_a_runner_of_tools_sends_the_whole_conversation(api, server, monkeypatch):
    """It would leave the first messages to the server, and is told that there is no such thing here."""
    seen: list[int] = []
    ask = messages.ask

    async def noted(server: Any, request: Any, body: Any, *more: Any) -> Any:
        seen.append(len(body.messages))
        return await ask(server, request, body, *more)

    monkeypatch.setattr(messages, "ask", noted)
    runner = api.beta.messages.tool_runner(
        messages=ASK,
        tools=[walk],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        **PLAIN,
    )
    first, second = list(runner)
    assert [block.type for block in first.content] == ["tool_use"]
    assert second.stop_reason in ("tool_use", "max_tokens")  # the context ends
    assert seen == [1, 3]


class Where(BaseModel):
    """What an answer is parsed as."""

    to: Literal["here", "there"]


def test_an_answer_is_parsed(api):
    found = api.messages.parse(messages=ASK, output_format=Where, **PLAIN)
    assert found.parsed_output.to in ("here", "there")


def test_the_first_event_counts_the_prompt(api):
    counted = api.messages.count_tokens(model="tiny", messages=ASK).input_tokens
    with api.messages.stream(messages=ASK, **PLAIN) as stream:
        first = next(iter(stream))
        assert first.message.usage.input_tokens == counted
        usage = stream.get_final_message().usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_errors_are_anthropics(api):
    with pytest.raises(anthropic.BadRequestError, match="name: goes with the type tool") as caught:
        api.messages.create(messages=ASK, tools=[GO], tool_choice={"type": "tool"}, **PLAIN)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y"}}
    with pytest.raises(
        anthropic.BadRequestError, match=r"content\.0: is not text; this server takes no images"
    ):
        api.messages.create(messages=[{"role": "user", "content": [image]}], **PLAIN)


def test_the_key_may_come_in_anthropics_header(server):
    variant = server.variant(api_keys=("k",))
    body = {"messages": ASK, "max_tokens": 4}
    wrong = variant.request("POST", "/v1/messages", json=body, headers={"x-api-key": "no"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    assert variant.request("POST", "/v1/messages", json=body, headers={"x-api-key": "k"}).status_code == 200
