"""Small checkpoints with the numbers an independent implementation computes from them (see README.md)."""

import functools
import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent
VARIANTS = tuple(sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz")))
LOW_PRECISION = ("bf16", "fp8", "fp8_ue8m0")


def model_dir(variant: str = "v3") -> Path:
    """The checkpoint folder of a variant."""
    return GOLDEN / variant / "model"


def raw_config(variant: str = "v3") -> dict:
    """Its config.json."""
    return json.loads((model_dir(variant) / "config.json").read_text())


@functools.cache
def expected(variant: str = "v3") -> dict[str, np.ndarray]:
    """Its numbers; README.md explains the keys."""
    with np.load(GOLDEN / variant / "expected.npz", allow_pickle=False) as file:
        return dict(file)
