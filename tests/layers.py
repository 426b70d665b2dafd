"""Layers of the code, lowest first: a module imports from its own package and from layers before its own."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    ("errors", "json_object", "machine", "options"),
    ("wire",),
    ("model", "text"),
    ("checkpoint", "decode", "planning"),
    ("simulate", "store"),
    ("engine", "hosts"),
    ("api",),
    ("forecast", "handover"),
    ("__init__", "bench"),
    ("profiling", "train"),
    ("commands",),
    ("__main__",),
)
# Folders of serve, lowest first.
FLOORS = ("watch", "base", "bodies", "answers", "routes", "http", "cluster")
