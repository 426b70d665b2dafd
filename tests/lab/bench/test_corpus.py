"""The demo corpus: its files, its split, its token stream, and the tokenizer trained on it."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench import corpus
from mtp_jax.lab.bench.corpus import SourceFile
from mtp_jax.lab.bench.vocabulary import commonest
from mtp_jax.model.draft_vocab import FILE, read

DEMO = Path(__file__).parents[3] / "configs" / "demo"


@pytest.fixture(scope="module")
def files() -> list[SourceFile]:
    return corpus.read_files()


@pytest.fixture(scope="module")
def held_out(files: list[SourceFile]) -> list[SourceFile]:
    return corpus.split(files).held_out


@pytest.fixture(scope="module")
def demo() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_files_of_the_standard_library(files: list[SourceFile]) -> None:
    paths = [file.path for file in files]
    assert paths == sorted(set(paths))
    assert {"json/__init__.py", "argparse.py"} <= set(paths)
    assert not any("site-packages" in path or "\\" in path for path in paths)
    assert len({file.text for file in files}) == len(files)


def test_split_is_disjoint_complete_and_independent_of_other_files(files: list[SourceFile]) -> None:
    parts = corpus.split(files)
    train, held = ({file.path for file in part} for part in (parts.train, parts.held_out))
    assert not train & held
    assert train | held == {file.path for file in files}
    assert 0.04 < len(held) / len(files) < 0.12
    assert corpus.split(files[::-3]).held_out == [file for file in files[::-3] if file.path in held]


def test_reading_skips_what_it_says(tmp_path: Path) -> None:
    for name, data in {
        "a.py": b"x = 1\r\n",
        "b/a.py": b"x = 1\n",  # same text as a.py
        "b/bom.py": b"\xef\xbb\xbfy = 2\n",
        "c/latin.py": b"# caf\xe9\n",
        "c/huge.py": b"#" * (corpus.MAX_BYTES + 1),
        "c/empty.py": b"\n",
        "encodings/cp1.py": b"table = 1\n",
        "site-packages/p.py": b"p = 1\n",
        "test/badsyntax_1.py": b"def\n",
        "test/tokenizedata/t.py": b"t = 1\n",
        "d.txt": b"no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert corpus.read_files(tmp_path) == [SourceFile("a.py", "x = 1\n"), SourceFile("b/bom.py", "y = 2\n")]
    with pytest.raises(ConfigError, match=r"no usable \.py file"):
        corpus.read_files(tmp_path / "c")


def test_fingerprint_sees_paths_texts_and_their_border() -> None:
    names = [("a", "bc"), ("ab", "c"), ("a", "bd")]
    assert len({corpus.fingerprint([SourceFile(*name)]) for name in names}) == 3
    assert corpus.fingerprint([SourceFile("a", "b")]) == corpus.fingerprint([SourceFile("a", "b")])


def test_stream_holds_every_document_once(demo: tokenizers.Tokenizer, held_out: list[SourceFile]) -> None:
    some = held_out[:12]
    stream = corpus.tokens(demo, some, seed=7)
    assert stream.dtype == np.uint16
    assert np.array_equal(stream, corpus.tokens(demo, some, seed=7))
    assert not np.array_equal(stream, corpus.tokens(demo, some, seed=8))
    assert np.array_equal(np.flatnonzero(stream == 0)[1:] - 1, np.flatnonzero(stream == 1)[:-1])
    documents = demo.decode(stream.tolist(), skip_special_tokens=False).split(corpus.BOS)[1:]
    assert sorted(documents) == sorted(file.text + corpus.EOS for file in some)


def test_held_out_prompts(demo: tokenizers.Tokenizer, held_out: list[SourceFile]) -> None:
    prompts = corpus.held_out_prompts(demo, held_out, n=64, length=64)
    assert {len(prompt) for prompt in prompts} == {64}
    assert len(set(map(tuple, prompts))) == 64
    assert all(prompt[0] == 0 and prompt.count(0) == 1 for prompt in prompts)
    assert prompts == corpus.held_out_prompts(demo, held_out, n=64, length=64)
    whole = "".join("\n" + file.text for file in held_out)
    for prompt in prompts:
        lines = demo.decode(prompt).splitlines()
        assert "\n" + "\n".join(lines[:-1]) in whole
    with pytest.raises(ConfigError, match="fewer or shorter"):
        corpus.held_out_prompts(demo, held_out[:1], n=10_000, length=64)
    with pytest.raises(ConfigError, match="at least 2"):
        corpus.held_out_prompts(demo, held_out, n=1, length=1)


def test_demo_tokenizer_compresses_source(demo: tokenizers.Tokenizer, held_out: list[SourceFile]) -> None:
    text = "".join(file.text for file in held_out[:40])
    assert len(text) / len(demo.encode(text).ids) > 3.2


def test_a_tokenizer_that_cuts_or_pads_texts_takes_them_whole(
    tmp_path: Path, demo: tokenizers.Tokenizer, held_out: list[SourceFile]
) -> None:
    limited = tokenizers.Tokenizer.from_str(demo.to_str())
    limited.enable_truncation(8)
    limited.enable_padding(length=10_000)
    limited.save(str(tmp_path / "tokenizer.json"))
    read = corpus.read_tokenizer(tmp_path / "tokenizer.json")
    some = held_out[:3]
    assert np.array_equal(corpus.tokens(read, some, seed=1), corpus.tokens(demo, some, seed=1))


def test_the_commonest_tokens_are_listed_with_the_ends_of_texts() -> None:
    counts = np.array([0, 5, 7, 5, 1, 0])
    assert commonest(counts, 3, [1]) == (2, 1, 3)
    assert commonest(counts, 9, []) == (2, 1, 3, 4)
    assert commonest(counts, 3, [4]) == (2, 1, 4)
    assert commonest(counts, 3, [5, 9]) == (2, 1, 5)
    with pytest.raises(ConfigError, match="1 tokens to choose among"):
        commonest(counts, 1, [])


def test_the_demo_model_has_a_list_of_its_tokens(demo: tokenizers.Tokenizer) -> None:
    ids = read(DEMO / FILE, demo.get_vocab_size())
    assert len(ids) == 4096
    assert demo.token_to_id(corpus.EOS) in ids
    assert {demo.decode([i]) for i in ids} >= {"(", ")", ":", "self", " return"}


def test_stream_needs_the_special_tokens() -> None:
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(ConfigError, match="lacks the special token"):
        corpus.tokens(bare, [], seed=0)
