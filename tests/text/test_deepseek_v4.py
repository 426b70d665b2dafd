"""The chat template that stands for the encoders of DeepSeek-V4's releases: prompts as these write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.errors import CheckpointError, RequestError
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tokenizer import Tokenizer
from tests.text.helpers import ASSISTANT, BOS, CALLS, EOS, USER, WEATHER, loaded, release, turn

D = "\uff5cDSML\uff5c"
CALLED = (
    f'\n\n<{D}tool_calls>\n<{D}invoke name="weather">\n'
    f'<{D}parameter name="city" string="true">Rome</{D}parameter>\n'
    f'<{D}parameter name="days" string="false">2</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="weather">\n<{D}parameter name="city" string="true">Bern</{D}parameter>\n'
    f"</{D}invoke>\n</{D}tool_calls>{EOS}"
)
RESULTS = "<tool_result>sun</tool_result>\n\n<tool_result>rain</tool_result>"
REMINDER = "<\uff5clatest_reminder\uff5c>"


def task(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("first")
    return loaded(release(folder, "deepseek_v4", 'REASONING_EFFORT_MAX = (\n    "..."\n)'))


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("later")
    return loaded(release(folder, "deepseek_v4", "REASONING_EFFORT_PROMPTS: Dict[str, str] = {}"))


TALK = [
    turn("system", "S"),
    turn("user", "a"),
    turn("assistant", "b", reasoning_content="t"),
    turn("user", "c"),
]
BEFORE = f"{BOS}S{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}"


def test_thinking_is_on_unless_it_is_turned_off(first: Tokenizer) -> None:
    off: dict[str, Any]
    on: dict[str, Any]
    for off in ({"thinking": False}, {"enable_thinking": False}, {"reasoning_effort": "none"}):
        assert first.apply_chat_template(TALK, **off) == BEFORE + "</think>"
    for on in ({}, {"thinking": True}, {"enable_thinking": True}, {"reasoning_effort": "high"}):
        prompt = first.apply_chat_template(TALK, **on)
        assert prompt == BEFORE + "<think>"
        assert Thoughts.opened_by(prompt)
    assert first.apply_chat_template(TALK, add_generation_prompt=False) == BEFORE.removesuffix(ASSISTANT)


def test_an_answer_that_is_gone_on_with(first: Tokenizer) -> None:
    talk = [*TALK, turn("assistant", "d", reasoning_content="u")]
    assert first.apply_chat_template(talk) == f"{BEFORE}<think>u</think>d{EOS}"
    assert first.apply_chat_template(talk, continue_final_message=True) == f"{BEFORE}<think>u</think>d"
    talk[-1]["wo_eos"] = True
    assert first.apply_chat_template(talk, thinking=False) == f"{BEFORE}</think>d"


def test_efforts_as_the_release_names_them(first: Tokenizer, later: Tokenizer) -> None:
    """The first encoders' maximum is called high by the later, which know one beyond it."""
    rest = BEFORE.removeprefix(BOS) + "<think>"

    def preamble(tokenizer: Tokenizer, effort: str) -> str:
        prompt = tokenizer.apply_chat_template(TALK, reasoning_effort=effort)
        assert prompt.startswith(BOS)
        assert prompt.endswith(rest)
        return prompt[len(BOS) : -len(rest)]

    most = preamble(first, "max")
    assert most.startswith(
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very "
    )
    assert most.endswith("to ensure absolutely no assumption is left unchecked.\n\n")
    beyond = preamble(later, "max")
    assert beyond.startswith("Reasoning Effort: Beyond maximum \u2014 exhaustive, relentless, and ")
    assert beyond.endswith("no assumption remains unchecked and no error remains undiscovered.\n\n")
    efforts = ("minimal", "low", "medium", "high", "xhigh", "max")
    assert [preamble(first, e) for e in efforts] == ["", "", "", "", most, most]
    assert [preamble(later, e) for e in efforts] == ["", "", "", most, beyond, beyond]
    assert later.apply_chat_template(TALK, reasoning_effort="max", thinking=False) == BEFORE + "</think>"


def test_calls_and_their_results(first: Tokenizer) -> None:
    """Results are a turn of the user, in the order of the calls; a question behind them belongs to it."""
    talk = [
        turn("user", "a"),
        turn("assistant", "", tool_calls=CALLS, reasoning_content="t"),
        turn("tool", "rain", tool_call_id="2"),
        turn("tool", "sun", tool_call_id="1"),
    ]
    asked = f"{BOS}{USER}a{ASSISTANT}"
    assert first.apply_chat_template(talk, thinking=False) == (
        f"{asked}</think>{CALLED}{USER}{RESULTS}{ASSISTANT}</think>"
    )
    # Without a list of tools, thoughts before the last turn of the user are left out; with one they stay.
    assert first.apply_chat_template(talk) == f"{asked}</think>{CALLED}{USER}{RESULTS}{ASSISTANT}<think>"
    kept = first.apply_chat_template([*talk, turn("user", "b")], [WEATHER])
    asked = f"{USER}a{ASSISTANT}<think>t</think>{CALLED}{USER}{RESULTS}\n\nb{ASSISTANT}<think>"
    assert kept.endswith("to invoke tool calls.\n" + asked)
    assert first.apply_chat_template(talk, drop_thinking=False).endswith(
        f"t</think>{CALLED}{USER}{RESULTS}{ASSISTANT}<think>"
    )


