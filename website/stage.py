"""The documents of the repository as Sphinx takes them, as agents do, and the files that they name.

README.md is the first page, and its table of documents is the navigation. A link to a document leads to its
page, a link to any other file of the repository to a page that shows the file.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from website.notebook import Notebook

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(\[[^]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| ([^|]+) \| (.*\]\(.*) \|$", re.MULTILINE)
# Drawn by the reader's browser, as on GitHub; without a network the text of the diagram stays.
_DRAW = """
<script type="module">
import mermaid from "https://cdn.jsdelivr.net/npm/mermaid@11.12.0/dist/mermaid.esm.min.mjs";
mermaid.initialize({ startOnLoad: true });
</script>
"""
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def documents() -> dict[str, str]:
    """{path of a document in the repository: path of its page, without ending}."""
    found = {"README.md": "index", "CHANGELOG.md": "changes"}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        inside = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        found[f"docs/{inside}.md"] = inside.replace("README", "index")
    return found


def described(text: str) -> tuple[str, str]:
    """The heading of a page, and the first sentence below it, without links; empty where a block is there."""
    heading, _, below = text.removeprefix("# ").partition("\n\n")
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", below.partition("\n\n")[0])
    if re.match(r"```|    |[#|-]", words):
        return heading, ""
    return heading, re.split(r"(?<=\.) ", " ".join(words.split()))[0].rstrip(":")


@dataclass
class Site:
    """Pages, and the files of the repository that links of theirs name.

    Attributes:
        pages: {path in the repository: path of the page, without ending}.
        shown: {path in the repository: path of the page that shows it}.
        assets: pictures, by their paths in the repository.
    """

    pages: dict[str, str] = field(default_factory=documents)
    shown: dict[str, str] = field(default_factory=dict)
    assets: set[str] = field(default_factory=set)

    def linked(self, text: str, of: str) -> str:
        """The text of the document ``of``, with links that lead to pages. Blocks of code stay."""
        parts = _FENCE.split(text)
        return "".join(p if i % 2 else _LINK.sub(lambda m: self._link(m, of), p) for i, p in enumerate(parts))

    def _link(self, found: re.Match[str], of: str) -> str:
        before, to, after = found.groups()
        if "://" in to:
            return found[0]
        path = os.path.normpath(PurePosixPath(of).parent / to)
        here = PurePosixPath(self.pages[of]).parent
        if path in self.pages:
            before = before.replace(".md]", "]")
            target = f"{self.pages[path]}.md"
        elif PurePosixPath(path).suffix == ".png":
            self.assets.add(path)
            target = path
        else:
            target = f"{self.shown.setdefault(path, f'source/{path}')}.md"
        return f"{before}{os.path.relpath(target, here)}{after}"


def groups(readme: str) -> list[tuple[str, list[str]]]:
    """Rows of the README's table of documents: a heading, and the paths that its links name."""
    table = readme.partition("\n## Documents\n")[2]
    return [(who, [*dict.fromkeys(re.findall(r"\]\(([^)#]+)", links))]) for who, links in _ROW.findall(table)]


def stage(sources: Path, beside: Path) -> None:
    """Write the pages for Sphinx, and the files that lie beside them on the site.

    sources: a folder for Markdown with Sphinx's directives. beside: a folder for files that are copied as
    they are: Markdown, notebooks with their outputs, llms.txt and llms-full.txt.
    """
    site, plain = Site(), dict[str, str]()
    for path, page in site.pages.items():
        text = site.linked((ROOT / path).read_text(encoding="utf-8"), path)
        if path.startswith("docs/notebooks/"):
            notebook, name = Notebook.run(text), f"{PurePosixPath(page).name}.ipynb"
            for folder in (sources, beside):
                _write(folder / f"{page}.ipynb", notebook.ipynb())
            text = notebook.markdown(name)
        plain[page] = text
        _write(beside / f"{page}.md", plain[page])
        drawn = _MERMAID.sub(lambda m: f'<pre class="mermaid">\n{m[1]}</pre>\n', plain[page])
        _write(sources / f"{page}.md", drawn + (_DRAW if drawn != plain[page] else ""))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _append(sources / "index.md", "\n".join(_contents(site, *row) for row in groups(readme)))
    measured = [path for path in site.pages if path.startswith("docs/measured/2")]
    _append(sources / "measured/index.md", _contents(site, "", measured))
    _show_files(site, sources)
    for asset in site.assets:
        for folder in (sources, beside):
            _write(folder / asset, (ROOT / asset).read_bytes())
    _write(beside / "llms.txt", _for_agents(site, readme, plain))
    _write(beside / "llms-full.txt", "\n\n".join(plain[page] for page in site.pages.values()))


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _append(path: Path, text: str) -> None:
    _write(path, path.read_text(encoding="utf-8") + text)


def _show_files(site: Site, sources: Path) -> None:
    """Write pages that show files, and for a folder a page with links to its files."""
    for path in [*site.shown]:
        if (ROOT / path).is_dir():
            files = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / path).glob("*.py"))]
            for file in files:
                site.shown.setdefault(file, f"source/{file}")
            links = [
                f"- [{file}]({PurePosixPath(file).relative_to(PurePosixPath(path).parent)}.md)"
                for file in files
            ]
            _write(sources / f"{site.shown[path]}.md", _shown(path, "\n".join(links)))
    for path in (path for path in site.shown if (ROOT / path).is_file()):
        language = _LANGUAGES.get(PurePosixPath(path).suffix, "text")
        code = (ROOT / path).read_text(encoding="utf-8")
        _write(sources / f"{site.shown[path]}.md", _shown(path, f"~~~~~~{language}\n{code}~~~~~~"))


def _shown(path: str, body: str) -> str:
    """A page outside of navigation and search."""
    return f"---\norphan: true\nnosearch: true\n---\n\n# {path}\n\n{body}\n"


def _contents(site: Site, caption: str, paths: list[str]) -> str:
    """A directive that puts documents into the navigation, below the page that it stands on."""
    entries = "\n".join(f"/{site.pages[path]}" for path in paths if path in site.pages)
    said = f":caption: {caption[0].upper() + caption[1:]}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{said}\n{entries}\n```\n"


def _for_agents(site: Site, readme: str, plain: dict[str, str]) -> str:
    """The list of pages in the form of llmstxt.org."""
    about = described(readme.partition("\n## ")[0])
    lines = [
        f"# {about[0]}",
        "",
        f"> {about[1]}",
        "",
        "All pages in one file: [llms-full.txt](llms-full.txt)",
    ]
    for who, paths in groups(readme):
        lines += ["", f"## {who[0].upper() + who[1:]}", ""]
        for page in (site.pages[path] for path in paths if path in site.pages):
            name, sentence = described(plain[page])
            lines.append(f"- [{name}]({page}.md)" + (f": {sentence}" if sentence else ""))
    return "\n".join(lines) + "\n"
