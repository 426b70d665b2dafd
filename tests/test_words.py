"""Words of docs, docstrings and comments: a sentence names its subject with a noun. Counts may only fall.

A noun stands where a reader looks for one: no "what" for a thing, no "those" for things named before, no "as
many" for a number. A sentence begins with its subject or its verb, not with a bare preposition.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.prose import comments, docstrings, pages, parsed, prose, sources

# The most occurrences of each pattern. Lower a number when the count is lower; never raise one.
MOST = {
    "what for a noun": (r"(?i)\b(what|whatever|whoever|whichever)\b", 14),
    "a pronoun for a noun": (r"(?i)\b(ones|those|others)\b", 38),
    "a quantity without a number": (r"(?i)\b(so|as) (many|much|few)\b", 15),
    "a sentence that begins with a preposition": (r"^(Of|By|For|As|With)\b", 35),
    "an error without its condition": (r"^Raises \w+(, \w+)*( (and|or) \w+)?\.$", 148),
}
# The same of docstrings, and of entries below Attributes and Args, that begin with a preposition.
OPENED = re.compile(r"(?i)(of|by|for|as|with)\b")
MOST_DOCSTRINGS, MOST_ENTRIES = 0, 20
# An entry of a number begins with its unit.
UNIT = re.compile(
    r"(the |estimated )?(number|most|least|largest|width|size|bytes|MiB|seconds|nanoseconds|share|ratio"
    r"|factor|index|(tokens|operations) per)\b"
)
MOST_WITHOUT_UNIT = 74

ENTRY = re.compile(r"[*`\w, ]{1,60}: ")
ITEM = re.compile(r"([-*]|\d+\.) ")


def sentences(text: str) -> Iterator[str]:
    """Sentences, without code and quotations."""
    paragraphs: list[str] = [""]
    for line in map(str.strip, text.splitlines()):
        if not line or ENTRY.match(line) or ITEM.match(line) or line.startswith("#"):
            paragraphs.append("")
        mark = ITEM.match(line)
        paragraphs[-1] += f" {line[mark.end() :] if mark else line}"
    for paragraph in paragraphs:
        plain = re.sub(r"``.*?``|`.*?`|\"[^\"]*\"", "X", paragraph.strip())
        yield from filter(None, re.split(r"(?<=[.!?;:]) +(?=[A-Z])", plain))


def entries(text: str) -> Iterator[str]:
    """Descriptions of names in a docstring."""
    for line in map(str.strip, text.splitlines()):
        if found := ENTRY.match(line):
            yield line[found.end() :]


def numbers(source: str) -> Iterator[str]:
    """Descriptions of attributes and arguments that are numbers."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ClassDef):
            declared = {
                ast.unparse(n.target): n.annotation for n in node.body if isinstance(n, ast.AnnAssign)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.args, *node.args.kwonlyargs]
            declared = {a.arg: a.annotation for a in arguments if a.annotation}
        else:
            continue
        for line in map(str.strip, (ast.get_docstring(node) or "").splitlines()):
            names = found[0].split(":")[0].split(", ") if (found := ENTRY.match(line)) else []
            kinds = [ast.unparse(declared[name]) for name in names if name in declared]
            if found and any(re.match(r"(int|float)\b", kind) for kind in kinds):
                yield line[found.end() :]


@pytest.fixture(scope="module")
def all_docstrings() -> list[str]:
    return [d for path in sources() for d in docstrings(path.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def all_sentences(all_docstrings) -> list[str]:
    texts = [prose(path.read_text(encoding="utf-8")) for path in pages()]
    texts += [comment for path in sources() for comment in comments(path.read_text(encoding="utf-8"))]
    return [sentence for text in (*all_docstrings, *texts) for sentence in sentences(text)]


@pytest.mark.parametrize("name", MOST)
def test_counts_of_a_pattern_only_fall(all_sentences, name):
    pattern, most = MOST[name]
    count = sum(len(re.findall(pattern, sentence)) for sentence in all_sentences)
    assert count <= most, f"{name}: {count} times in docs, docstrings and comments; name the noun"


def test_docstrings_and_entries_begin_with_a_noun_or_a_verb(all_docstrings):
    assert sum(bool(OPENED.match(d.strip())) for d in all_docstrings) <= MOST_DOCSTRINGS
    assert sum(bool(OPENED.match(e)) for d in all_docstrings for e in entries(d)) <= MOST_ENTRIES


def test_numbers_have_units():
    found = [entry for path in sources() for entry in numbers(path.read_text(encoding="utf-8"))]
    without = [entry for entry in found if not UNIT.match(entry)]
    assert len(without) <= MOST_WITHOUT_UNIT, without


def test_sentences_are_found():
    code = '''
"""First one. ``what`` is code.

Attributes:
    size: of the page.
"""
x = 1  # By hand:
# What others do
y = 2
"""Stands below."""
'''
    texts = [*docstrings(code), *comments(code)]
    found = [s for text in texts for s in sentences(text)]
    assert found == [
        *("First one.", "X is code.", "Attributes:", "size: of the page."),
        *("Stands below.", "By hand:", "What others do"),
    ]
    assert list(entries(texts[0])) == ["of the page."]
    typed = "class A:\n    '''A.\n\n    a: rows.\n    b: others.\n    '''\n    a: int | None\n    b: str\n"
    assert list(numbers(typed)) == ["rows."]
    page = "# A title\n\nText of\na line.\n\n```\nwhat\n```\n\n| a | of it |\n"
    assert list(sentences(prose(page))) == ["# A title", "Text of a line.", "a", "of it"]
