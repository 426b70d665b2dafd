"""Structural tags and grammars of other servers: texts that they take, and the line that refuses a wrong one.

Tags with a finite language are among the languages of test_grammar.
"""

import json
import time
from contextlib import suppress
from typing import Any

import pytest

from mtp_jax.errors import RequestError
from mtp_jax.text.dialects import is_lark, token_ids
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS = [
    {"begin": "<f=a>", "content": NUMBER, "end": "</f>"},
    {"begin": "<f=b>", "content": {"type": "any_text"}, "end": "</f>"},
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
OLDER = {
    "triggers": ["<f="],
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
}
# A tag of the vocabulary, of which the trigger is a part.
CALLED = {
    "type": "triggered_tags",
    "triggers": ["<call"],
    "tags": [{"begin": "<call>x", "content": NUMBER, "end": "\n</call>"}],
}
MANY = {"type": "or", "elements": [{"type": "const_string", "value": "x"}] * 99}
SPELT = {"<call>": 104, "</call>": 105}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), 104)
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    for text, token in SPELT.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        found["added_tokens"].append({"id": token, "content": text, **flags})
    path.write_text(json.dumps(found))
    made = Tokenizer.from_dir(folder)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 112, [1])


def takes(grammars: Grammars, tokenizer: Tokenizer, wanted: StructuredOutput, text: str) -> bool:
    """Whether a text is a whole output."""
    inner = grammars.matcher(wanted, [1]).inner.deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return inner.try_consume_tokens(ids) == len(ids) and inner.is_accepting()


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (
            {"format": TRIGGERED},
            ["", "no tag", "a<f=a>12</f>b<f=b>any\n<f</f>c", "a < b"],
            ["<f=a>x</f>", "<f=c>1</f>", "<f=a>1", "<f=b>x"],
        ),
        (
            {"format": {**TRIGGERED, "at_least_one": True}},
            ["<f=a>1</f>", "<f=a>1</f> and <f=a>2</f>"],
            ["", "a<f=a>1</f>"],
        ),
        (
            {"format": {**TRIGGERED, "stop_after_first": True}},
            ["", "a", "a<f=a>1</f>"],
            ["a<f=a>1</f>b", "<f=a>1</f><f=a>2</f>"],
        ),
        (
            {"format": {**TRIGGERED, "stop_after_first": True, "at_least_one": True}},
            ["<f=b>x</f>"],
            ["a<f=a>1</f>", "<f=a>1</f>b"],
        ),
        (OLDER, ["a", "a<f=a>1</f>b"], ["a<f=a>x</f>", "<f=b>x</f>"]),
        ({"type": "structural_tag", "format": CALLED}, ["a", "a<call>x1\n</call>b"], ["<call>y1\n</call>"]),
        (
            {"format": {"type": "tags_with_separator", "separator": ", ", "tags": TAGS[:1]}},
            ["", "<f=a>1</f>", "<f=a>1</f>, <f=a>2</f>"],
            ["<f=a>1</f>,", "a"],
        ),
        (
            {"format": {"type": "tag", "begin": "[", "content": {"type": "any_text"}, "end": "</call>"}},
            ["[x</call>"],
            ["[x", "x</call>"],
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "regex", "pattern": r"a/b\/c"}, {"type": "any_text"}],
                }
            },
            ["a/b/c", "a/b/c and more"],
            ["a/b", " a/b/c"],
        ),
    ],
    ids=["triggered", "at least one", "first", "one", "older", "token", "separated", "tag", "sequence"],
)
def test_texts_with_tags(
    grammars: Grammars, tokenizer: Tokenizer, wanted: dict[str, Any], right: list[str], wrong: list[str]
):
    for given in (
        StructuredOutput(structural_tag=wanted),
        StructuredOutput(structural_tag=json.dumps(wanted)),
    ):
        assert [text for text in right if not takes(grammars, tokenizer, given, text)] == []
        assert [text for text in wrong if takes(grammars, tokenizer, given, text)] == []


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "any_text"}
    for _ in range(levels):
        found = {"type": "or", "elements": [found]}
    return {"format": found}


DEEP = '{"format": ' + '{"type": "or", "elements": [' * 2000 + '{"type": "any_text"}' + "]}" * 2000 + "}"


