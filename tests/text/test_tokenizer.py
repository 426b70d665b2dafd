"""The tokenizer, its streaming decoder, stop strings and chat templates."""

import functools
import json
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mtp_jax.errors import CheckpointError, PromptTooLong, RequestError
from mtp_jax.text.chat_template import ChatTemplate
from mtp_jax.text.tokenizer import StreamDecoder, Tokenizer
from tests.text.helpers import ASSISTANT, BOS, EOS, USER

DEMO = Path(__file__).parents[2] / "configs" / "demo"
WORDS = "\u4f60\u597d \U0001f469\u200d\U0001f469\u200d\U0001f467 na\u00efve \u00bd\n        return x <think>"

# Written after the shape of the released templates: loops, namespaces, filters on history, tool calls.
V3_LIKE = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(system='', first=true) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = ns.system + message['content'] %}
    {%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if message['role'] == 'user' %}
        {{- '<USER>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['tool_calls'] is defined %}
            {{- '<CALL>' + message['tool_calls'][0]['function'] | tojson + eos_token }}
        {%- else %}
            {% generation %}{{- '<BOT>' + message['content'] + eos_token }}{% endgeneration %}
        {%- endif %}
    {%- else %}
        {{- raise_exception('unknown role ' + message['role']) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<BOT>' }}{% endif %}"""

R1_LIKE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<USER>' + m.content }}{% else %}"
    "{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<BOT>' + content + eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<BOT>' }}"
    "{% if thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)


@functools.cache
def demo() -> Tokenizer:
    loaded = Tokenizer.from_dir(DEMO)
    assert loaded is not None
    return loaded


@pytest.fixture
def tokenizer() -> Tokenizer:
    return demo()


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo tokenizer with two added tokens that are not special: `<think>`, and a letter.

    DeepSeek-V2 has such letters: their ids are those of bytes that no UTF-8 text contains.
    """
    folder = tmp_path_factory.mktemp("thinker")
    data = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    data["added_tokens"] += [
        {"id": 8192, "content": "<think>", **plain},
        {"id": data["model"]["vocab"]["\u00fc"], "content": "\u00fc", **plain},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    loaded = Tokenizer.from_dir(folder)
    assert loaded is not None
    return loaded


def with_template(tokenizer: Tokenizer, template: object) -> Tokenizer:
    config = {"bos_token": {"content": BOS}, "eos_token": EOS, "chat_template": template}
    return Tokenizer(tokenizer.backend, config, {})


def stream(tokenizer: Tokenizer, chunks: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special_tokens)
    return [*(decoder.push(chunk) for chunk in chunks), decoder.flush()]


def test_others_run_while_a_long_text_is_encoded() -> None:
    """A server streams meanwhile."""
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    tokenizer, thread = demo(), threading.Thread(target=tick)
    thread.start()
    before = ticks
    tokenizer.encode("def f(x): return x\n" * 40_000)
    found = ticks - before
    done.set()
    thread.join()
    assert found > 10


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)
    assert tokenizer.vocab_size == 8192


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    ids = demo().encode(text, add_special_tokens=False)
    assert demo().decode(ids, skip_special_tokens=False) == text
    added = demo().backend.get_added_tokens_decoder().values()
    assume(not any(token.content in text for token in added if token.special))  # they are hidden
    assert demo().decode(demo().encode(text)) == text


def test_source_round_trips_and_indentation_is_one_token(tokenizer: Tokenizer) -> None:
    source = Path(json.__file__).read_text(encoding="utf-8")
    assert tokenizer.decode(tokenizer.encode(source)) == source
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("def f(x):\n        return 12", False)]
    assert "\n        " in pieces
    assert pieces[-2:] == ["1", "2"]


def test_bos_is_added_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("x")[0] == 0
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[1:]
    assert tokenizer.encode(BOS + "x") == tokenizer.encode("x")


def test_bos_is_added_without_a_post_processor(tmp_path: Path) -> None:
    # The releases leave bos to `add_bos_token`: their tokenizer.json alone adds none.
    data = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    data["post_processor"] = None
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    loaded = Tokenizer.from_dir(tmp_path)
    assert loaded is not None
    ids = loaded.encode("a b c d e f")
    assert ids[0] == 0
    assert loaded.decode(ids) == "a b c d e f"
    assert loaded.encode(BOS + "a")[:2] == [0, *loaded.encode("a", False)]


def test_eos_ids_join_both_files(tokenizer: Tokenizer) -> None:
    both = Tokenizer(tokenizer.backend, {"eos_token": EOS}, {"eos_token_id": [3, 1], "bos_token_id": 0})
    assert both.eos_ids == (1, 3)
    assert both.bos_id == 0


@pytest.mark.parametrize("text", ["\ud800", None, 3, ["a"]])
def test_not_text_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        tokenizer.encode(text)


def test_decode_agrees_with_the_library_and_skips_unknown_ids(
    tokenizer: Tokenizer, thinker: Tokenizer
) -> None:
    every = list(range(tokenizer.vocab_size))
    for skip in (True, False):
        assert tokenizer.decode(every, skip) == tokenizer.backend.decode(every, skip_special_tokens=skip)
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([-1, *ids, 8192, 129279, 2**40]) == "ab"
    assert thinker.vocab_size == 8193
    assert thinker.decode(thinker.encode("f\u00fcr <think> 1", False)) == "f\u00fcr <think> 1"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_stream_equals_full_decode(thinker: Tokenizer, size: int) -> None:
    ids = [0, *thinker.encode(WORDS, False), 9999, 1]
    chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
    pieces = stream(thinker, chunks)
    assert "".join(pieces) == thinker.decode(ids) == WORDS
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(stream(thinker, chunks, False)) == BOS + WORDS + EOS


def test_characters_appear_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f600", False)
    assert len(ids) > 1
    assert stream(tokenizer, [[i] for i in ids]) == [*[""] * (len(ids) - 1), "\U0001f600", ""]
    assert stream(tokenizer, [ids[:-1]]) == ["", "\ufffd"]


@given(st.lists(st.lists(st.integers(-3, 4200), max_size=4), max_size=30))
@settings(max_examples=60, deadline=None)
def test_stream_of_arbitrary_ids(chunks: list[list[int]]) -> None:
    assert "".join(stream(demo(), chunks)) == demo().decode(i for chunk in chunks for i in chunk)


def test_decoder_recovers_after_invalid_bytes(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("\u4f60", False)[:1]
    ids = [*half, *half, *tokenizer.encode("ok", False)]
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.push([i]) for i in ids) == "\ufffd\ufffdok" == tokenizer.decode(ids)
    assert decoder.push(half) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(tokenizer.encode("new", False)) == "new"


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    assert Tokenizer.from_dir(tmp_path) is None
    file = tmp_path / "tokenizer.json"
    whole = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
    sentencepiece = json.dumps({**json.loads(whole), "decoder": {"type": "Fuse"}})
    for text, message in [
        (whole[:5000], "damaged"),
        ("version https://git-lfs.github.com/spec/v1", "damaged"),
        (sentencepiece, "only ByteLevel"),
    ]:
        file.write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.from_dir(tmp_path)
    file.write_text(whole, encoding="utf-8")
    config = tmp_path / "tokenizer_config.json"
    for text, message in [
        ("{", "damaged"),
        ("[]", "JSON object"),
        ('{"chat_template": [1]}', "list of objects"),
    ]:
        config.write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.from_dir(tmp_path)
    config.unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="UTF-8"):
        Tokenizer.from_dir(tmp_path)


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "<think>hm</think>Hello"},
    {"role": "user", "content": "2+2?"},
]


def test_demo_template(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.apply_chat_template(HISTORY)
    assert prompt == (
        f"{BOS}Be brief.{USER}Hi <b>{ASSISTANT}<think>hm</think>Hello{EOS}{USER}2+2?{ASSISTANT}"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert [i for i in ids if i < 4] == [0, 2, 3, 1, 2, 3]
    assert not tokenizer.apply_chat_template(HISTORY, add_generation_prompt=False).endswith(ASSISTANT)
    with pytest.raises(RequestError, match="role critic is not one of"):
        tokenizer.apply_chat_template([{"role": "critic", "content": ""}])


def test_v3_like_template(tokenizer: Tokenizer) -> None:
    v3 = with_template(tokenizer, V3_LIKE)
    assert v3.apply_chat_template(HISTORY) == (
        f"{BOS}Be brief.<USER>Hi <b><BOT><think>hm</think>Hello{EOS}<USER>2+2?<BOT>"
    )
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f<\u00e9>", "arguments": "{}"}}]}
    assert v3.apply_chat_template([call], add_generation_prompt=False) == (
        f'{BOS}<CALL>{{"name": "f<\u00e9>", "arguments": {{}}}}{EOS}'
    )


def test_r1_like_template(tokenizer: Tokenizer) -> None:
    r1 = with_template(tokenizer, R1_LIKE)
    expected = f"{BOS}<USER>Hi <b><BOT>Hello{EOS}<USER>2+2?<BOT>"
    assert r1.apply_chat_template(HISTORY[1:]) == expected
    assert r1.apply_chat_template(HISTORY[1:], thinking=True) == expected + "<think>\n"
    with pytest.raises(RequestError, match="are set here"):
        r1.apply_chat_template(HISTORY, bos_token="x")


def test_named_templates_and_the_jinja_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    assert with_template(tokenizer, named).apply_chat_template([]) == "plain"
    assert with_template(tokenizer, named).apply_chat_template([], tools=[{"a": 1}]) == "1"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "from the file {{ strftime_now('%Y')[:2] }}", encoding="utf-8"
    )
    loaded = Tokenizer.from_dir(tmp_path)
    assert loaded is not None
    assert loaded.apply_chat_template([]) == "from the file 20"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ([{"name": "rag", "template": "x"}], "found: rag"),
        ("{% if %}", "broken at line 1"),
        ("x" * 1_000_001, "1000001 characters"),
        ("{{ messages[0].a.b.c }}", "refused"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ raise_exception.__globals__ }}{{ cycler.__init__.__globals__.os.system('true') }}", "refused"),
        ("{{ '%s' | attr('format') }}{{ ('{0.__class__}' | attr('format'))(1).x.y }}", "refused"),
        ("{% include '/etc/passwd' %}", "failed|refused"),
    ],
)
def test_bad_templates_are_one_line_errors(tokenizer: Tokenizer, template: object, message: str) -> None:
    broken = with_template(tokenizer, template)
    with pytest.raises(RequestError, match=message) as error:
        broken.apply_chat_template([{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)
    assert broken.has_chat_template == (template is not None)


def test_arithmetic_and_loops_within_the_limits() -> None:
    template = """{{ 3 * 4 }} {{ 2 ** 10 }} {{ 1.5 * -2 }} {{ 'ab' * 2 }}{{ 'ab' * -1 }}
        {%- for a in [1, 2, 3] if a > 1 %} {{ loop.index }}{{ a }}{% else %}none{% endfor %}
        {%- for a in [] %}{{ a }}{% else %} none{% endfor %}
        {%- for a in [[1], 2] recursive %} {{ loop(a) if a is iterable else a }}{% endfor %}"""
    assert ChatTemplate(template).render({}) == "12 1024 -3.0 abab 12 23 none  1 2"


@settings(max_examples=50)
@given(text=st.text(max_size=200), longest=st.integers(0, 100))
def test_a_text_is_refused_unread_only_if_it_is_too_long(text, longest):
    tokenizer = demo()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer._least_tokens(text) <= len(ids)
    try:
        assert tokenizer.encode(text, add_special_tokens=False, most=longest) == ids
    except PromptTooLong:
        assert len(ids) > longest


def test_a_text_of_more_bytes_than_its_most_tokens_have_is_not_encoded(monkeypatch):
    tokenizer = demo()
    longest = max(map(len, tokenizer._bytes))
    monkeypatch.setattr(tokenizer, "backend", None)
    says = f"at least 100 tokens > 99 maximum.*shorten the prompt, which has {100 * longest} characters"
    with pytest.raises(PromptTooLong, match=says):
        tokenizer.encode("a" * (100 * longest), most=99)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
        {"added_tokens": {"rstrip": True}},
        {"vocab": "a"},
    ],
    ids=str,
)
def test_where_text_may_vanish_no_length_is_too_long(tmp_path, change):
    told = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    told["normalizer"] = change.get("normalizer")
    told["added_tokens"][0] |= change.get("added_tokens", {})
    if lost := change.get("vocab"):
        told["model"]["vocab"]["aa" * 99] = told["model"]["vocab"].pop(lost)
        told["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer is not None
    assert tokenizer._least_tokens("a" * 10**6) == 0
