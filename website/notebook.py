"""A page with cells: blocks of Python that run one after another, whose outputs are shown below them.

The text is that of a document, and a notebook of jupytext's form "markdown". A cell shows its output, and
the value of an expression at its end, as in Jupyter.
"""

import ast
import contextlib
import io
import json
import re
from dataclasses import dataclass
from typing import Any

_CELL = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Notebook:
    """A page, cut at its cells.

    Attributes:
        texts: Markdown before, between and behind the cells.
        cells: Python.
        outputs: the text that each cell has shown.
    """

    texts: list[str]
    cells: list[str]
    outputs: list[str]

    @classmethod
    def run(cls, page: str) -> "Notebook":
        """Run the cells of a page, in this process. An error of a cell is raised as it is."""
        parts, names = _CELL.split(page), dict[str, Any]()
        cells = parts[1::2]
        return cls(
            parts[::2], cells, [_output(cell, f"<cell {n}>", names) for n, cell in enumerate(cells, 1)]
        )

    def markdown(self, download: str) -> str:
        """The page with outputs below cells. download: the address of the notebook, which is linked."""
        title, about, rest = self.texts[0].split("\n\n", 2)
        out = "\n\n".join([title, about, f"[This page as a notebook]({download}), with its outputs.", rest])
        for cell, output, text in zip(self.cells, self.outputs, self.texts[1:], strict=True):
            shown = f"\n```text\n{output}```\n" if output else ""
            out += f"```python\n{cell}```\n{shown}{text}"
        return out

    def ipynb(self) -> str:
        """The notebook in Jupyter's format."""
        entries: list[dict[str, Any]] = []
        for n, text in enumerate(self.texts):
            if text.strip():
                entries.append({"cell_type": "markdown", "metadata": {}, "source": text.strip()})
            if n < len(self.cells):
                stream = {"output_type": "stream", "name": "stdout", "text": self.outputs[n]}
                code = {"cell_type": "code", "metadata": {}, "source": self.cells[n].rstrip("\n")}
                entries.append(
                    code | {"execution_count": n + 1, "outputs": [stream] if self.outputs[n] else []}
                )
        entries = [{"id": f"cell-{n}"} | entry for n, entry in enumerate(entries)]
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        book = {"cells": entries, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _output(cell: str, name: str, names: dict[str, Any]) -> str:
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                print(repr(value))
    return shown.getvalue()