def within(kind: dict[str, Any], levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(levels):
        found = {**kind, "tags": [{"begin": "<f", "content": found, "end": ">"}]}
    return {"format": found}


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "tags_with_separator", "separator": ",", "at_least_one": True},
        {"type": "triggered_tags", "triggers": ["<"], "at_least_one": True, "stop_after_first": True},
        {"type": "triggered_tags", "triggers": ["<"], "at_least_one": True},
    ],
)
def test_tags_within_tags_make_a_grammar_of_their_size(
    grammars: Grammars, tokenizer: Tokenizer, kind: dict[str, Any]
):
    """A tag is written twice, and so would be each tag in it: 30 levels, 3 KB, took all memory."""
    wanted = StructuredOutput(structural_tag=within(kind, 12))
    assert len(wanted.behind(False, None, tokenizer.added_id)) < 4096
    assert takes(grammars, tokenizer, wanted, "<f" * 12 + "x" + ">" * 12)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"structural_tag": "{"}, "structural_tag is not JSON"),
        ({"structural_tag": "[]"}, "structural_tag is a list; expected an object"),
        ({"structural_tag": {}}, "format = None; expected an object"),
        ({"structural_tag": {"format": {"type": "grammar"}}}, "of the type 'grammar'; expected one of const"),
        ({"structural_tag": {"format": {"type": "regex"}}}, "pattern = None; expected a string"),
        (
            {"structural_tag": {"format": {**TRIGGERED, "triggers": ["<g"]}}},
            "begins with none of the triggers",
        ),
        (
            {"structural_tag": {"format": {**TRIGGERED, "triggers": []}}},
            r"triggers = \[\]; expected a list of one",
        ),
        ({"structural_tag": {"format": {**TRIGGERED, "at_least_one": 1}}}, "at_least_one = 1; expected true"),
        ({"structural_tag": {**OLDER, "triggers": None}}, "triggers = None; expected a list"),
        ({"structural_tag": {"format": {"type": "json_schema", "json_schema": {"not": {}}}}}, "not"),
        (
            {"structural_tag": {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 2}}},
            "must be the last of a sequence",
        ),
        ({"structural_tag": {"format": {"type": "const_string", "value": "a" * 2**16}}}, "at most 65536"),
        ({"structural_tag": nested(300)}, "nested too deep"),
        # Python's JSON reads fewer levels than this before 3.13, and these since.
        ({"structural_tag": DEEP}, "structural_tag is not JSON: maximum recursion depth|nested too deep"),
        (
            {"structural_tag": {"format": {"type": "tag", "begin": "<", "end": "e" * 9999, "content": MANY}}},
            "a grammar of .* characters; at most 524288 are allowed",
        ),
        ({"ebnf": "root := 'a'"}, "the grammar is not valid EBNF: Expected ::= at line 1"),
        ({"ebnf": 'x ::= "a"'}, "No 'root' rule found; expected rules such as"),
        ({"ebnf": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "nested too deep"),
        ({"ebnf": 'root ::= "a"\n' + 'x ::= "a"\n' * 500}, "the grammar has 501 rules; at most 500"),
        ({"ebnf": "root ::= root"}, "cannot be compiled"),
        ({"ebnf": "a" * 2**16 + "b"}, "at most 65536"),
        ({"ebnf": 3}, "3 is a int; expected a string"),
        ({"ebnf": "\ud800"}, "half of a character"),
        ({"lark": "start: <[7]>"}, r"the grammar names <\[7\]>, no special token"),
        ({"lark": "start: <[104-105]>"}, r"names tokens by <\[104-105\]>; expected one id"),
        ({"lark": "start: <[99999999999]>"}, "expected one id"),
        ({"lark": "start: missing"}, "cannot be compiled"),
    ],
)
def test_a_wrong_grammar_is_refused_in_a_line(grammars: Grammars, given: dict[str, Any], told: str):
    with pytest.raises(RequestError, match=told) as caught:
        grammars.matcher(StructuredOutput(**given), [1])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_grammar_may_name_special_tokens_and_spell_what_looks_like_one(
    grammars: Grammars, tokenizer: Tokenizer
):
    wanted = StructuredOutput(lark='start: <[104]> "<[7]>" /<[0-9]>/ // <[7]>')
    assert takes(grammars, tokenizer, wanted, "<call><[7]><3>")


@pytest.mark.parametrize("text", ["\n" * 2**16, "/" + r"\/" * 2**15, '"' + r"\"" * 2**15, "<[" * 2**15])
def test_a_look_at_a_grammar_takes_time_as_its_length_does(text: str):
    began = time.thread_time()
    assert not is_lark(text)
    with suppress(RequestError):
        assert not token_ids(text)
    assert time.thread_time() - began < 1  # some milliseconds; its square would be ten seconds or more


def test_lark_has_a_start_or_a_line_of_its_own_library():
    assert all(map(is_lark, ("start: a", 'a: "b"\n \n\t start :a', "\n%llguidance {}\nstart: a")))
    assert not any(map(is_lark, ('root ::= "start:"', 'restart: "a"', 'root ::= "a" # start: b')))


def test_a_thought_comes_before_them(grammars: Grammars, tokenizer: Tokenizer):
    prompt = tokenizer.encode("<think>", add_special_tokens=False)
    for wanted in (
        StructuredOutput(ebnf='root ::= "b"'),
        StructuredOutput(structural_tag={"format": TRIGGERED}),
    ):
        inner = grammars.matcher(wanted, [1], prompt).inner.deep_copy()
        ids = tokenizer.encode("hm</think>b", add_special_tokens=False)
        assert inner.try_consume_tokens(ids) == len(ids)
        assert inner.is_accepting()
