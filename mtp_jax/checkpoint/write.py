"""Write checkpoints: the release layout, and the NextN layers alone as SGLang or xLLM reads them."""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mtp_jax.checkpoint.draft import is_beside_block, nextn_of
from mtp_jax.checkpoint.folder import INDEX, read_config
from mtp_jax.checkpoint.formats import spec_names
from mtp_jax.checkpoint.plan import LoadPlan, make_plan
from mtp_jax.checkpoint.read import is_copy
from mtp_jax.checkpoint.safetensors_file import DTYPES, Tensor
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_json, family_of
from mtp_jax.model.head import DRAFT_HEAD
from mtp_jax.model.narrow import is_narrow
from mtp_jax.model.params import Params, Spec, param_specs, type_of

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\..+")
SHARD_BYTES = 5_000_000_000  # of one file, as the releases have them
_OWN_FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write; ``data()`` returns its values, of dtype ``DTYPES[dtype]``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def save_checkpoint(
    directory: str | Path,
    cfg: ModelConfig,
    params: Params,
    dtype: str = "bfloat16",
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``params`` as a folder in the release layout: config.json and safetensors, sharded if large.

    Norms, the router and its bias stay float32; everything else becomes ``dtype``. NextN layers are written
    in place (layer L + k), their copies of embedding and head only where they are not the trunk's, and so are
    DeepSeek-V4's DSpark stages. Files of an earlier checkpoint in the folder are replaced; other files, such
    as a tokenizer, are left alone.
    Raises ConfigError for an unknown dtype, CheckpointError for params of another model or kept narrow.
    """
    if dtype not in type_of:
        raise ConfigError(f"dtype {dtype!r} is not supported; expected one of {', '.join(type_of)}")
    check_no_narrow(params)
    if params.drafter is not None and not (cfg.drafter and cfg.drafter.inside):
        raise CheckpointError("a draft head is not written: it stays in the folder that it was loaded from")
    own = [(p.embed is not None, p.head is not None) for p in params.nextn]
    write_folder(Path(directory), _pieces(param_specs(cfg, own), params, dtype), max_shard_bytes)
    write_json(Path(directory) / "config.json", config_json(cfg) | {"torch_dtype": dtype})


def save_drafter(directory: Path, cfg: ModelConfig, params: Params, raw: JsonObject) -> None:
    """Write the NextN layers, or the head, alone in bfloat16, for ``draft_model`` of the model of ``cfg``.

    NextN layers have their names in the release (``model.layers.{L + k}``), a head's tensors the
    names that its trainer gives.

    Args:
        params: parameters, of which the drafter's are written.
        raw: the config.json to write, of the model or of the head.

    Raises:
        CheckpointError: params of another model.
    """
    specs = param_specs(cfg, [(p.embed is not None, p.head is not None) for p in params.nextn])

    def alone(tree: Params) -> Params:
        return replace(tree, embed=None, layers=(), norm=None, head=None, hyper_head=None)

    prefix = f"{DRAFT_HEAD}."
    pieces = [
        replace(p, name=p.name.removeprefix(prefix)) for p in _pieces(alone(specs), alone(params), "bfloat16")
    ]
    write_folder(directory, pieces, SHARD_BYTES)
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    write_json(directory / "config.json", raw | {"torch_dtype": "bfloat16"})


def write_folder(directory: Path, pieces: Iterable[NewTensor], max_shard_bytes: int) -> None:
    """Write the safetensors files of a folder; earlier files are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = _split(pieces, max_shard_bytes)
    count = len(shards)
    single = count == 1
    files = ["model.safetensors" if single else f"model-{i:05d}-of-{count:06d}.safetensors"
             for i in range(1, count + 1)]  # fmt: skip
    for file, shard in zip(files, shards, strict=True):
        write_file(directory / f"{file}.part", shard)
    for file in files:
        os.replace(directory / f"{file}.part", directory / file)
    if not single:
        _write_index(directory, dict(zip(files, shards, strict=True)))
    else:
        (directory / INDEX).unlink(missing_ok=True)
    for path in directory.iterdir():
        if _OWN_FILES.fullmatch(path.name) and path.name not in files:
            path.unlink()


def check_no_narrow(params: Params) -> None:
    """Raises CheckpointError for narrow weights, as a written folder has one dtype."""
    kinds = {type(x).__name__.lower() for x in jax.tree.leaves(params, is_leaf=is_narrow) if is_narrow(x)}
    if kinds:
        raise CheckpointError(
            f"weights in {' and '.join(sorted(kinds))} are not written; load with narrow='dequantise' to save"
        )


ExportLayout = Literal["lmsys", "xllm"]


def export_nextn(model_dir: str | Path, out_dir: str | Path, layout: ExportLayout = "lmsys") -> None:
    """Write the NextN layers of a model to a folder of their own, in the layout that SGLang or xLLM reads.

    Tensors are copied byte for byte, all tensors of narrow weights included. In the layout "lmsys", SGLang's,
    copies of the trunk's embedding and head are left out; "xllm" has both. DeepSeek-V4's layers, or DSpark
    stages, keep their names.

    Raises:
        CheckpointError: the model has no NextN layer, or the folder holds anything.
        ConfigError: the layout does not have such layers.
    """
    plan, out = make_plan(model_dir), new_folder(out_dir)
    cfg, family = plan.config, family_of(plan.config)
    if not cfg.drafts:
        raise CheckpointError(f"{model_dir} has no NextN layer: nothing to export")
    if layout == "xllm":
        file, tensors, changes = (
            "mtp_layer_parameters.safetensors",
            _for_xllm(plan),
            family.exported_to_xllm(cfg),
        )
    else:
        file, tensors, changes = "nextn_layer_parameters.safetensors", _for_lmsys(plan), family.exported(cfg)
    pieces = [NewTensor(name, t.dtype, t.shape, t.array) for name, t in tensors.items()]
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / file, pieces)
    _write_index(out, {file: pieces})
    raw = read_config(model_dir)[1]
    write_json(out / "config.json", {k: v for k, v in raw.items() if k not in _OF_TRUNK_LAYERS} | changes)


