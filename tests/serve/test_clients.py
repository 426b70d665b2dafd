"""Requests as Codex and Claude Code send them by default, written down in ``clients``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mtp_jax import LLM
from mtp_jax.simulate.device import Simulated
from tests import tiny_tokenizer
from tests.serve.conftest import RATES, Running, check_idle, start

SAID = Path(__file__).parent / "clients"
# Prints everything that it is given, as the templates of large models do; results have no ids.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments }}]"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if thinking %}(think!){% endif %}"
)


@pytest.fixture(scope="module")
def agent(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A simulated model with a context that such requests fit in, and a tag that ends thoughts."""
    folder = tmp_path_factory.mktemp("agent") / "tiny"
    folder.mkdir()
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer.write(folder, 160, TEMPLATE)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 16384, "prefill_chunk": 4096}
    llm = LLM(folder, simulate=RATES, simulated_step=0.0, **sizes)
    assert isinstance(llm.engine.runner, Simulated)
    with start(llm) as running:
        yield running
        check_idle(running)


@pytest.fixture
def ask(agent: Running) -> Iterator[httpx2.Client]:
    with agent.client() as client:
        yield client


def said(name: str) -> dict[str, Any]:
    """A request, of the model that there is."""
    return json.loads((SAID / f"{name}.json").read_text()) | {"model": "tiny"}


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [
        json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line[:5] == "data:"
    ]


