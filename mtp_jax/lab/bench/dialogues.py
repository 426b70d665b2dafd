"""Training text in the chat template's form: a docstring's first sentence asks, the function answers."""

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterable, Iterator

from mtp_jax.lab.bench.corpus import ASSISTANT, USER, SourceFile

SUMMARY_CHARS = range(16, 121)  # a shorter summary ("See above.") asks nothing, a longer one too much
ANSWER_CHARS = 1200  # about 350 tokens: question and answer fit in one training window of 512


def dialogues(files: Iterable[SourceFile]) -> list[SourceFile]:
    """One document for every function with a docstring that fits the limits above, each question once.

    A document is "<User>question<Assistant>```python ... ```", as the demo's chat template writes it between
    bos and eos. The question has one of a few forms, which a hash of the function picks. The answer keeps the
    first sentence of the docstring.
    """
    found: list[SourceFile] = []
    asked: set[str] = set()
    for file in files:
        lines = file.text.split("\n")
        for function in _functions(file.text):
            summary = _summary(function)
            code = _code(function, summary, lines) if summary else ""
            if not code or len(code) > ANSWER_CHARS:
                continue
            question = _question(function.name, summary, code)
            if question not in asked:
                asked.add(question)
                text = f"{USER}{question}{ASSISTANT}```python\n{code}\n```"
                found.append(SourceFile(f"{file.path}:{function.lineno}", text))
    return found


def _code(function: ast.FunctionDef, summary: str, lines: list[str]) -> str:
    """The function without indentation, with a docstring of one line; "" if it does nothing else."""
    docstring, *rest = function.body
    if not rest or docstring.lineno == function.lineno:
        return ""
    indent = lines[docstring.lineno - 1][: docstring.col_offset]
    head = lines[function.lineno - 1 : docstring.lineno - 1]
    tail = lines[docstring.end_lineno or docstring.lineno : function.end_lineno]
    return textwrap.dedent("\n".join([*head, f'{indent}"""{summary}"""', *tail])).rstrip()


def _functions(text: str) -> Iterator[ast.FunctionDef]:
    try:
        with warnings.catch_warnings():  # of old escapes in other people's strings
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):  # of another version of Python; a null byte
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _summary(function: ast.FunctionDef) -> str:
    """The first paragraph of the docstring on one line; "" unless it is one plain sentence."""
    paragraph = (ast.get_docstring(function) or "").partition("\n\n")[0]
    line = " ".join(paragraph.split())
    plain = line.isascii() and line[:1].isupper() and line.rstrip(".").count(". ") == 0
    return line if plain and len(line) in SUMMARY_CHARS else ""


def _question(name: str, summary: str, code: str) -> str:
    asks = summary.rstrip(".")
    verb, _, rest = asks.partition(" ")
    forms = [
        f"{asks}.",
        f"Write a function: {asks}.",
        f"Write {name} in Python. {asks}.",
        f"Write a Python function to {verb.lower()} {rest}.",
        f"Please write a function to {verb.lower()} {rest}.",
    ]
    if verb.endswith("s"):  # "Returns the ...": a sentence about the function, not an order
        forms[3:] = [f"Write a function that {verb.lower()} {rest}."]
    pick = int.from_bytes(hashlib.sha256(code.encode()).digest()[:4], "big")
    return forms[pick % len(forms)]
