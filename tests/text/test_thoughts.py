"""One border of thoughts: stop strings, budgets, splitters and grammars agree on where a thought ends."""

import random
from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import AddedToken

from mtp_jax.text.grammar import Grammars, MaskWindow, StructuredOutput
from mtp_jax.text.rules import ThinkingBudget
from mtp_jax.text.stop_strings import StopStrings
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer

# Tags as tokens, tags in letters, parts of them, white space, and text.
PIECES = ["<think>", "</think>", "\n", "  ", "a", "<", "/", "t", "h", "i", "n", "k", ">", "</think>", "STOP"]


def parts(text: str, inside: bool) -> tuple[str, str]:
    """The (thought, answer) by the first tags of a whole text, as a reader sees them."""
    if not inside:
        if not text.lstrip().startswith("<think>"):
            return "", text
        text = text.lstrip().removeprefix("<think>")
    thought, _, answer = text.partition("</think>")
    return thought, answer


@pytest.mark.parametrize("inside", [True, False])
def test_readers_of_an_output_agree(inside: bool, rng) -> None:
    thoughts = Thoughts(may_open=True)
    kinds = set()
    for _ in range(400):
        tokens = [PIECES[i] for i in rng.integers(len(PIECES), size=rng.integers(1, 14))]
        tokens = ["<think>", *tokens] if rng.integers(2) and not inside else tokens
        text = "".join(tokens)
        thought, answer = parts(text, inside)
        splitter = thoughts.splitter(inside)
        pieces = [*map(splitter.push, tokens), splitter.flush()]
        assert tuple("".join(p) for p in zip(*pieces, strict=True)) == (thought, answer)

        border, sides = thoughts.border(inside), []
        for token in tokens:
            sides.append(border.push(token, token))
        raw, behind = ("".join(side) for side in zip(*sides, strict=True))
        assert "".join(a + b for a, b in sides) == text
        ended = inside or text.lstrip().startswith("<think>")
        if ended and "</think>" in text.lstrip().removeprefix("" if inside else "<think>"):
            assert raw.endswith("</think>")
            assert behind.endswith(answer)
            assert not behind.removesuffix(answer).strip()
            kinds.add("ended")
        elif border.inside:
            assert thought + answer == thought
            kinds.add("open")
        else:
            assert answer == text
            kinds.add("none")

        names = dict(enumerate(tokens))
        budget = ThinkingBudget(10**6, 0, thoughts, inside, names.__getitem__)
        budget.advance(list(names))
        assert (budget._place.part == border._place.part) or border.count == 0
    assert kinds >= {"ended", "open"}


def stopped(stops: Sequence[str], tokens: Sequence[str], inside: bool) -> tuple[str, str | None]:
    border, finder, shown = Thoughts(may_open=True).border(inside), StopStrings(stops), ""
    for token in tokens:
        thought, answer = border.push(token, token)
        shown += finder.push(thought, inside=True)[0] if thought else ""
        if finder.matched is None:
            shown += finder.push(answer)[0]
        if finder.matched is not None:
            return shown, finder.matched
    return shown + finder.flush(), None


@pytest.mark.parametrize(
    ("stops", "tokens", "inside", "expected"),
    [
        (["Q:"], ["a Q: b", "</think>", "c Q:", " d"], True, ("a Q: b</think>c ", "Q:")),
        (["Q:"], ["a Q: b", "</think>", "c"], True, ("a Q: b</think>c", None)),
        (["Q:"], ["a Q", ":", " b"], True, ("a Q: b", None)),
        (["Q:"], ["a Q", "</think>", ": b Q", ":"], True, ("a Q</think>: b ", "Q:")),  # not over the border
        (["Q:"], ["<think>", "Q:", "</think>", "Q:"], False, ("<think>Q:</think>", "Q:")),
        (["Q:"], ["\n", "<think>", "Q:", "</think>", "x"], False, ("\n<think>Q:</think>x", None)),
        (["Q:"], ["x", "<think>", "Q:"], False, ("x<think>", "Q:")),  # a tag in an answer is text
        (["</think>"], ["a", "</think>", "b"], True, ("a", "</think>")),  # whoever wants the thought alone
        (["</think>\n\nA"], ["a", "</think>", "\n\n", "A"], True, ("a", "</think>\n\nA")),
        (["Q:"], ["a", "</", "think", ">Q", ":"], True, ("a</think>", "Q:")),  # in letters
        (["\n\n", "</think>x"], ["\n\n", "</think>", "\n\n"], True, ("\n\n</think>", "\n\n")),
    ],
)
def test_stop_strings_act_behind_the_border(stops, tokens, inside, expected) -> None:
    assert stopped(stops, tokens, inside) == expected


