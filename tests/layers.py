"""Layers of the code, lowest first: a module imports from its own package and from layers before its own."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    ("foreign",),
    ("errors", "json_object", "machine", "options", "spread"),
    ("hub", "wire"),
    ("model", "text"),
    ("decode",),
    ("heads",),
    ("checkpoint",),
    ("simulate", "store"),
    ("engine", "hosts"),
    ("api",),
    ("__init__",),
    ("commands",),
    ("cluster", "lab"),
    ("__main__",),
)
# Folders of rooms that have layers of their own, lowest first.
FLOORS = {
    "serve": ("watch", "base", "bodies", "answers", "routes", "http"),
    "mtp_jax.cluster": ("handover", "on_ray", "commands"),
    "mtp_jax.lab": ("planning", "forecast", "bench", "profiling", "train", "commands"),
}


@functools.cache
def modules(package: str) -> dict[str, str]:
    """Dotted module name -> source of every file of a package; empty when the package does not exist."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def imports(module: str, source: str) -> tuple[str, ...]:
    """Dotted names that a module imports anywhere in its text; `from a import b` gives "a.b"."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += [node.module] if node.module else []
            found += [".".join([*base, alias.name]) for alias in node.names]
    return tuple(found)
