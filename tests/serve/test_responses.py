"""The Responses API, through the official `openai` package."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

PLAIN: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 100}
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["here", "there"]}},
    "required": ["to"],
    "additionalProperties": False,
}
GO: Any = {"type": "function", "name": "go", "parameters": SCHEMA, "strict": True}


def test_an_answer_is_the_chats(api):
    found = api.responses.create(input="hi", instructions="be brief", **PLAIN)
    chat = api.chat.completions.create(
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        model="tiny",
        temperature=0,
        max_tokens=100,
    )
    assert found.output_text
    assert found.output_text.strip() == chat.choices[0].message.content.strip()
    assert (found.status == "completed") == (chat.choices[0].finish_reason == "stop")
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.output_tokens == chat.usage.completion_tokens


def test_events_make_the_whole_answer(api):
    whole = api.responses.create(input="hi", **PLAIN)
    events = list(api.responses.create(input="hi", stream=True, **PLAIN))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert events[-1].response.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == whole.output_text


def test_a_thought_is_an_item_of_its_own(api):
    found = api.responses.create(input="hi", reasoning={"effort": "high"}, **PLAIN)
    assert found.output[0].type == "reasoning"
    assert found.output[0].content[0].text
    assert found.usage.output_tokens_details.reasoning_tokens > 0
    none = api.responses.create(input="hi", reasoning={"effort": "none"}, **PLAIN)
    assert none.output[0].type == "message"


def test_a_forced_call_and_its_result(api):
    ask: dict[str, Any] = {"tools": [GO], "tool_choice": {"type": "function", "name": "go"}, **PLAIN}
    found = api.responses.create(input="q", **ask)
    (call,) = found.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["to"] in ("here", "there")
    assert found.status == "completed"
    events = list(api.responses.create(input="q", stream=True, **ask))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas).strip() == call.arguments.strip()
    assert len(deltas) > 2
    assert events[-1].response.output[0].name == "go"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    asked = {"role": "user", "content": "q"}
    assert api.responses.create(input=[asked, *found.output, result], tools=[GO], **PLAIN).output_text
    more: Any = [asked, call.model_dump(), result]
    assert api.responses.create(input=more, tools=[GO], **PLAIN).usage.input_tokens > found.usage.input_tokens


def test_text_in_a_schema(api):
    form: Any = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    found = api.responses.create(input="hi", text={"format": form}, **PLAIN)
    assert json.loads(found.output_text)["to"] in ("here", "there")
    with api.responses.stream(input="hi", text={"format": form}, **PLAIN) as stream:
        assert stream.get_final_response().output_text == found.output_text


USAGE = {
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "service_tier": "auto",
    "max_tool_calls": 2,
}


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0, "top_p": 0.5, "truncation": "auto", **USAGE},
        {"tools": [GO], "tool_choice": "required", "reasoning": {"effort": "low"}, "presence_penalty": 1},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}, "max_output_tokens": 3},
        {"text": {"verbosity": "low"}, "store": True},
    ],
)
def test_a_response_has_the_fields_of_openais(client, more):
    answer = client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 100, **more}).json()
    found = Response.model_validate(answer)  # as a client does that trusts no server
    assert (found.temperature, found.top_p) == (more.get("temperature", 1), more.get("top_p", 1))
    assert answer["presence_penalty"] == more.get("presence_penalty", 0)
    assert answer["frequency_penalty"] == found.top_logprobs == 0
    assert {name: answer[name] for name in USAGE} == {name: more.get(name) for name in USAGE}
    assert (found.background, answer["store"], found.truncation) == (False, False, "disabled")
    assert (found.completed_at is not None) == (found.status == "completed")


def test_an_answer_that_is_cut_says_so(api):
    found = api.responses.create(input="hi", **PLAIN | {"max_output_tokens": 3})
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].status == "incomplete"
    *_, item, last = api.responses.create(input="hi", stream=True, **PLAIN | {"max_output_tokens": 3})
    assert (item.item.status, last.type) == ("incomplete", "response.incomplete")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"previous_response_id": "resp_1"}, "not found, as this server stores none"),
        ({"background": True}, "background: this server keeps no answer"),
        ({"prompt": {"id": "pmpt_1"}}, "no prompt templates; send the text as instructions"),
        ({"input": [{"id": "msg_1"}]}, "nothing is stored here that could be referred to"),
        ({"input": "a" * 400, "truncation": "auto"}, "shorten the prompt"),
        ({"extra_body": {"prompt_logprobs": 1}}, "use /v1/chat/completions"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "function_call_output"),
    ],
)
def test_what_is_not_supported_is_refused(api, body, says):
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        api.responses.create(**{"input": "hi", **PLAIN, **body})
    assert (caught.value.code == "previous_response_not_found") == ("previous_response_id" in body)
