"""Engines whose pages go to files, too."""

from pathlib import Path
from typing import Any

from mtp_jax.engine.engine import Engine


def in_files(folder: Path) -> dict[str, Any]:
    """Options of an engine with files in this folder, for which prompts wait however slow the machine is."""
    return {"file_cache": folder, "file_cache_gib": 0.1, "file_cache_seconds": 600}


def known(engine: Engine) -> Engine:
    """An engine with files, of a model that is the same in all engines of a test."""
    assert engine.tier
    assert engine.tier.files
    engine.tier.files.identity = lambda: "one model"
    return engine


def written(engine: Engine) -> int:
    """Have all pages written that requests have left. Returns the number of files written."""
    assert engine.tier
    assert engine.tier.files
    while engine.tier.save():
        pass
    engine.tier.forget([])  # waits for the pages on their way
    engine.tier.files.settle()
    return engine.tier.files.stats().written