def _for_lmsys(plan: LoadPlan) -> dict[str, Tensor]:
    cfg, family = plan.config, family_of(plan.config)
    copies = {name for name in plan.duplicates if is_copy(plan, name)}
    return {
        family.exported_name(cfg, layer, name): tensor
        for name, tensor in plan.tensors.items()
        if (layer := nextn_of(cfg, name)) is not None and name not in copies
    }


def _for_xllm(plan: LoadPlan) -> dict[str, Tensor]:
    cfg, family = plan.config, family_of(plan.config)
    first, found = f"{family.nextn_name(cfg, 0)}.", plan.tensors
    own = {name.removeprefix(first): tensor for name, tensor in found.items() if name.startswith(first)}
    embed = found["model.embed_tokens.weight"]
    tables = {"embed_tokens.weight": embed, "shared_head.head.weight": found.get("lm_head.weight", embed)}
    named = {
        name: f"model.{name}" if is_beside_block(name) else f"model.layers.0.{name}" for name in tables | own
    }
    return {named[name]: tensor for name, tensor in (tables | own).items()}


# Keys of config.json with a value for each trunk layer's indexer.
_OF_TRUNK_LAYERS = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def new_folder(path: str | Path) -> Path:
    """The path of a folder to write, which is not created yet. Raises CheckpointError if it is not empty."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is there already and not empty; name a new folder or an empty one")
    return path


def write_file(path: Path, pieces: Iterable[NewTensor]) -> None:
    """Write one safetensors file. All its tensors are in memory then.

    Raises CheckpointError where the disk takes no more.
    """
    tensors = {p.name: np.ascontiguousarray(p.data()) for p in pieces}
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:  # a full disk, for one
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def write_json(path: Path, value: object) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=2, sort_keys=path.name != INDEX) + "\n", encoding="utf-8")
    os.replace(part, path)


def _write_index(directory: Path, files: dict[str, Sequence[NewTensor]]) -> None:
    total = sum(p.nbytes for pieces in files.values() for p in pieces)
    weight_map = {p.name: file for file, pieces in files.items() for p in pieces}
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split(pieces: Iterable[NewTensor], limit: int) -> list[list[NewTensor]]:
    shards: list[list[NewTensor]] = []
    room = 0
    for p in pieces:
        if not shards or p.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(p)
        room -= p.nbytes
    return shards


def _pieces(declared: Params, params: Params, dtype: str) -> list[NewTensor]:
    """Every tensor of ``params`` in the order of the release. declared: their specs."""
    specs, tree = jax.tree.flatten(declared)
    arrays, got = jax.tree.flatten(params)
    if got != tree or [a.shape for a in arrays] != [s.shape for s in specs]:
        raise CheckpointError("the parameters are not those of this config: their tree or shapes differ")

    @functools.lru_cache(maxsize=3)  # tensors of an array are written together; kv_b_proj has two arrays
    def host(i: int) -> np.ndarray:
        return np.asarray(arrays[i])

    sources: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for i, spec in enumerate(specs):
        for at, name in np.ndenumerate(spec_names(spec)):
            sources.setdefault(str(name), []).append((i, at))

    def piece(name: str, parts: list[tuple[int, tuple[int, ...]]]) -> NewTensor:
        spec: Spec = specs[parts[0][0]]
        kind = "I32" if spec.ids else "F32" if spec.dtype(dtype) == "float32" else "BF16"

        def data() -> np.ndarray:
            values = [host(i)[at] for i, at in parts]
            # kv_b_proj is stored as two parameters, each with a part of every head's rows, in their order.
            value = values[0] if len(values) == 1 else np.concatenate(values, axis=1)
            return value.reshape(spec.tensor_shape).astype(DTYPES[kind])

        return NewTensor(name, kind, spec.tensor_shape, data)

    experts_at: dict[str, int] = {}

    def order(name: str) -> tuple[int, int]:
        place, match = sources[name][0][0], _EXPERT.fullmatch(name)
        return (experts_at.setdefault(match[1], place), int(match[2])) if match else (place, 0)

    return [piece(name, sources[name]) for name in sorted(sources, key=order)]