def test_nothing_of_a_thought_is_held_back() -> None:
    """However much of a stop string it ends with; and in an answer no more than a stop string may be."""
    border, finder = Thoughts(may_open=True).border(True), StopStrings(["abcd"])
    for token in ("xabc", "d", "ab"):
        thought, answer = border.push(token, token)
        assert (finder.push(thought, inside=True)[0], answer) == (token, "")
    assert border.push("</think>", "</think>") == ("</think>", "")
    assert finder.push("</think>", inside=True)[0] == "</think>"
    assert finder.push("cd ab")[0] == "cd "


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), 150)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("</think>", special=False), AddedToken("<think>", special=False)])
    return Grammars(Tokenizer(backend, {}, {}), 160, [1])


@pytest.mark.parametrize("letters", [True, False])
def test_a_grammar_begins_where_readers_see_the_end_of_a_thought(grammars: Grammars, letters: bool) -> None:
    """A tag in letters would end the thought for readers, so that the answer behind it fitted nothing."""
    prompt = grammars.encode("q<think>\n")
    matcher = grammars.matcher(StructuredOutput(choice=["yes"]), [1], prompt)
    tokens = [t for c in "a</think" for t in grammars.encode(c)]
    matcher.advance(tokens)
    last = grammars.encode(">" if letters else "!")
    (mask,) = grammars.masks([MaskWindow(0, matcher, [])], 1, 1)[0]
    allowed = bool(mask[last[0] // 32] >> (last[0] % 32) & 1)
    assert allowed != letters
    (close,) = grammars.encode("</think>")
    assert mask[close // 32] >> (close % 32) & 1


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<user>q<assistant><think>", True),
        ("<user>q<assistant>\n<think>\n\n", True),
        ("q<think>\n", True),
        ("<user>q<assistant><think>so far I", True),  # an answer that is gone on with
        ("<user>q<assistant>\n<think>\nso far\n", True),
        ("<think>so far", True),
        ("<user>q<assistant><think>so far</think>", False),
        ("<user>q<assistant><think></think>the tag <think> is", False),
        ("<user>q<assistant>the tag <think> is", False),
        ("<user>the tag <think> is<assistant>", False),
        ("<user><think> is a tag<assistant>", False),
        ("<user>q<assistant></think> <think> is", False),
        ("<user>q<assistant>" + " " * 40 + "<think>x", False),  # no template writes so many
        ("", False),
        ("q", False),
    ],
)
def test_a_prompt_is_inside_a_thought_that_its_last_turn_has_opened(tmp_path, prompt, inside) -> None:
    folder = tiny_tokenizer.write(tmp_path, 150)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>")])
    backend.add_special_tokens(["<user>", "<assistant>"])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer is not None
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert tokenizer.thoughts.open_after(ids, tokenizer.decode_all) == inside


def test_tags_are_seen_though_they_are_special(tmp_path) -> None:
    folder = tiny_tokenizer.write(tmp_path, 150)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<think>", "</think>", "<hidden>"])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("a</think>b<hidden>c")) == "a</think>bc"


def test_white_space_before_a_thought_has_no_limit() -> None:
    draw = random.Random(1)
    spaces = "".join(draw.choice("\n \t\u3000") for _ in range(5000))
    splitter = Thoughts(may_open=True).splitter(False)
    assert [splitter.push(spaces), splitter.push("<think>a"), splitter.push("</think>b")] == [
        ("", ""), ("a", ""), ("", "b"),
    ]  # fmt: skip
