"""A small model whose experts are packed as Kimi-K2's are, value by value, without the code under test."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.checkpoint.safetensors_file import DTYPES
from tests.checkpoint.files import Raw, Tensors, edit_json, read_folder, write_raw
from tests.models import TINY, rigged

GROUP = 32
# Its NextN layer has experts, too.
CONFIG = replace(TINY, hidden_size=64, moe_intermediate_size=32, nextn_moe=(True,))
QUANTISATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
VISION = {
    "vision_tower.encoder.blocks.0.wqkv.weight": Raw("BF16", [4, 4], bytes(32)),
    "vision_tower.patch_embed.pos_emb.weight": Raw("BF16", [2, 4], bytes(16)),
    "mm_projector.proj.0.weight": Raw("BF16", [4, 2], bytes(16)),
}


@dataclass(frozen=True)
class Models:
    """Folders of one model: as it is packed, with the same weights as float32, and nested beside vision."""

    packed: Path
    plain: Path
    nested: Path


def raw(array: np.ndarray) -> Raw:
    """An array as a tensor of a file."""
    dtype = next(name for name, kind in DTYPES.items() if kind == array.dtype)
    return Raw(dtype, list(array.shape), array.tobytes())


def quantised(w: np.ndarray, group: int, kind: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values from -8 to 7 and the scales of their groups; each group has both signs' extremes somewhere."""
    grouped = w.reshape(w.shape[0], -1, group)
    scale = (np.abs(grouped).max(axis=-1) / 7.5).astype(kind)
    return np.clip(np.round(grouped / scale[..., None].astype(np.float32)), -8, 7).astype(int), scale


def pack(values: np.ndarray) -> np.ndarray:
    """Eight values to an int32, the first in the lowest bits, each with 8 added."""
    out = np.zeros((values.shape[0], values.shape[1] // 8), np.int32)
    for i, row in enumerate(values):
        for k in range(out.shape[1]):
            word = 0
            for j in range(8):
                word |= (int(row[8 * k + j]) + 8) << (4 * j)
            out[i, k] = word - (1 << 32 if word >= 1 << 31 else 0)
    return out


def is_expert(name: str) -> bool:
    return ".experts." in name


def write_models(
    folder: Path,
    group: int = GROUP,
    kind: Any = ml_dtypes.bfloat16,
    packs: Callable[[str], bool] = is_expert,
) -> Models:
    """The three folders, under ``folder``. packs: which weights are packed, by name."""
    models = Models(*(folder / name for name in ("packed", "plain", "nested")))
    save_checkpoint(models.plain, CONFIG, rigged(CONFIG), dtype="float32")
    tensors = read_folder(models.plain)
    plain, packed = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if packs(name):
            w = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
            values, scale = quantised(w, group, kind)
            wide = values.astype(np.float32) * scale[..., None].astype(np.float32)
            plain[name] = raw(wide.reshape(w.shape))
            del packed[name]
            packed[f"{name}_packed"] = raw(pack(values.reshape(w.shape)))
            packed[f"{name}_scale"] = raw(scale)
            packed[f"{name}_shape"] = raw(np.array(w.shape, np.int64))
    config = json.loads((models.plain / "config.json").read_text())
    quantisation = json.loads(json.dumps(QUANTISATION))
    quantisation["config_groups"]["group_0"]["weights"]["group_size"] = group
    text = config | {"model_type": "kimi_k2", "quantization_config": quantisation}
    outer = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 4},
    }
    nested = {f"language_model.{name}": t for name, t in packed.items()} | VISION
    write_raw(models.plain / "model.safetensors", plain)
    for path, told, files in ((models.packed, text, packed), (models.nested, outer, nested)):
        path.mkdir()
        write(path, told, files)
    return models


def write(path: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """A folder's two files."""
    (path / "config.json").write_text(json.dumps(config))
    write_raw(path / "model.safetensors", tensors)


def edit_quantisation(path: Path, **changes: Any) -> None:
    """Change what a folder's config.json says of its weights' groups."""
    found = json.loads((path / "config.json").read_text())["quantization_config"]
    found["config_groups"]["group_0"]["weights"] |= changes
    edit_json(path / "config.json", quantization_config=found)
