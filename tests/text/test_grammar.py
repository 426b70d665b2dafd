"""Masks against finite languages spelt out: a token may follow if some sentence goes on with its text."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from mtp_jax.errors import RequestError
from mtp_jax.text.grammar import MAX_GRAMMAR_LENGTH, Grammars, MaskWindow, Matcher, StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.text.helpers import demo

# 104 tokens: characters and some pairs of letters. The model's vocabulary is padded to 112.
TOKENS, VOCAB, EOS, OTHER_EOS, STOP = 104, 112, 1, 97, 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = Tokenizer.from_dir(tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), TOKENS))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, [EOS, OTHER_EOS])


def unpack(masks: np.ndarray) -> list[set[int]]:
    """Token ids allowed in each row."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def one(grammars: Grammars, matcher: Matcher, drafts: Sequence[int] = ()) -> list[set[int]]:
    return unpack(grammars.masks([MaskWindow(0, matcher, drafts)], 1, len(drafts) + 1)[0])


ALL = set(range(-(-VOCAB // 32) * 32))
LANGUAGES: dict[str, tuple[StructuredOutput, set[str]]] = {
    "choice": (StructuredOutput(choice=["ab", "abc", "a", "x.z "]), {"ab", "abc", "a", "x.z "}),
    "regex": (
        StructuredOutput(regex="[a-c]{1,3}(/|\n)?"),
        {
            "".join(letters) + end
            for n in (1, 2, 3)
            for letters in itertools.product("abc", repeat=n)
            for end in ("", "/", "\n")
        },
    ),
    "integer": (
        StructuredOutput(json_schema={"type": "integer", "minimum": 8, "maximum": 112}),
        {str(i) for i in range(8, 113)},
    ),
    "enum": (StructuredOutput(json_schema='{"enum": ["a4", true, null]}'), {'"a4"', "true", "null"}),
    "lark": (StructuredOutput.of_grammar('start: "a" (B | "cd")\nB: /b{1,2}/'), {"ab", "abb", "acd"}),
    "ebnf": (
        StructuredOutput.of_grammar('root ::= "x" digit{1,2} | "(" in ")"\ndigit ::= [1-3]\nin ::= "a"?'),
        {f"x{a}{b}" for a in "123" for b in ("", *"123")} | {"(a)", "()"},
    ),
    "tags": (
        StructuredOutput(
            structural_tag={
                "format": {
                    "type": "tags_with_separator",
                    "at_least_one": True,
                    "stop_after_first": True,
                    "separator": ",",
                    "tags": [
                        {"begin": "<a>", "content": {"type": "regex", "pattern": "x/?"}, "end": "</a>"},
                        {
                            "begin": "[",
                            "content": {
                                "type": "or",
                                "elements": [
                                    {"type": "json_schema", "json_schema": {"enum": [1, 20]}},
                                    {
                                        "type": "sequence",
                                        "elements": [
                                            {"type": "const_string", "value": "b"},
                                            {"type": "const_string", "value": "/c"},
                                        ],
                                    },
                                ],
                            },
                            "end": "]",
                        },
                    ],
                }
            }
        ),
        {"<a>x</a>", "<a>x/</a>", "[1]", "[20]", "[b/c]"},
    ),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_are_the_prefixes_of_the_language(name, grammars, tokenizer):
    wanted, language = LANGUAGES[name]
    prefixes = {text[:n] for text in language for n in range(len(text) + 1)}
    texts = {i: tokenizer.token_bytes(i).decode() for i in range(2, TOKENS)}

    def follows(text: str) -> set[int]:
        ends = {EOS, OTHER_EOS, STOP} if text in language else set()
        return ends | {i for i, t in texts.items() if i != OTHER_EOS and text + t in prefixes}

    rng = np.random.default_rng(0)
    for _ in range(30):
        matcher, text = grammars.matcher(wanted, [EOS, STOP]), ""
        while True:
            # Drafts that are allowed, mostly; the masks after one that is not are never used.
            drafts, expected, ahead = [], [follows(text)], text
            for _ in range(3):
                choices = sorted(expected[-1] - {EOS, OTHER_EOS, STOP})
                if not choices or rng.random() < 0.2:
                    drafts.append(int(rng.integers(TOKENS)))
                else:
                    drafts.append(int(rng.choice(choices)))
                if drafts[-1] not in choices:
                    break
                ahead += texts[drafts[-1]]
                expected.append(follows(ahead))
            assert one(grammars, matcher, drafts)[: len(expected)] == expected
            choices = sorted(expected[0] - {EOS, OTHER_EOS, STOP})
            if not choices:
                break
            token = int(rng.choice(choices))
            matcher.advance([token])
            assert not matcher.failed
            text += texts[token]


def test_masks_token_by_token_of_an_endless_language(grammars, tokenizer):
    """Every token is tried on a copy."""
    matcher = grammars.matcher(StructuredOutput(json_object=True), [EOS])
    text = '{"a b": [1, {"c": -0.5}, "\\n"]}'
    ids = tokenizer.encode(text, add_special_tokens=False)
    windows = one(grammars, matcher, ids)
    for allowed, following in zip(windows, [*ids, EOS], strict=True):
        tried = {t for t in range(TOKENS) if matcher.inner.deep_copy().try_consume_tokens([t])}
        assert allowed - {EOS, OTHER_EOS} == tried - {EOS, OTHER_EOS}
        assert (EOS in allowed) == matcher.inner.is_accepting()
        assert following in allowed
        if following != EOS:
            matcher.advance([following])


def test_rows_of_a_batch(grammars, tokenizer):
    """Each window gets its own masks; rows without a grammar, or past a bad draft, allow everything."""
    a, b = (grammars.matcher(StructuredOutput(choice=[c]), [EOS]) for c in ("ab!", "xy?"))
    ids = tokenizer.encode("ab!", add_special_tokens=False)
    masks = grammars.masks([MaskWindow(2, a, ids), MaskWindow(0, b, [])], 4, 4)
    assert masks.shape == (4, 4, 4)
    assert masks.dtype == np.uint32
    together = [unpack(row) for row in masks]
    assert together[1] == together[3] == [ALL] * 4
    assert together[2] == one(grammars, a, ids)
    assert together[2][3] == {EOS, OTHER_EOS}
    assert together[0] == [one(grammars, b)[0], ALL, ALL, ALL]


def test_special_and_missing_tokens_are_never_allowed(grammars):
    anything = grammars.matcher(StructuredOutput(regex="(.|\n)*"), [EOS])
    assert one(grammars, anything)[0] == set(range(TOKENS)) - {0}


@pytest.mark.parametrize("tags", ["text", "tokens", "special tokens"])
@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        (StructuredOutput(choice=["yes/no", "abc"]), "yes/no"),
        (StructuredOutput(regex="[a-c]/[0-9]"), "b/7"),
        (StructuredOutput(json_schema={"type": "integer", "minimum": 8}), "12"),
        (StructuredOutput(json_object=True), '{"a": 1}'),
    ],
)
def test_a_thought_is_free_and_the_grammar_begins_behind_it(wanted, answer, tags, tokenizer):
    backend = Backend.from_str(tokenizer.backend.to_str())
    if tags != "text":
        added = [AddedToken(t, special=tags == "special tokens") for t in ("<think>", "</think>")]
        backend.add_tokens(added)
    grammars = Grammars(Tokenizer(backend, {}, {}), VOCAB, [EOS])

    def ids(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    matcher = grammars.matcher(wanted, [EOS], ids("x = <think>\n"))
    matcher.advance(ids('a b, {"c'))
    in_thought = one(grammars, matcher)[0]
    assert set(ids("a{ \n")) <= in_thought
    assert EOS not in in_thought
    first, *_, last = one(grammars, matcher, ids("</think>" + answer))[len(ids("</think>")) :]
    plain = grammars.matcher(wanted, [EOS], ids("x = <think>a</think>"))
    assert first == one(grammars, plain)[0]
    assert EOS in last
    matcher.advance(ids("</think>" + answer))
    assert not matcher.failed


def test_requests_of_one_grammar_do_not_meet(grammars, tokenizer):
    wanted = StructuredOutput(choice=["ab!", "xy?"])
    first, second = grammars.matcher(wanted, [EOS]), grammars.matcher(wanted, [EOS])
    first.advance(tokenizer.encode("ab", add_special_tokens=False))
    assert one(grammars, first) == [{tokenizer.encode("!", add_special_tokens=False)[0]}]
    assert len(one(grammars, second)[0]) == 3


def test_white_space_in_json_is_limited(grammars, tokenizer):
    """A space, or a line break with its indent."""
    matcher = grammars.matcher(StructuredOutput(json_schema={"type": "array"}), [EOS])
    space, line, bracket = tokenizer.encode(" \n[", add_special_tokens=False)
    matcher.advance([bracket])
    assert {space, line} <= one(grammars, matcher)[0]
    assert not {space, line} & one(grammars, matcher, [space])[1]
    matcher.advance([line, *[space] * 19])
    assert space in one(grammars, matcher)[0]
    matcher.advance([space])
    assert not {space, line} & one(grammars, matcher)[0]
    assert not matcher.failed
    compact = StructuredOutput(
        json_schema={
            "type": "array",
            "x-guidance": {"whitespace_pattern": None, "whitespace_flexible": False},
        }
    )
    assert not {space, line} & one(grammars, grammars.matcher(compact, [EOS]), [bracket])[1]


# With a vocabulary of long tokens masks of the second alternative exceed llguidance's bounds soon.
TWO_WAYS = StructuredOutput(regex="b{1,500}|xxx([a-z]*a[a-z]{200}c|[a-y]*b[a-z]{199}d|[a-x]*c[a-z]{198}e)+")
EXPLODING = "xxxabcabacbacbacbacabcbcb"


@pytest.fixture
def of_demo() -> Grammars:
    return Grammars(demo(), demo().vocab_size, [EOS])


def test_an_output_that_exceeds_the_bounds_ends_no_other(of_demo):
    grammars, tokenizer = of_demo, demo()
    wrong, right = (grammars.matcher(TWO_WAYS, [EOS]) for _ in range(2))
    b, *_ = tokenizer.encode("b", add_special_tokens=False)
    expected = one(grammars, right, [b, b])
    right.advance([b])
    for token in tokenizer.encode(EXPLODING, add_special_tokens=False):
        one(grammars, wrong)
        if wrong.failed:
            break
        wrong.advance([token])
    assert wrong.failed
    assert wrong.alone  # it had its chance
    found = one(grammars, right, [b])
    assert right.alone
    assert not right.failed
    assert found == expected[1:]
    right.advance([b])
    assert one(grammars, right)[0] == expected[2]
    new = grammars.matcher(TWO_WAYS, [EOS])
    assert one(grammars, new, [b, b]) == expected
    assert not new.alone


def test_drafts_that_exceed_the_bounds_end_no_output(of_demo):
    grammars, tokenizer = of_demo, demo()
    matcher, fine = (grammars.matcher(TWO_WAYS, [EOS]) for _ in range(2))
    first = one(grammars, fine)[0]
    masks = one(grammars, matcher, tokenizer.encode(EXPLODING, add_special_tokens=False))
    assert matcher.alone
    assert not matcher.failed
    assert masks[0] == first
    assert masks[-1] == set()  # without drafts it would have ended there
    matcher.advance(tokenizer.encode("bbb", add_special_tokens=False))
    assert EOS in one(grammars, matcher)[0]


def test_masks_of_an_output_alone_are_the_same(grammars, tokenizer):
    wanted = StructuredOutput(json_schema={"properties": {"a": {"enum": [1, 23]}}, "required": ["a"]})
    matcher, other = (grammars.matcher(wanted, [EOS]) for _ in range(2))
    start, rest = (tokenizer.encode(text, add_special_tokens=False) for text in ('{"a', '":23}'))
    for m in (matcher, other):
        m.advance(start)
    drafts = [*rest, EOS, 7]
    expected = one(grammars, matcher, drafts)
    alone = grammars._alone(other, drafts, len(drafts) + 1)
    window = grammars.masks([MaskWindow(0, other, drafts)], 1, len(drafts) + 1)
    assert unpack(window[0]) == expected
    assert unpack(alone.view(np.uint32))[: len(drafts)] == expected[: len(drafts)]


def test_known_grammars_are_bounded_and_the_last_used_stay(tokenizer, monkeypatch):
    grammars, built = Grammars(tokenizer, VOCAB, [EOS]), []
    monkeypatch.setattr("mtp_jax.text.grammar._CACHED_GRAMMARS", 2)
    monkeypatch.setattr(grammars._trials, "run", lambda grammar: built.append(grammar) or 0)
    for choice in ("a", "b", "a", "c", "a", "b"):
        grammars.matcher(StructuredOutput(choice=[choice]), [EOS])
    assert len(built) == 4  # "b" made room for "c"
    assert len(grammars._cached) == 2


def test_a_failure_on_the_way_shows(grammars):
    matcher = grammars.matcher(StructuredOutput(choice=["a"]), [EOS])
    matcher.advance([0])
    assert matcher.failed
    one(grammars, matcher)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "exactly one"),
        ({"json_object": "yes"}, "True or False"),
        ({"json_schema": "{"}, "not valid"),
        ({"json_schema": "[]"}, "expected an object"),
        ({"json_schema": [1]}, "expected an object"),
        ({"json_schema": {"const": float("nan")}}, "not valid"),
        ({"json_schema": '{"items":' * 200 + "{}" + "}" * 200}, "recursion"),
        ({"json_schema": {"multipleOf": 1_000_003}}, "multipleOf"),
        ({"json_schema": {"multipleOf": 0.001, "allOf": [{"multipleOf": 70}]}}, "multipleOf"),
        ({"json_schema": {"allOf": [{"multipleOf": p} for p in (251, 509)]}}, "multipleOf"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "the schema: pattern = .*look-ahead"),
        ({"json_schema": {"x-guidance": {"lenient": True}, "not": {"type": "null"}}}, "not cannot be"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "refers to another document"),
        ({"regex": 3}, "expected a string"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"regex": "a" * MAX_GRAMMAR_LENGTH}, "at most"),
        ({"choice": []}, "non-empty"),
        ({"choice": "abc"}, "list"),
        ({"choice": ["a", ""]}, "non-empty"),
        ({"choice": ["\ud800"]}, "surrogates"),
    ],
)
def test_what_is_no_structured_output(options: Any, says):
    with pytest.raises(RequestError, match=says):
        StructuredOutput(**options)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (StructuredOutput(json_schema={"type": "foo"}), "Invalid type: foo"),
        (StructuredOutput(json_schema={"not": {}}), "Unsatisfiable"),
        (StructuredOutput(json_schema={"$ref": "#"}), "no text"),
        (StructuredOutput(json_schema={"type": "integer", "minimum": 3, "maximum": 2}), "Unsatisfiable"),
        (StructuredOutput(regex="(a"), "unclosed group"),
        (StructuredOutput(regex="(" * 1000 + ")" * 1000), "regex"),
        (StructuredOutput(regex="\\x{4e00}"), "no text"),
        # Sizes that llguidance bounds.
        (StructuredOutput(regex="a{100000}"), "too many expressions"),
        (StructuredOutput(regex="(a{1000}){1000}"), "compiled"),
        (StructuredOutput(json_schema={"type": "string", "pattern": "^a{100000}$"}), "too many expressions"),
        (
            StructuredOutput(
                json_schema={"allOf": [{"type": "string", "pattern": f"(.*a.{{{i}}})"} for i in range(12)]}
            ),
            "compiled",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else json.dumps(x.json_schema or x.regex)[:30],
)
def test_what_cannot_be_compiled(wanted, says, grammars):
    with pytest.raises(RequestError, match=says):
        grammars.matcher(wanted, [EOS])


def test_multiples_of_everyday_size(grammars, tokenizer):
    prices = StructuredOutput(
        json_schema={"type": "object", "properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 25}}}
    )
    grammars.matcher(prices, [EOS])
    even = grammars.matcher(StructuredOutput(json_schema={"type": "integer", "multipleOf": 14}), [EOS])
    even.advance(tokenizer.encode("2", add_special_tokens=False))
    assert EOS not in one(grammars, even)[0]
    even.advance(tokenizer.encode("8", add_special_tokens=False))
    assert EOS in one(grammars, even)[0]
