"""Variables of chat templates: all that a template reads reaches it, by each name that clients know."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from serve.answers.asking import ChatPrompt
from serve.base.settings import Settings
from serve.bodies.schema import ChatBody
from tests import tiny_tokenizer
from tests.serve.conftest import Running, Variant, simulated, start, weightless
from tests.text.helpers import loaded, release

# As GLM's and Kimi's templates: thoughts of earlier turns stay where they are wanted.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and ((clear_thinking is defined and not "
    "clear_thinking) or preserve_thinking or loop.last) %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content or '' }}{% endfor %}{% for x in extra %}[{{ x.a }}]{% endfor %}<assistant>"
    "{% set effort = reasoning_effort | default('') %}{{ effort }}"
)
MESSAGES = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1", "reasoning_content": "T1"},
    {"role": "user", "content": "q2"},
]
CLEARED, KEPT = "<user>q1<assistant>a1<user>q2<assistant>", "<user>q1<assistant>(T1)a1<user>q2<assistant>"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = weightless(tmp_path_factory.mktemp("variables"))
    with start(simulated(tiny_tokenizer.write(folder, 160, TEMPLATE)), spec_metrics="none") as found:
        yield found


def rendered(app: httpx2.Client | Variant, **fields: Any) -> tuple[str, str]:
    """The prompt of a conversation, and the warning."""
    answer = app.post("/tokenize", json={"messages": MESSAGES, **fields})
    assert answer.status_code == 200, answer.text
    text = app.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    return text, answer.headers.get("warning", "")


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, CLEARED),
        ({"chat_template_kwargs": {"clear_thinking": False}}, KEPT),
        ({"chat_template_kwargs": {"preserve_thinking": True}}, KEPT),
        ({"thinking": {"type": "enabled", "clear_thinking": True}}, CLEARED),
        ({"clear_thinking": False}, KEPT),
        ({"preserve_thinking": True}, KEPT),
        ({"preserve_thinking": True, "chat_template_kwargs": {"preserve_thinking": False}}, KEPT),
        ({"clear_thinking": None, "chat_template_kwargs": {"preserve_thinking": None}}, CLEARED),
        ({"reasoning_effort": "high"}, CLEARED + "high"),
        ({"think": "low"}, CLEARED + "low"),
        (
            {"chat_template_kwargs": {"extra": [{"a": 1}, {"a": [2]}]}},
            "<user>q1<assistant>a1<user>q2[1][[2]]<assistant>",
        ),
    ],
)
def test_each_name_reaches_the_template(running, fields, prompt):
    with running.client() as client:
        found, warning = rendered(client, **fields)
        assert found == prompt
        assert ("thinking" in warning) == (fields.get("thinking") is not None)  # it switches nothing here


@pytest.mark.parametrize(
    ("thinking", "kept"),
    [({"clear_thinking": False}, True), ({"keep": "all"}, True), ({"keep": None}, False)],
)
def test_fields_of_providers_keep_thoughts(running, thinking, kept):
    with running.client() as client:
        found, warning = rendered(client, thinking={"type": "enabled", **thinking})
        assert found == (KEPT if kept else CLEARED)
        assert warning == '299 mtp-jax "ignored: thinking"'  # of the switch, which the template has not


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"mood": "glad", "preserve_thinking": True}}, "chat_template_kwargs.mood"),
        ({"chat_template_kwargs": {'a"\r\nb': 1}}, "chat_template_kwargs.a???b"),
        ({"think": True}, "think"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({"chat_template_kwargs": {f"n{i}": i for i in range(50)}}, "chat_template_kwargs.n9"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_named(running, fields, named):
    with running.client() as client:
        assert named in rendered(client, **fields)[1]
        short = {"messages": MESSAGES, "max_tokens": 1}
        assert named in client.post(CHAT, json={**short, **fields}).headers["warning"]
        body = {"input": "q", "max_output_tokens": 1, **fields}
        assert named in client.post("/v1/responses", json=body).headers["warning"]
        streamed = client.post(CHAT, json={**short, "stream": True, **fields})
        assert named in streamed.headers["warning"]


def test_a_strict_server_refuses_unread_variables_alone(running):
    strict = running.variant(strict=True)
    body = {"messages": MESSAGES, "chat_template_kwargs": {"mood": 1}}
    for path in (CHAT, "/tokenize"):
        answer = strict.post(path, json=body)
        assert answer.status_code == 400
        says = answer.json()["error"]["message"]
        assert "chat_template_kwargs.mood" in says
        assert "clear_thinking, extra, preserve_thinking, reasoning_effort" in says
    assert rendered(strict, chat_template_kwargs={"preserve_thinking": True}) == (KEPT, "")
    assert rendered(strict, thinking={"type": "enabled"})[0] == CLEARED  # agents send it to every model


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"messages": []}, "messages: the server sets this variable"),
        ({"tools": None}, "tools: the server sets this variable"),
        ({"add_generation_prompt": False}, "add_generation_prompt: the server sets"),
        ({"strftime_now": 1}, "strftime_now: the server sets"),
        ({"x": [0] * 1_000_000}, "at most 4096 values"),
        ({"x": [[[]] * 100] * 100}, "at most 4096 values"),
        ({f"v{i}": 0 for i in range(5000)}, "at most 4096 values"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ([], "chat_template_kwargs"),
    ],
)
def test_variables_have_bounds(running, value, says):
    with running.client() as client:
        for body in ({"messages": MESSAGES}, {"messages": MESSAGES, "max_tokens": 1}):
            path = CHAT if "max_tokens" in body else "/tokenize"
            answer = client.post(path, json={**body, "chat_template_kwargs": value})
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]


def test_a_request_goes_before_the_operator(running):
    app = running.variant(chat_template_kwargs={"preserve_thinking": True, "reasoning_effort": "low"})
    assert rendered(app)[0] == KEPT + "low"
    assert rendered(app, preserve_thinking=False, reasoning_effort="high") == (CLEARED + "high", "")
    body = {"messages": [{"role": "user", "content": "q"}]}
    count = app.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert count == len("<user>q<assistant>low")


def test_variables_reach_our_own_template_of_deepseek_v4(tmp_path: Path):
    """The variable ``drop_thinking``, and fields of other providers that mean it."""
    tokenizer = loaded(release(tmp_path, "deepseek_v4"))
    server: Any = SimpleNamespace(tokenizer=tokenizer, tool_format="deepseek_v4", settings=Settings("tiny"))
    for fields, kept in (
        ({}, False),
        ({"chat_template_kwargs": {"drop_thinking": False}}, True),
        ({"thinking": {"type": "enabled", "keep": "all"}}, True),
        ({"clear_thinking": True}, False),
    ):
        prompt = ChatPrompt(server, ChatBody.model_validate({"messages": MESSAGES, **fields}))
        assert ("T1" in tokenizer.decode(prompt(), skip_special_tokens=False)) == kept
        assert prompt.unread == []
