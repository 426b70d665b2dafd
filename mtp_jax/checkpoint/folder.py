"""A checkpoint folder in Hugging Face layout: one file, or an index and its shards."""

import contextlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from mtp_jax.checkpoint.compressed_tensors import as_released
from mtp_jax.checkpoint.safetensors_file import Tensor, open_file
from mtp_jax.errors import CheckpointError, ConfigError, shortlist, shown
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_vocab import FILE as DRAFT_VOCAB
from mtp_jax.model.family import config_of, text_part
from mtp_jax.model.hf_config import missing_folder, read_config_json, read_json
from mtp_jax.model.layer_names import layer_of, mtp_layer_of, nextn_layers
from mtp_jax.text.tokenizer import FILES as TOKENIZER_FILES

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST_NAME = 255  # bytes: NAME_MAX of Linux (limits.h)


@dataclass(frozen=True)
class Folder:
    """Tensors by name, in file order; tensors outside the text model, which are not read, are kept apart."""

    path: Path
    tensors: dict[str, Tensor]
    unread: dict[str, Tensor] = field(default_factory=dict)


# Where a multimodal checkpoint (Kimi-K2.5) has its text model, and its other parts.
_TEXT = "language_model."
_OTHER = ("vision_tower.", "mm_projector.", "multi_modal_projector.")


def as_folder(path: Path, tensors: dict[str, Tensor]) -> Folder:
    """Tensors as a folder, under the names of a release's text model.

    Raises CheckpointError for two tensors of one name.
    """
    folder, nested = Folder(path, {}), any(name.startswith(_TEXT) for name in tensors)
    short = {name: name.removeprefix(_TEXT) if nested else name for name in tensors}
    text = {new: tensors[name] for name, new in short.items()}
    for name, own in short.items():
        new, tensor = as_released(own, tensors[name], text)
        into = folder.unread if nested and name.startswith(_OTHER) else folder.tensors
        if new in into:
            raise CheckpointError(f"{tensor} is also there as {shown(into[new].name)}; expected one of them")
        into[new] = tensor
    return folder


def open_folder(path: str | Path) -> Folder:
    """Check every header of a checkpoint folder; no tensor is read.

    Draft layers alone are taken of files that an index does not name, or that lie beside model.safetensors.
    Files may be links to elsewhere (the Hugging Face cache is made of them), but the index may only name
    files of its own folder. Raises CheckpointError naming file and tensor.
    """
    path = Path(path)
    if not os.path.isdir(path):  # also False for a name that no folder can have
        raise CheckpointError(missing_folder(path))
    if not (path / INDEX).exists():
        return as_folder(path, _with_drafts(path, open_file(_single_file(path))))
    weight_map = _weight_map(path / INDEX)
    missing = sorted(f for f in set(weight_map.values()) if not (path / f).is_file())
    if missing:
        raise CheckpointError(f"{path}: shards that {INDEX} names are missing: {shortlist(missing)}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in open_file(path / file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{tensor} is also in {tensors[name].file.path.name}; expected it in one shard, "
                    f"{weight_map.get(name, 'which the index does not name')}"
                )
            tensors[name] = tensor
    for name, file in weight_map.items():
        got = tensors[name].file.path.name if name in tensors else "no shard"
        if got != file:
            raise CheckpointError(f"{path / INDEX}: tensor {shown(name)} should be in {file}; it is in {got}")
    return as_folder(path, _with_drafts(path, tensors))


def _with_drafts(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a folder, and the draft layers in its other files, as tools that quantise write them.

    A file that has any of these tensors is a copy, and is left out like a file that is damaged. Raises
    CheckpointError for a tensor in two files.
    """
    read = {tensor.file.path for tensor in tensors.values()}
    others: list[dict[str, Tensor]] = []
    for file in sorted(p for p in path.glob("*.safetensors") if p.is_file() and p not in read):
        with contextlib.suppress(CheckpointError):
            others.append(open_file(file))
    found = dict(tensors)
    others = [other for other in others if not other.keys() & tensors.keys()]
    drafts = {*nextn_layers(name.removeprefix(_TEXT) for each in (tensors, *others) for name in each)} - {-1}
    for name, tensor in (item for other in others for item in other.items()):
        short = name.removeprefix(_TEXT)
        if layer_of(short) in drafts or mtp_layer_of(short) is not None:
            if name in found:
                raise CheckpointError(
                    f"{tensor} is also in {found[name].file.path.name}; expected it in one file"
                )
            found[name] = tensor
    return found


def read_config(path: str | Path) -> tuple[ModelConfig, JsonObject]:
    """config.json of a folder, and its JSON; of a multimodal model the text part.

    generation_config.json decides the end-of-text ids.
    Raises ConfigError for an unsupported model or a folder without config.json.
    """
    path = Path(path)
    raw = text_part(read_config_json(path / "config.json"))
    cfg = config_of(raw)
    if (path / "generation_config.json").is_file():
        cfg = cfg.with_eos(read_json(path / "generation_config.json").get("eos_token_id"))
    return cfg, raw


def _single_file(path: Path) -> Path:
    files = sorted(p for p in path.glob("*.safetensors") if p.is_file())
    if len(files) == 1:
        return files[0]
    if path / SINGLE in files:
        return path / SINGLE
    if files:
        raise CheckpointError(
            f"{path} has {len(files)} safetensors files ({shortlist(p.name for p in files)}) and no {INDEX}; "
            f"expected a single file, {SINGLE}, or an index that says which tensor is where"
        )
    unsafe = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    hint = (
        f"; {shortlist(unsafe)} is not read: that format can run code. Convert it"
        if unsafe
        else "; random weights need none (load_format = 'dummy')"
    )
    raise CheckpointError(f"{path} has no safetensors file{hint}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index).get("weight_map")
    except ConfigError as e:
        raise CheckpointError(str(e)) from e
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; expected an object from tensor to file name")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise CheckpointError(
                f"{index}: tensor {shown(name)} is said to be in {file!r:.200}; expected the name of a "
                f".safetensors file in the same folder, without directories, of at most {_LONGEST_NAME} bytes"
            )
    return weight_map


def _is_plain(file: str) -> bool:
    if len(file.encode(errors="replace")) > _LONGEST_NAME:
        return False
    return file.endswith(".safetensors") and not any(c in file for c in "/\\:\0") and not file.startswith(".")


def copy_text_files(source: Path, target: Path) -> None:
    """Copy the small files of a checkpoint: tokenizer, chat templates, generation settings, draft tokens."""
    names = ("tokenizer_config.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
    files = [source / name for name in (*TOKENIZER_FILES, *names, "generation_config.json", DRAFT_VOCAB)]
    for file in (*files, *source.glob("additional_chat_templates/*.jinja")):
        if file.is_file():
            to = target / file.relative_to(source)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, to)
