"""tiktoken.model gives the ids that the tiktoken library gives."""

import base64
import json
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from mtp_jax.errors import CheckpointError
from mtp_jax.text.byte_level import read, written
from mtp_jax.text.grammar import Grammars
from mtp_jax.text.tiktoken_file import CLASS, FILE, SPLIT
from mtp_jax.text.tokenizer import StreamDecoder, Tokenizer

# What the released code has, written out: SPLIT is put together from parts.
RELEASED = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TEXTS = (
    "The server's log wasn't empty; they'LL say I'm 12345 times right.\r\n\r\n  def f(x):\n\tretu"
    "rn x ** 2   \n",
    "\u6df1\u5ea6\u6c42\u7d22\u6a21\u578b\u63a8\u7406\uff0c2024\u5e74\u3002Kimi\u6708\u4e4b\u6697"
    "\u9762 mixed \u4e2d\u6587text",
    "\u3072\u3089\u304c\u306a\u3068\u30ab\u30bf\u30ab\u30ca\u3001\u6f22\u5b57\u3002 \ud55c\uad6d"
    "\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac \u03c3"
    "\u03bf\u03c5 \u039a\u03cc\u03c3\u03bc\u03b5 na\xefve \u01c5ungla \xbd \u216b",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u0661\u0662\u0663"
    "\u0664 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31"
    "\u0e2a\u0e14\u0e35",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1ea\U0001f1fa e\u0301 \xa0\u2003\u3000 x\x85y\u2028z",
)
NAMES = {0: "[BOS]", 1: "[EOS]", 4: "<|im_end|>", 5: "<|im_user|>", 9: "<|tool_call_begin|>"}  # with gaps
PLAIN = "<|tool_call_begin|>"  # which is text, not hidden
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"


def learnt() -> list[bytes]:
    """Tokens in the order in which BPE learns them from TEXTS, bytes first."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    vocab = trained.get_vocab()
    return [read(text) or b"" for text in sorted(vocab, key=lambda text: vocab[text])]


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    return learnt()


def write(folder: Path, tokens: list[bytes]) -> Path:
    """The tokenizer's files of a release."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / FILE).write_bytes(b"".join(lines))
    added = {
        str(len(tokens) + i): {"content": name, "special": name != PLAIN, "lstrip": False}
        for i, name in NAMES.items()
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": CLASS,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokens: list[bytes]) -> Path:
    return write(tmp_path_factory.mktemp("tiktoken"), tokens)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    found = Tokenizer.from_dir(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def theirs(tokens: list[bytes]) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "released",
        pat_str=RELEASED,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={name: len(tokens) + i for i, name in NAMES.items()},
    )


def test_the_expression_is_the_releases():
    assert SPLIT == RELEASED


@pytest.mark.parametrize("text", TEXTS)
def test_scripts(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, allowed_special="all")
    assert len(ids) < len(text.encode())
    assert ours.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_text(ours, theirs, data):
    """Any characters, parts of the texts above, and special tokens, in any order."""
    parts = data.draw(
        st.lists(
            st.one_of(
                st.text(max_size=12),
                st.sampled_from(list(NAMES.values())),
                st.tuples(st.sampled_from(TEXTS), st.integers(0, 60), st.integers(1, 12)).map(
                    lambda cut: cut[0][cut[1] : cut[1] + cut[2]]
                ),
            ),
            max_size=8,
        )
    )
    text = "".join(parts)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, allowed_special="all")
    assert ours.decode(ids, skip_special_tokens=False) == text
    decoder = StreamDecoder(ours, skip_special_tokens=False)
    assert "".join(decoder.push([token]) for token in ids) + decoder.flush() == text


def test_every_id_has_its_bytes(ours, theirs, tokens):
    assert [ours.token_bytes(i) for i in range(len(tokens))] == tokens
    for i, name in NAMES.items():
        token = len(tokens) + i
        assert theirs.decode_single_token_bytes(token) == ours.token_bytes(token, False) == name.encode()
        assert ours.token_bytes(token) == (name.encode() if name == PLAIN else b"")
    assert ours.token_bytes(len(tokens) + 2) == b""  # a gap
    assert ours.vocab_size == len(tokens) + max(NAMES) + 1


def test_special_tokens_and_chat(ours, tokens):
    assert (ours.bos_id, ours.eos_ids) == (len(tokens), (len(tokens) + 1,))
    prompt = ours.apply_chat_template([{"role": "user", "content": "hi"}])
    ids = ours.encode(prompt, add_special_tokens=False)
    assert (ids[0], ids[-1]) == (len(tokens) + 5, len(tokens) + 4)
    assert ours.encode("hi")[0] != ours.bos_id  # the releases' own code adds none


def test_grammars_know_it(ours):
    grammars = Grammars.of(ours, ours.vocab_size + 3, ours.eos_ids)
    assert grammars is not None
    assert grammars.encode("The server") == ours.encode("The server")


def test_tokenizer_json_comes_first(folder, tmp_path, ours):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / FILE).write_text("damaged")
    again = Tokenizer.from_dir(tmp_path)
    assert again is not None
    assert again.encode(TEXTS[0]) == ours.encode(TEXTS[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [b"*", *lines[1:]], "is damaged: "),
        (lambda lines: [b"AA== x", *lines[1:]], "is damaged: "),
        (lambda lines: [b"!A== 0", *lines[1:]], "is damaged: "),
        (lambda lines: lines[:300] + lines[301:], "line 301 has rank 301; expected 300"),
        (lambda lines: [*lines, lines[0].split()[0] + b" %d" % len(lines)], "repeats a token"),
        (lambda lines: lines[:10], "no token for byte"),
    ],
)
def test_damage_is_named(tmp_path, tokens, change, says):
    file = write(tmp_path, tokens) / FILE
    file.write_bytes(b"\n".join(change(file.read_bytes().splitlines())))
    with pytest.raises(CheckpointError, match=f"{FILE} is damaged") as error:
        Tokenizer.from_dir(tmp_path)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "tokenizer_class = None"),
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class = 'QWenTokenizer'"),
        ({"tokenizer_class": CLASS, "added_tokens_decoder": {"7": {"content": "a"}}}, "expected an id from"),
        ({"tokenizer_class": CLASS, "added_tokens_decoder": {"x": {"content": "a"}}}, "expected an id from"),
        (
            {"tokenizer_class": CLASS, "added_tokens_decoder": {"999999999": {"content": "a"}}},
            "expected an id",
        ),
        ({"tokenizer_class": CLASS, "added_tokens_decoder": {"900": "a"}}, "an object with content"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, tokens, config, says):
    write(tmp_path, tokens)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_dir(tmp_path)
    assert says in str(error.value)


def test_bytes_are_written_and_read():
    every = bytes(range(256))
    assert read(written(every)) == every
    assert written(b" a\n") == "\u0120a\u010a"
    assert read(" a") is None