@pytest.fixture
def prompted(agent: Running, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every prompt that is encoded."""
    prompts: list[str] = []
    tokenizer = agent.allm.llm.tokenizer
    assert tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, *a, **k: (prompts.append(text), encode(text, *a, **k))[1]
    )
    return prompts


def test_codex(ask, prompted):
    answer = ask.post("/v1/responses", json=said("codex") | {"max_output_tokens": 40})
    *_, last = events(answer)
    assert last["type"] in ("response.completed", "response.incomplete")
    assert last["response"]["usage"]["output_tokens"] > 0
    assert last["response"]["tools"][3]["type"] == "custom"
    assert answer.headers["warning"] == '299 mtp-jax "ignored: tools.3.format, tools.4.web_search"'
    prompt = prompted[0]
    assert '"name": "apply_patch", "description": "Use the `apply_patch` tool' in prompt
    assert "begin_patch hunk+ end_patch" in prompt  # in words, where it is not enforced
    assert '"parameters": {"type": "object", "properties": {"input": {"type": "string"}}' in prompt
    described = r"All tools of mcp__docs: Tools of the server docs.\n\nSearches."
    assert f'"name": "mcp__docs__search", "description": "{described}"' in prompt
    assert "web_search" not in prompt


def test_codex_later(ask, prompted):
    *_, last = events(ask.post("/v1/responses", json=said("codex_later") | {"max_output_tokens": 8}))
    assert last["response"]["output"]
    prompt = prompted[0]
    turns = prompt[prompt.index("<assistant>") :]
    assert turns.startswith(
        "<assistant>(**Looking at the test**)I look at the test and the plan at once.[exec_command"
    )
    # The results as the calls stand, though they came the other way round.
    assert turns.index("Process exited") < turns.index("Plan updated")
    patch = next(item for item in said("codex_later")["input"] if item["type"] == "custom_tool_call")["input"]
    assert f"[apply_patch{json.dumps({'input': patch})}]" in turns
    assert "<tool>unable to read plot.png<user>Now the docs." in turns


def test_codex_with_namespaces(ask, prompted):
    """Later releases send all tools as an item of the input, again in each turn, and search for more."""
    answer = ask.post("/v1/responses", json=said("codex_namespaces_later") | {"max_output_tokens": 8})
    *_, last = events(answer)
    assert last["type"] in ("response.completed", "response.incomplete")
    assert answer.headers["warning"] == (
        '299 mtp-jax "ignored: input.0.tools.0.tools.0.format, input.0.tools.4.web_search, '
        'input.14.tools.0.tools.0.format, input.14.tools.4.web_search"'
    )
    prompt = prompted[0]
    listed = prompt[: prompt.index("<system>")]
    for name in (
        "exec",
        "collaboration__send_message",
        "mcp__docs__search",
        "tool_search",
        "mcp__mail__list",
    ):
        assert listed.count(f'"name": "{name}"') == 1
    turns = prompt[prompt.index("<assistant>") :]
    assert turns.startswith("<assistant>(**Looking for mail**)[exec")
    assert '[tool_search{"query":"mail","limit":4}]<tool>[{"name":"mcp__mail__list"' in turns
    assert '[mcp__mail__list{"folder":"in"}]<tool>no mail' in turns


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_a_text(ask, stream):
    body = said("codex_later") | {"tool_choice": {"type": "custom", "name": "apply_patch"}, "stream": stream}
    answer = ask.post(
        "/v1/responses", json=body | {"max_output_tokens": 400, "reasoning": {"effort": "none"}, "seed": 1}
    )
    if not stream:
        (item,) = answer.json()["output"]
    else:
        came = events(answer)
        (item,) = came[-1]["response"]["output"]
        deltas = [e["delta"] for e in came if e["type"] == "response.custom_tool_call_input.delta"]
        (done,) = (e for e in came if e["type"] == "response.custom_tool_call_input.done")
        assert len(deltas) > 1
        assert "".join(deltas) == done["input"] == item["input"]
        (added,) = (e["item"] for e in came if e["type"] == "response.output_item.added")
        assert (added["type"], added["name"], added["input"]) == ("custom_tool_call", "apply_patch", "")
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    assert item["input"]
    assert not item["input"].startswith("{")


@pytest.mark.parametrize("form", ["json", "kimi_k2"])
def test_a_custom_tool_in_formats_of_the_vocabulary(agent: Running, form):
    """Whatever a call is written in, its input is text."""
    choice = {"tool_choice": {"type": "custom", "name": "apply_patch"}}
    body = said("codex") | choice | {"temperature": 0, "max_output_tokens": 2000}
    variant = agent.variant(tool_parser=form)
    answer = variant.post("/v1/responses", json=body | {"stream": False})
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    *_, last = events(variant.post("/v1/responses", json=body))
    assert last["response"]["output"][0]["input"] == item["input"] != ""
    assert not item["input"].startswith('{"input"')


def test_claude_code(ask, prompted, agent):
    answer = ask.post("/v1/messages?beta=true", json=said("claude_code") | {"max_tokens": 40})
    first, *_, changed, last = events(answer)
    assert (first["type"], last["type"]) == ("message_start", "message_stop")
    counted = ask.post("/v1/messages/count_tokens?beta=true", json=said("claude_code")).json()["input_tokens"]
    assert first["message"]["usage"]["input_tokens"] == counted
    usage = changed["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    # It has nothing to bound, as the model has no tag, and its edits of the conversation are not made.
    assert answer.headers["warning"] == (
        '299 mtp-jax "ignored: context_management, max_thinking_tokens (the model has no token </think>), '
        'output_config.effort"'
    )
    assert prompted[0].endswith("Mend the test.<assistant>(think!)")
    assert "<system>You are Claude Code" in prompted[0]  # a line for Anthropic's accounts would be before it


def test_claude_code_later(ask, prompted):
    answer = ask.post("/v1/messages?beta=true", json=said("claude_code_later") | {"max_tokens": 8})
    assert events(answer)[-1]["type"] == "message_stop"
    assert "messages.1.content.1.redacted_thinking" in answer.headers["warning"]
    assert "tools.4.web_search_20250305" in answer.headers["warning"]
    prompt = prompted[0]
    assert "<assistant>(The user wants the test mended.)I read both files.[Read" in prompt
    assert "<tool>text of a<tool>text of b<user><system-reminder>" in prompt
    assert "web_search" not in prompt


def test_claude_code_begins_an_answer(ask, prompted):
    answer = ask.post("/v1/messages", json=said("claude_code_title") | {"max_tokens": 8})
    assert events(answer)[0]["type"] == "message_start"
    assert prompted[0].endswith("<user>Mend the test.<assistant>{")
