"""Text for readers: pages of docs, and docstrings and comments of the source."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mtp_jax", "serve", "kernels_pallas", "examples", "website")


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def docstrings(source: str) -> Iterator[str]:
    """Strings that stand alone: of modules, classes, functions, and below assignments."""
    for node in ast.walk(parsed(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


def comments(source: str) -> Iterator[str]:
    """Comments; lines of comment below each other are one."""
    block, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text, line = token.string.lstrip("# "), token.start[0]
            if line == last + 1 and not token.line[: token.start[1]].strip():
                block += f"\n{text}"
            else:
                yield block
                block = text
            last = line
    yield block


def prose(page: str) -> str:
    """A page without blocks of code; a cell of a table is a paragraph."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    lines = (line for line in page.splitlines() if not line.startswith("    "))
    return "\n".join(line.replace("|", "\n\n") if line.lstrip().startswith("|") else line for line in lines)
