"""Small checkpoints with the numbers an independent implementation computes from them (see README.md).

The variants share most of their tensors, so their weights are in one archive, a fifth of their size; draft
heads and their trunks are in another, the numbers of all in a third.
Checkpoints are assembled under build/ when a test first asks for one, with the numbers beside them.
"""

import functools
import hashlib
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent
ARCHIVES = tuple(GOLDEN / f"{name}.tar.xz" for name in ("weights", "heads", "expected"))
HEADS = tuple(sorted(path.parent.name for path in GOLDEN.glob("*/draft")))
"""Trunks without NextN layers, each with a draft head beside it."""
EAGLES, BLOCKS = (tuple(v for v in HEADS if v.startswith("eagle3") == eagle) for eagle in (True, False))
# A variant whose checkpoint only leaves out copies of tensors, and the variant that has its numbers.
SAME = {"no_mtp_head": "v3"}
# Hyper-connections and compressed attention: numbers of streams, at some rows of a long prompt.
V4 = ("v4_fp4",)
VARIANTS = tuple(sorted({path.parent.name for path in GOLDEN.glob("*/model")} - {*HEADS, *V4}))
# Variants that an engine decodes.
DECODED = (
    "rigged", "rigged_mtp2", "v3", "mtp2", "no_q_lora", "tied", "glm47_flash",
    "dsa_v32", "dsa_v32_rigged", "dsa_glm5", "dsa_glm52", "glm45", "glm46", "glm46_bf16",
)  # fmt: skip
# The fast tests decode one variant of each form of block; the first four share a form.
DECODED_FAST = ("rigged", "rigged_mtp2", "v3", "mtp2", "dsa_v32_rigged", "dsa_glm52", "glm46")
LOW_PRECISION = ("bf16", "fp8", "fp8_ue8m0")

_BUILD = GOLDEN.parent.parent / "build"


def model_dir(variant: str = "v3", part: str = "model") -> Path:
    """The checkpoint folder of a variant. part: "model", of v3 also "nextn", "xllm_mtp", of heads "draft"."""
    return _assembled() / variant / part


@functools.cache
def _assembled() -> Path:
    """Every variant's folders with the weights and the numbers in their place."""
    settings = sorted(GOLDEN.glob("*/*/*.json"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*settings, *ARCHIVES))).hexdigest()
    whole = _BUILD / f"golden-{digest[:16]}"
    if not whole.exists():
        _BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILD) as scratch:
            new = Path(scratch) / "golden"
            for packed in ARCHIVES:
                _unpack(packed, new)
            for path in settings:
                shutil.copyfile(path, new / path.relative_to(GOLDEN))
            try:
                new.rename(whole)
            except OSError:  # another process was faster
                if not whole.exists():
                    raise
    return whole


def _unpack(packed: Path, new: Path) -> None:
    with tarfile.open(packed) as archive:
        for member in archive:
            tensors = archive.extractfile(member)
            assert tensors is not None, f"{member.name} is no file"
            (new / member.name).parent.mkdir(parents=True, exist_ok=True)
            (new / member.name).write_bytes(tensors.read())


def raw_config(variant: str = "v3") -> dict:
    """Its config.json."""
    return json.loads((GOLDEN / variant / "model" / "config.json").read_text())


@functools.cache
def expected(variant: str = "v3", of: str = "expected") -> dict[str, np.ndarray]:
    """Its numbers; README.md explains the keys. of: "trees": of an EAGLE-3 head's trees."""
    return load_file(_assembled() / SAME.get(variant, variant) / f"{of}.safetensors")
