"""Build the site: `python -m website OUT`. A warning of Sphinx or a link that leads nowhere is an error."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from website.links import broken
from website.stage import stage

# The cells of notebooks run for milliseconds and take seconds to compile.
_FAST = "--xla_backend_optimization_level=0"


def build(out: Path) -> int:
    """Write the site into a folder that is emptied first. Returns the exit status."""
    os.environ.setdefault("XLA_FLAGS", _FAST)
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        sources, beside = Path(folder, "sources"), Path(folder, "beside")
        stage(sources, beside)
        options = ["-q", "-E", "--fail-on-warning", "--keep-going", "-D", f"html_extra_path={beside}"]
        here = str(Path(__file__).parent)
        if status := sphinx([*options, "-c", here, "-d", f"{folder}/trees", str(sources), str(out)]):
            return status
    found = [*broken(out.resolve())]
    print(
        "\n".join(found) or f"{out}/index.html: {len([*out.rglob('*.html')])} pages, all links lead somewhere"
    )
    return bool(found)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m website OUT")
    sys.exit(build(Path(sys.argv[1])))
