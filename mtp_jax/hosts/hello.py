"""What must be the same on every rank, and the words for what is not."""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

_BEGINNING = 1 << 16  # of each file; it holds the whole header of most weights
_PACKAGES = ("mtp-jax", "jax", "jaxlib", "ml_dtypes", "numpy")


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what is compiled."""
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def folder_digest(folder: Path) -> str:
    """A digest of the names and sizes of the files of a folder and of how each begins, hidden ones left out.

    It tells another checkpoint, without reading all of it.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_BEGINNING))
    return digest.hexdigest()[:16]


def options_of(config: Any, without: tuple[str, ...] = ("seed",)) -> str:
    """The options of a dataclass as JSON, without those of one rank alone."""
    return json.dumps({k: v for k, v in asdict(config).items() if k not in without}, sort_keys=True)


def difference(mine: Mapping[str, str], theirs: Mapping[str, Any], rank: int) -> str | None:
    """In words, the first thing in which a follower is not as the leader; None: there is none."""
    for name in dict.fromkeys((*mine, *theirs)):
        if mine.get(name) != theirs.get(name):
            here, there = _apart(mine.get(name), theirs.get(name))
            return (
                f"rank {rank} differs from rank 0 in {name}: {there!s:.200} there, {here!s:.200} on rank 0; "
                "start every rank with the same model, options, mesh and packages"
            )
    return None


def _apart(mine: Any, theirs: Any) -> tuple[Any, Any]:
    """Of two JSON objects only what differs."""
    try:
        a, b = json.loads(mine), json.loads(theirs)
        names = [n for n in dict.fromkeys((*a, *b)) if a.get(n) != b.get(n)]
        left, right = (", ".join(f"{n} = {x.get(n)}" for n in names) for x in (a, b))
        return left, right
    except (AttributeError, TypeError, ValueError):
        return mine, theirs
