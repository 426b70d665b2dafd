"""A tokenizer of a GGUF file gives the ids that its release's own tokenizer.json gives."""

import json
from typing import Any

import pytest
import tokenizers

from mtp_jax.errors import CheckpointError
from mtp_jax.json_object import JsonObject
from mtp_jax.text.gguf_tokens import GgufTokens
from tests.checkpoint.gguf_files import CONTROL, MARKS, TEMPLATE, TEXTS, UNUSED, WHOLE, tokenizer_facts

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
# What tokenizer.json of GPT-2, SmolLM2 and Llama 3 have, written out.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
RELEASED: dict[str, list[JsonObject]] = {
    "gpt-2": [_BYTES | {"use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES | {"use_regex": True}],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA_3}, "behavior": "Isolated", "invert": False},
        _BYTES | {"use_regex": False},
    ],
}
VOCABULARY = 372


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return tokenizer_facts("gpt-2", VOCABULARY, *TEXTS)


def released(way: str, facts: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a release with these tokens."""
    tokens = facts["tokenizer.ggml.tokens"]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": facts["tokenizer.ggml.merges"],
        "ignore_merges": way == "llama-bpe",
    }
    marks = [
        {"id": tokens.index(mark), "content": mark, "special": kind == CONTROL, **added}
        for mark, kind in MARKS.items()
        if kind != UNUSED
    ]
    whole = {
        "version": "1.0",
        "added_tokens": marks,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": RELEASED[way]},
        "decoder": _BYTES | {"use_regex": True},
        "model": model,
    }
    return tokenizers.Tokenizer.from_str(json.dumps(whole))


@pytest.mark.parametrize("way", RELEASED)
def test_ids_are_those_of_the_release(way, facts):
    found, wanted = GgufTokens(facts | {"tokenizer.ggml.pre": way}), released(way, facts)
    for text in TEXTS:
        ids = found.backend.encode(text).ids
        assert ids == wanted.encode(text).ids
        assert found.backend.decode(ids) == wanted.decode(ids)
    whole = facts["tokenizer.ggml.tokens"].index(WHOLE)
    assert (whole in found.backend.encode(TEXTS[0]).ids) is (way == "llama-bpe")
    others = {other: released(other, facts).encode(TEXTS[0]).ids for other in RELEASED}
    assert [other for other, ids in others.items() if ids == others[way]] == [way], (
        "the text tells ways apart"
    )


def test_marks_and_the_template_are_the_file_s(facts):
    found = GgufTokens(facts | {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0})
    assert (found.bos, found.ends) == (1, (0, 1))
    assert found.config == {
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    assert GgufTokens(facts | {"tokenizer.ggml.pre": "llama-bpe"}).config["add_bos_token"] is True
    bare = {k: v for k, v in facts.items() if not k.endswith(("_token_id", "chat_template"))}
    found = GgufTokens(bare | {"tokenizer.ggml.add_bos_token": True})
    assert (found.bos, found.ends, found.config["add_bos_token"]) == (None, (), True)
    assert found.config["chat_template"] is None


def test_a_merge_that_is_longer_than_all_tokens_is_a_damage(facts):
    """The library panics."""
    longest = max(facts["tokenizer.ggml.tokens"], key=lambda token: len(token.encode()))
    with pytest.raises(CheckpointError, match="merges do not fit the tokens: range end"):
        GgufTokens(facts | {"tokenizer.ggml.merges": [f"{longest} {longest}"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model = 'llama' is not supported; expected gpt2"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre = 'qwen2' is not supported; expected gpt-2 or smollm or"),
        ({"pre": None}, "tokenizer.ggml.pre = None is not supported"),
        ({"add_eos_token": True}, "add_eos_token = True is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens = None; expected a list of str"),
        ({"tokens": ["a", 1]}, r"tokenizer.ggml.tokens = ['a', 1]; expected a list of str"),
        ({"merges": 7}, "tokenizer.ggml.merges = 7; expected a list of str"),
        ({"merges": ["a nothing"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ({"token_type": [1, 1]}, f"token_type has 2 entries; expected one for each of {VOCABULARY}"),
        (
            {"token_type": [6, *[1] * (VOCABULARY - 1)]},
            "token_type of '<|end|>' is 6; expected one of (1, 3,",
        ),
        ({"tokens": ["a"] * VOCABULARY}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"bos_token_id": VOCABULARY}, f"bos_token_id = {VOCABULARY}; expected an id below {VOCABULARY}"),
        ({"eot_token_id": -1}, "tokenizer.ggml.eot_token_id = -1; expected an id"),
    ],
)
def test_other_tokenizers_are_refused_by_name(facts, changes, message):
    with pytest.raises(CheckpointError) as caught:
        GgufTokens(facts | {f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    assert message in str(caught.value)