@pytest.mark.parametrize(
    ("arguments", "inside"),
    [
        ("{}", ""),
        (' {"a": [1, "\u00e9"]} ', f'<{D}parameter name="a" string="false">[1, "\u00e9"]</{D}parameter>'),
        ('{"a": "x', f'<{D}parameter name="arguments" string="true">{{"a": "x</{D}parameter>'),
        ("", f'<{D}parameter name="arguments" string="true"></{D}parameter>'),
    ],
)
def test_arguments_of_a_call(first: Tokenizer, arguments: str, inside: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    prompt = first.apply_chat_template([turn("user", "a"), turn("assistant", "b", tool_calls=[call])])
    assert prompt.endswith(
        f'b\n\n<{D}tool_calls>\n<{D}invoke name="f">\n{inside}\n</{D}invoke>\n</{D}tool_calls>{EOS}'
    )


def test_tools_are_listed_behind_the_system_message(first: Tokenizer) -> None:
    head, _, rest = first.apply_chat_template(TALK[:2], [WEATHER]).partition("## Tools\n\nYou have access")
    assert head == f"{BOS}S\n\n"
    assert f'<{D}tool_calls>\n<{D}invoke name="$TOOL_NAME">\n<{D}parameter name="$PARAMETER_NAME" ' in rest
    schema = json.dumps(WEATHER["function"])
    assert f"### Available Tool Schemas\n\n{schema}\n\nYou MUST strictly" in rest
    assert rest.endswith(f"to invoke tool calls.\n{USER}a{ASSISTANT}<think>")
    tools = f"## Tools\n\nYou have access{rest.partition(USER)[0]}"
    alone = first.apply_chat_template([turn("user", "a")], [WEATHER, WEATHER])
    twice = tools.replace(schema, f"{schema}\n{schema}")
    assert alone == f"{BOS}\n\n{twice}{USER}a{ASSISTANT}<think>"
    # A message of the developer, who asks like the user, may have tools and a form of the answer.
    own = [turn("developer", "a", tools=[WEATHER], response_format={"type": "json"})]
    form = (
        '## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "json"}'
    )
    assert first.apply_chat_template(own) == f"{BOS}{USER}a\n\n{tools}\n\n{form}{ASSISTANT}<think>"
    assert first.tool_format == "deepseek_v4"


def test_the_developer_is_heard_once_and_reminders_stand_where_they_are(first: Tokenizer) -> None:
    talk = [
        turn("latest_reminder", "May"),
        turn("developer", "a"),
        turn("assistant", "b", reasoning_content="t"),
        turn("user", "c"),
        turn("latest_reminder", "June"),
    ]
    assert (
        first.apply_chat_template(talk) == f"{BOS}{REMINDER}Mayb{EOS}{USER}c{ASSISTANT}<think>{REMINDER}June"
    )
    plain = first.apply_chat_template(talk, thinking=False)
    begun = f"{BOS}{REMINDER}May{USER}a{ASSISTANT}</think>b{EOS}"
    assert plain == f"{begun}{USER}c{ASSISTANT}</think>{REMINDER}June"


def test_tasks(first: Tokenizer) -> None:
    """A task's token stands behind the message, or behind the opened answer; the answer has no thought."""
    for name in ("query", "authority", "domain", "read_url"):
        assert first.apply_chat_template([turn("user", "a", task=name)]) == f"{BOS}{USER}a{task(name)}"
    act = [turn("user", "a", task="action")]
    for thinks, tag in ((True, "<think>"), (False, "</think>")):
        opened = f"{BOS}{USER}a{ASSISTANT}{tag}{task('action')}"
        assert first.apply_chat_template(act, thinking=thinks) == opened
        answered = [*act, turn("assistant", "Search", reasoning_content="t")]
        assert first.apply_chat_template(answered, thinking=thinks) == f"{opened}Search{EOS}"
    titled = [turn("user", "a"), turn("assistant", "b", task="title"), turn("assistant", "B")]
    prompt = first.apply_chat_template(titled[:2], thinking=False)
    assert prompt == f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}{task('title')}"
    assert first.apply_chat_template(titled, thinking=False) == f"{prompt}B{EOS}"


@pytest.mark.parametrize(
    ("talk", "variables", "says"),
    [
        ([turn("critic", "a")], {}, "role critic is not one of system, user, assistant, tool, developer"),
        ([turn("developer", "")], {}, "a developer's message has no text"),
        ([turn("user", "a", task="sing")], {}, "task sing is not one of action, query, authority"),
        ([turn("user", "a"), turn("user", "b", task="query")], {}, "with the task query follows another"),
        ([turn("user", "a")], {"reasoning_effort": 7}, "reasoning_effort 7 is not one of none, minimal"),
    ],
)
def test_bad_input_is_refused(first: Tokenizer, talk: list[Any], variables: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        first.apply_chat_template(talk, **variables)


def test_an_encoder_that_is_no_text_is_a_damaged_file(tmp_path: Path) -> None:
    assert loaded(release(tmp_path, "deepseek_v4")).has_chat_template  # that of the first encoder
    release(tmp_path, "deepseek_v4", "")
    (tmp_path / "encoding" / "encoding_dsv4.py").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"encoding_dsv4\.py is not readable UTF-8 text"):
        loaded(tmp_path)
