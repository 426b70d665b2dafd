"""Lists of the tokens that drafts choose among."""

import json

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.model.draft_vocab import FILE, listed, write


@pytest.fixture
def folders(tmp_path):
    """A model's folder with a list, and a drafter's without."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    model.mkdir()
    draft.mkdir()
    write(model / FILE, [7, 3, 5])
    return [model, draft]


def test_a_number_takes_the_beginning_of_the_list(folders, tmp_path):
    assert listed(None, folders, 8) == (7, 3, 5)
    assert listed(2, folders, 8) == (7, 3)
    assert listed(0, folders, 8) is None
    write(tmp_path / "other.json", [1, 2])
    assert listed(str(tmp_path / "other.json"), folders, 8) == (1, 2)
    assert listed((6, 4), folders, 8) == (6, 4)
    write(folders[1] / FILE, [4])
    assert listed(None, folders, 8) == (4,)  # the drafter's own list goes first
    assert listed(None, folders[:1], 8) == (7, 3, 5)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (4, "draft_vocab = 4; expected 0 to 3"),
        (-1, "expected 0 to 3"),
        ((1, 1), "token 1 twice"),
        (0.5, "draft_vocab = 0.5; expected a number of tokens, a file"),
    ],
)
def test_more_than_the_list_has_is_refused(folders, asked, error):
    with pytest.raises(ConfigError, match=error):
        listed(asked, folders, 8)


def test_without_a_list_a_number_is_refused(tmp_path):
    assert listed(None, [tmp_path], 8) is None
    with pytest.raises(ConfigError, match=r"has no draft_vocab\.json"):
        listed(2, [tmp_path], 8)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (json.dumps([1, 8]), "names token 8; expected ids from 0 to 7"),
        (json.dumps([1, "a"]), "names token 'a'"),
        (json.dumps([1, True]), "names token True"),
        (json.dumps([1, 2, 1]), "names token 1 twice"),
        (json.dumps({"tokens": [1]}), "expected a list of token ids"),
        ("[]", "names no token"),
        ("[1, 2", "is no readable list"),
        ("[" * 10**5, "is no readable list"),
    ],
)
def test_damaged_lists_are_refused(folders, text, error):
    (folders[0] / FILE).write_text(text)
    with pytest.raises(ConfigError, match=error):
        listed(None, folders, 8)
