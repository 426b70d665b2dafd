"""Facts that must be equal on every rank, and the description of a difference."""

import json
import platform
from collections.abc import Mapping
from importlib import metadata

_PACKAGES = ("mtp-jax", "jax", "jaxlib", "ml_dtypes", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages on which compiled programs depend."""
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def options_of(values: Mapping[str, object]) -> str:
    """Options as JSON, without the seed, which each rank draws for itself."""
    return json.dumps({k: v for k, v in values.items() if k != "seed"}, sort_keys=True)


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> str | None:
    """The first difference between a follower and the leader, in words; None if there is none."""
    for name in dict.fromkeys((*mine, *theirs)):
        if mine.get(name) != theirs.get(name):
            here, there = _apart(mine.get(name), theirs.get(name))
            return (
                f"rank {rank} differs from rank 0 in {name}: {there!s:.200} there, {here!s:.200} on rank 0; "
                "start every rank with the same model, options, mesh and packages"
            )
    return None


def _apart(mine: str | None, theirs: str | None) -> tuple[str | None, str | None]:
    """The parts of two JSON objects that differ."""
    try:
        a, b = json.loads(mine or ""), json.loads(theirs or "")
        names = [n for n in dict.fromkeys((*a, *b)) if a.get(n) != b.get(n)]
        left, right = (", ".join(f"{n} = {x.get(n)}" for n in names) for x in (a, b))
        return left, right
    except (AttributeError, TypeError, ValueError):
        return mine, theirs
