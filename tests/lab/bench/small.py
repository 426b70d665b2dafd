"""A small model in a folder, whose drafts are accepted."""

from dataclasses import replace
from pathlib import Path

from mtp_jax.checkpoint import save_checkpoint
from tests import tiny_tokenizer
from tests.models import SMALL, rigged


def model(folder: Path) -> Path:
    """Write it without a tokenizer; return the folder."""
    save_checkpoint(folder, SMALL, rigged(SMALL, seed=2, noise=0.3), "float32")
    return folder


def with_text(folder: Path) -> Path:
    """Write it with a tokenizer whose tokens are of one or two bytes, for texts of 256 tokens."""
    cfg = replace(SMALL, max_position_embeddings=256)
    save_checkpoint(folder, cfg, rigged(cfg, seed=2, noise=0.3), "float32")
    return tiny_tokenizer.write(folder, cfg.vocab_size)
