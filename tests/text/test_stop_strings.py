"""Stop strings: the same end however the text is cut, and nothing held back that cannot become one."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.errors import RequestError
from mtp_jax.text.stop_strings import StopStrings


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def fed(finder: StopStrings, pieces: Iterable[tuple[str, bool]]) -> tuple[str, bool]:
    """What is shown of the pieces, of which some may stop the text, and whether one did."""
    shown = ""
    for piece, may_stop in pieces:
        visible, stopped = finder.push(piece, may_stop)
        shown += visible
        if stopped:
            return shown, True
    return shown, False


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_stop_strings_against_a_plain_search(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    ends = [(end, -len(s), s) for end in range(len(text) + 1) for s in stops if text[:end].endswith(s)]
    finder = StopStrings(stops, include)
    shown, stopped = fed(finder, ((piece, True) for piece in cut(text, sizes)))
    assert stopped == bool(ends)
    if ends:
        end, length, stop = min(ends)
        assert finder.matched == stop
        assert shown == text[: end if include else end + length]
        assert finder.push("more") == ("", True)
    assert shown + finder.flush() == (shown if ends else text)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 20),
)
def test_stop_strings_that_end_too_early_do_not_count(text: str, stops: list[str], first: int) -> None:
    late = range(first + 1, len(text) + 1)
    ends = [(end, -len(s), s) for end in late for s in stops if text[:end].endswith(s)]
    finder = StopStrings(stops)
    shown, stopped = fed(finder, ((character, at >= first) for at, character in enumerate(text)))
    assert stopped == bool(ends)
    if ends:
        end, length, stop = min(ends)
        assert (finder.matched, shown) == (stop, text[: max(end + length, 0)])
    else:
        assert shown + finder.flush() == text


def test_long_stop_strings_look_at_every_character_once() -> None:
    """Of one that is nearly met all the time, too: a quadratic search would take hours."""
    nearly = "a" * 100_000
    finder = StopStrings([nearly + "b"])
    shown = "".join(finder.push(nearly[:50_000])[0] for _ in range(20))
    assert len(shown) == 900_000
    assert finder.push("b") == ("", True)


def test_stop_strings_hold_back_only_what_may_stop() -> None:
    finder = StopStrings(["</s>"])
    assert finder.push("one <") == ("one ", False)
    assert finder.push("/b> <") == ("</b> ", False)
    assert finder.push("/s> two") == ("", True)
    assert StopStrings("ab").push("a") == ("", False)
    assert StopStrings([]).push("abc") == ("abc", False)
    for wrong in ([""], [3], [None]):
        with pytest.raises(RequestError, match="non-empty"):
            StopStrings(wrong)  # pyright: ignore[reportArgumentType]
