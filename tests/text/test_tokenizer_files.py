"""Files beside tokenizer.json: tokens that they add, chat templates of other names and in other files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from mtp_jax.api.demo import demo_model
from mtp_jax.errors import CheckpointError
from mtp_jax.text.tokenizer import Tokenizer
from tests.text.helpers import demo, loaded

SIZE = demo().vocab_size
NEW = "<|new|>"


def folder_with(tmp_path: Path, *, ids: Any = None, **config: Any) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model() / name, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if ids is not None:
        (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
    return tmp_path


def entry(content: str, **more: Any) -> dict[str, Any]:
    return {"content": content, "special": True, **more}


@pytest.mark.parametrize(
    ("given", "token"),
    [
        ({"added_tokens_decoder": {str(SIZE): entry(NEW)}}, SIZE),
        ({"added_tokens_decoder": {str(SIZE + 5): entry(NEW)}}, SIZE + 5),  # as beside padded rows
        ({"additional_special_tokens": [NEW]}, SIZE),
        ({"additional_special_tokens": [entry(NEW)]}, SIZE),
        ({"extra_special_tokens": [NEW]}, SIZE),
        ({"extra_special_tokens": {"new_token": NEW}}, SIZE),
        ({"ids": {NEW: SIZE + 1}}, SIZE + 1),
        ({"added_tokens_decoder": {str(SIZE): entry("<a>")}, "extra_special_tokens": [NEW, "<b>"]}, SIZE + 1),
        (
            {
                "added_tokens_decoder": {str(SIZE): entry(NEW)},
                "ids": {NEW: SIZE},
                "extra_special_tokens": [NEW],
            },
            SIZE,
        ),
    ],
)
def test_tokens_of_other_files_are_tokens(tmp_path, given, token):
    tokenizer = loaded(folder_with(tmp_path, **given))
    plain = demo().encode("a b", add_special_tokens=False)
    assert tokenizer.encode(f"a b{NEW}a b", add_special_tokens=False) == [*plain, token, *plain]
    assert tokenizer.decode([token], skip_special_tokens=False) == NEW
    hidden = "" if "ids" not in given or "extra_special_tokens" in given else NEW  # nothing calls it special
    assert tokenizer.decode([token]) == hidden
    assert tokenizer.vocab_size > token
    assert tokenizer.added_id(NEW) == token


def test_tokens_that_are_there_change_nothing(tmp_path):
    known = demo().backend.get_added_tokens_decoder()
    decoder = {str(i): entry(token.content) for i, token in known.items()}
    ids = {token.content: i for i, token in known.items()}
    names = [token.content for token in known.values()]
    tokenizer = loaded(
        folder_with(tmp_path, ids=ids, added_tokens_decoder=decoder, extra_special_tokens=names)
    )
    assert tokenizer.backend.to_str() == demo().backend.to_str()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"added_tokens_decoder": {"5": entry(NEW)}}, f"'{NEW}' has the id 5, which is '"),
        ({"ids": {NEW: 5}}, f"'{NEW}' has the id 5, which is '"),
        ({"added_tokens_decoder": {str(SIZE): entry("a")}}, f"'a' has the id {SIZE}, in the tokenizer's own"),
        (
            {"added_tokens_decoder": {str(SIZE): entry(NEW)}, "ids": {NEW: SIZE + 1}},
            f"'{NEW}' has the ids {SIZE} and {SIZE + 1}",
        ),
        ({"added_tokens_decoder": {"999999999": entry(NEW)}}, "has the id 999999999; expected ids below"),
        ({"added_tokens_decoder": {"x": entry(NEW)}}, "added_tokens_decoder.x is"),
        ({"added_tokens_decoder": {"7": "a"}}, "expected an id, and an object with content"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is"),
        ({"ids": {NEW: "7"}}, "added_tokens.json: '<|new|>' has the id '7'"),
        ({"ids": {NEW: -1}}, "has the id -1; expected an integer from 0 to"),
        ({"ids": {NEW: 2**40}}, "expected an integer from 0 to 999999999"),
        ({"extra_special_tokens": 7}, "extra_special_tokens is 7"),
        ({"extra_special_tokens": [7]}, "expected tokens: strings"),
    ],
)
def test_files_that_disagree_are_refused(tmp_path, given, says):
    with pytest.raises(CheckpointError) as refused:
        Tokenizer.from_dir(folder_with(tmp_path, **given))
    assert says in str(refused.value)


def test_another_kind_of_tokenizer_is_refused_with_tokens_beside_it(tmp_path):
    folder = folder_with(tmp_path, extra_special_tokens=[NEW])
    tokenizers.Tokenizer(models.Unigram([("a", 0.0)])).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="a model of the type Unigram; only byte-level BPE"):
        Tokenizer.from_dir(folder)


def test_merges_that_no_token_is_made_of_are_a_damage(tmp_path):
    """The library panics for one that would be longer than all tokens."""
    folder = folder_with(tmp_path)
    file = folder / "tokenizer.json"
    value = json.loads(file.read_text())
    longest = max(value["model"]["vocab"], key=len)
    value["model"]["merges"].append([longest, longest])
    file.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"tokenizer.json is damaged: range end .*; copy it again"):
        Tokenizer.from_dir(folder)


def test_further_templates_are_found_by_name(tmp_path):
    folder = folder_with(tmp_path)
    (folder / "chat_template.jinja").write_text("plain")
    further = folder / "additional_chat_templates"
    further.mkdir()
    (further / "tool_use.jinja").write_text("tools: {{ tools | length }} {{ mood }}")
    (further / "rag.jinja").write_text("rag")
    tokenizer = loaded(folder)
    turns = [{"role": "user", "content": "q"}]
    assert tokenizer.apply_chat_template(turns) == "plain"
    assert tokenizer.apply_chat_template(turns, tools=[{"function": {"name": "f"}}], mood="m") == "tools: 1 m"
    assert tokenizer.chat_template == "plain"
    assert (tokenizer.template_variables(True), tokenizer.template_variables(False)) == (
        {"mood"},
        frozenset(),
    )
    (folder / "chat_template.jinja").unlink()  # then tokenizer_config.json has the default
    assert "plain" not in loaded(folder).apply_chat_template(turns)
    assert loaded(folder).apply_chat_template(turns, tools=[{"function": {"name": "f"}}]) == "tools: 1 "
    own = tmp_path / "own.jinja"
    own.write_text("own")
    chosen = Tokenizer.from_dir(folder, own)
    assert chosen is not None
    assert chosen.apply_chat_template(turns, tools=[{"function": {"name": "f"}}]) == "own"


def test_the_template_of_an_older_processor(tmp_path):
    folder = folder_with(tmp_path, chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert loaded(folder).apply_chat_template([]) == "older"
    (folder / "chat_template.jinja").write_text("newer")
    assert loaded(folder).apply_chat_template([]) == "newer"
