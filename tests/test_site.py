"""The site of the documents: every document and notebook is on it, and its links lead somewhere."""

import json
import subprocess
import sys

import pytest

from tests.layers import ROOT
from tests.prose import pages
from website import gpus
from website.links import broken
from website.notebook import Notebook
from website.stage import Site, described

PAGE = """# A title

About [it](models.md).

## Part

```python
x = 6
print("x")
x * 7
```

Between.

```python
y = x
```
"""


@pytest.mark.rest
def test_the_site_has_every_document_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("sphinx", reason="needs the packages of the extra docs")
    out = tmp_path / "site"
    run = subprocess.run([sys.executable, "-m", "website", out], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all links lead somewhere" in run.stdout
    index = (out / "index.html").read_text(encoding="utf-8")
    names = [path.relative_to(ROOT / "docs").with_suffix("") for path in pages() if path.name != "README.md"]
    assert len(names) > 20
    agents = (out / "llms.txt").read_text(encoding="utf-8")
    for name in names:
        assert (out / f"{name}.html").is_file()
        assert (out / f"{name}.md").is_file()
        assert name.parent.name == "measured" or (f'href="{name}.html"' in index and f"({name}.md)" in agents)
    assert len((out / "llms-full.txt").read_text(encoding="utf-8")) > 300_000
    assert "acceptance" in (out / "searchindex.js").read_text(encoding="utf-8")
    books = [json.loads(path.read_text(encoding="utf-8")) for path in (out / "notebooks").glob("*.ipynb")]
    assert len(books) == 2
    for book in books:
        code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
        assert sum(bool(cell["outputs"]) for cell in code) > 3
    drafted = (out / "notebooks" / "draft-verify-accept.md").read_text(encoding="utf-8")
    assert "```text\n6 passes in the place of 24" in drafted


@pytest.mark.rest
def test_the_page_of_gpus_is_what_plan_prints():
    """Otherwise: `python -m website.gpus`, and look at what has changed."""
    text = gpus.PAGE.read_text(encoding="utf-8")
    assert gpus.page(text) == text


def test_cells_share_names_and_show_what_they_print():
    book = Notebook.run(PAGE)
    assert book.outputs == ["x\n42\n", ""]
    title, note, rest = book.markdown("a.ipynb").partition("[This page as a notebook](a.ipynb)")
    assert title == "# A title\n\nAbout [it](models.md).\n\n"
    assert note
    assert "x * 7\n```\n\n```text\nx\n42\n```\n\nBetween." in rest
    cells = json.loads(book.ipynb())["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown", "code"]
    assert (cells[1]["outputs"][0]["text"], cells[3]["outputs"]) == ("x\n42\n", [])
    with pytest.raises(AssertionError):
        Notebook.run("# T\n\n```python\nassert False\n```\n")


def test_links_of_a_document_lead_to_pages_of_the_site():
    site, text = (
        Site(),
        "[a.md](../models.md#gguf) [b](../../examples/forward.py) [x](https://e.f)\n",
    )
    fence = "```\n[a](../models.md)\n```\n"
    found = site.linked(text + fence, "docs/measured/README.md")
    pages = "[a](../models.md#gguf) [b](../source/examples/forward.py.md)"
    assert found.startswith(pages)
    assert found.endswith(f"(https://e.f)\n{fence}")
    assert site.shown == {"examples/forward.py": "source/examples/forward.py"}
    assert described(PAGE) == ("A title", "About it.")


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    links = "b.html", "b.html#there", "https://other.org/x#y", "#top", "b.html#gone", "c.html"
    (tmp_path / "a.html").write_text("".join(f'<a href="{link}">x</a>' for link in links))
    assert [*broken(tmp_path)] == [
        "a.html: b.html#gone is no anchor of its page",
        "a.html: c.html is no file of the site",
    ]
