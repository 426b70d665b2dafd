"""The chat template that stands for the encoder of DeepSeek-V3.2's release."""

import json
import shutil
from pathlib import Path

import pytest

from mtp_jax.errors import RequestError
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tokenizer import Tokenizer
from tests.text.helpers import ASSISTANT, BOS, CALLS, EOS, USER, WEATHER, loaded, release, turn

DSML = "\uff5cDSML\uff5c"
CALLED = (
    f'\n\n<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Rome</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n'
    f'<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">Bern</{DSML}parameter>\n'
    f"</{DSML}invoke>\n</{DSML}function_calls>"
)
RESULTS = "\n\n<function_results>\n<result>sun</result>\n<result>rain</result>\n</function_results>\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release(tmp_path_factory.mktemp("release"), "deepseek_v32")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return loaded(folder)


def test_turns_with_and_without_thought(tokenizer: Tokenizer) -> None:
    talk = [
        turn("system", "S"),
        turn("user", "a"),
        turn("assistant", "b", reasoning_content="t"),
        turn("user", "c"),
    ]
    begun = f"{BOS}S{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}"
    assert tokenizer.apply_chat_template(talk) == begun + "</think>"
    assert tokenizer.apply_chat_template(talk, thinking=True) == begun + "<think>"
    assert tokenizer.apply_chat_template(talk, enable_thinking=True) == begun + "<think>"
    assert Thoughts.opened_by(begun + "<think>")
    answered = [*talk, turn("assistant", "d")]
    prompt = tokenizer.apply_chat_template(answered, continue_final_message=True)
    assert prompt == begun + "</think>d"


def test_calls_and_their_results(tokenizer: Tokenizer) -> None:
    """Thoughts since the last question stay, as the model is in the midst of its answer."""
    talk = [
        turn("user", "a"),
        turn("assistant", "", tool_calls=CALLS, reasoning_content="t"),
        turn("tool", "sun", tool_call_id="1"),
        turn("tool", "rain", tool_call_id="2"),
    ]
    asked = f"{BOS}{USER}a{ASSISTANT}"
    assert tokenizer.apply_chat_template(talk) == f"{asked}</think>{CALLED}{EOS}{RESULTS}</think>"
    thinking = tokenizer.apply_chat_template(talk, thinking=True)
    assert thinking == f"{asked}<think>t</think>{CALLED}{EOS}{RESULTS}<think>"
    later = tokenizer.apply_chat_template([*talk, turn("assistant", "x"), turn("user", "b")], thinking=True)
    assert later == (f"{asked}</think>{CALLED}{EOS}{RESULTS}</think>x{EOS}{USER}b{ASSISTANT}<think>")


def test_tools_are_listed_behind_the_system_message(tokenizer: Tokenizer) -> None:
    head, _, rest = tokenizer.apply_chat_template(
        [turn("system", "S"), turn("user", "a")], [WEATHER]
    ).partition("## Tools\n")
    assert head == f"{BOS}S\n\n"
    assert f'<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE' in rest
    schema = json.dumps(WEATHER["function"])
    assert rest.endswith(f"<functions>\n{schema}\n</functions>\n{USER}a{ASSISTANT}</think>")
    alone = tokenizer.apply_chat_template([turn("user", "a")], [WEATHER, WEATHER])
    assert alone == f"{BOS}\n\n## Tools\n" + rest.replace(schema, f"{schema}\n{schema}")
    assert tokenizer.tool_format == "deepseek_v32"


def test_what_no_conversation_has(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="a tool message does not follow the assistant's calls"):
        tokenizer.apply_chat_template([turn("user", "a"), turn("tool", "b")])
    with pytest.raises(RequestError, match="role critic is not one of system, user, assistant, tool"):
        tokenizer.apply_chat_template([turn("critic", "a")])


def test_a_template_of_the_checkpoint_comes_first(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "chat_template.jinja").write_text("own", encoding="utf-8")
    own = loaded(copied)
    assert own.apply_chat_template([turn("user", "a")]) == "own"
    (copied / "chat_template.jinja").unlink()
    (copied / "config.json").write_text('{"model_type": "deepseek_v3"}', encoding="utf-8")
    other = loaded(copied)
    assert not other.has_chat_template
