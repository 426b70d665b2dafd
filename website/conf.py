"""Settings of Sphinx, which makes the pages of `website.stage` to HTML."""

import tomllib
from pathlib import Path

from pygments.lexers.data import JsonLexer
from sphinx.application import Sphinx

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]

project, version = _PROJECT["name"], _PROJECT["version"]
html_title = f"{project} {version}"
extensions = ["myst_parser"]
# Headings get the anchors that GitHub gives them, to which the documents link.
myst_heading_anchors = 6
nitpicky = True
highlight_language = "none"
html_theme = "furo"
html_copy_source = False  # `website.stage` puts the Markdown beside the pages
html_use_index = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Know the languages that the documents' blocks of code name."""
    app.add_lexer("jsonl", JsonLexer)
