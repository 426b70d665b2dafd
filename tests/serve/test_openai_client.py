"""The official `openai` package, unmodified, against the server."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.serve.conftest import Running, wait_until

HI: Any = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 20}
MORE = {"ignore_eos": True}


def test_completions(api: OpenAI):
    answer = api.completions.create(prompt="abc", logprobs=2, echo=True, extra_body=MORE, **GREEDY)
    (choice,) = answer.choices
    assert choice.text.startswith("abc")
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    pieces = [
        c.choices[0].text
        for c in api.completions.create(prompt="abc", stream=True, extra_body=MORE, **GREEDY)
    ]
    assert "".join(pieces) == choice.text.removeprefix("abc")
    assert len(pieces) > 1


def test_chat(api: OpenAI):
    answer = api.chat.completions.create(
        messages=HI, logprobs=True, top_logprobs=2, extra_body=MORE, **GREEDY
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
    assert [len(t.top_logprobs) for t in choice.logprobs.content] == [2] * 20
    usage: Any = {"include_usage": True}
    chunks = list(
        api.chat.completions.create(messages=HI, stream=True, stream_options=usage, extra_body=MORE, **GREEDY)
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert chunks[-1].usage is not None
    assert answer.usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 20


def test_async_clients_at_once(server: Running, api: OpenAI):
    expected = api.completions.create(prompt="abc", extra_body=MORE, **GREEDY).choices[0].text

    async def stream(client: AsyncOpenAI) -> str:
        chunks = await client.completions.create(prompt="abc", stream=True, extra_body=MORE, **GREEDY)
        return "".join([c.choices[0].text async for c in chunks])

    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client) for _ in range(6)))

    assert asyncio.run(ask()) == [expected] * 6


def test_closing_a_stream_ends_the_request(server: Running, api: OpenAI, slow_steps):
    aborted = server.allm.llm.engine.stats().finished.get("abort", 0)
    with api.completions.create(
        prompt="abc", stream=True, model="tiny", max_tokens=200, extra_body=MORE
    ) as stream:
        next(iter(stream))
    wait_until(lambda: server.allm.live == 0)
    assert server.allm.llm.engine.stats().finished["abort"] == aborted + 1


def test_structured_output(api: OpenAI):
    class Answer(BaseModel):
        yes: bool

    parsed = api.chat.completions.parse(messages=HI, response_format=Answer, model="tiny", max_tokens=60)
    assert parsed.choices[0].message.parsed in (Answer(yes=True), Answer(yes=False))
    any_object: Any = {"type": "json_object"}
    answer = api.chat.completions.create(
        messages=HI, response_format=any_object, seed=1, model="tiny", max_tokens=100
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


def test_extensions(api: OpenAI):
    body = {**MORE, "speculative": {"max_tokens": 2, "metrics": "summary"}, "return_token_origins": True}
    answer = api.completions.create(prompt="abc", extra_body=body, **GREEDY).model_dump()
    assert answer["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 1
    assert {t["drafted"] for t in answer["choices"][0]["token_origins"]} == {True, False}


def test_models(api: OpenAI):
    assert [m.id for m in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").owned_by == "SIMULATED"


def test_errors_have_the_packages_classes(server: Running, api: OpenAI):
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        api.completions.create(prompt="abc", model="tiny", temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(prompt="abc", model="other")
    assert missing.value.code == "model_not_found"
    server.allm.admission.max_requests, before = 1, server.allm.admission.max_requests
    try:
        with pytest.raises(openai.BadRequestError, match="n = 2"):
            api.completions.create(prompt="abc", model="tiny", n=2)
    finally:
        server.allm.admission.max_requests = before
