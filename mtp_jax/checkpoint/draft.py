"""Parameters that draft beside the trunk: NextN layers in the three layouts in use, or a draft head.

* in place: ``model.layers.{L + k}.*``, beside the trunk's layers or alone;
* lmsys NextN (SGLang's export): ``model.layers.{k}.*``;
* xLLM export: the block under ``model.layers.0.*``, the rest (enorm, ...) directly under ``model.*``.

DeepSeek-V4 has its draft layers in place alone, as ``mtp.{k}.*`` (``mtp_layers``).
"""

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from mtp_jax.checkpoint.folder import Folder
from mtp_jax.checkpoint.formats import by_tensors
from mtp_jax.checkpoint.head import check_ids, head_tensors
from mtp_jax.checkpoint.safetensors_file import Tensor
from mtp_jax.errors import CheckpointError, ConfigError, shortlist
from mtp_jax.heads.kinds import kind_of
from mtp_jax.heads.stages.declared import StagesConfig
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import IndexerConfig, ModelConfig
from mtp_jax.model.family import config_of_file, family_of
from mtp_jax.model.family.mtp_layers import STAGES
from mtp_jax.model.head import Captures, DraftHead
from mtp_jax.model.hf_config import read_json
from mtp_jax.model.layer_names import LAYER, layer_of, mtp_layer_of, nextn_layers

IN_PLACE, LMSYS, XLLM = "in place", "lmsys NextN", "xLLM export"

_BESIDE_BLOCK = re.compile(r"(?:enorm|hnorm|eh_proj|shared_head|embed_tokens)\..+")
# Fields in which a draft's config.json may differ from the trunk's: they describe the export or the trunk.
FREE = {
    "num_hidden_layers", "first_k_dense_replace", "moe_layer_freq", "num_nextn_predict_layers", "nextn_moe",
    "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_ids", "dtype", "fp8",
    "fp4", "int4_group", "nvfp4", "drafter", "family",
}  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """The NextN layers of a model, or a draft head.

    Attributes:
        folder: the folder with the NextN layers or the head.
        layout: IN_PLACE, LMSYS or XLLM; of a head its kind; ``STAGES`` of DSpark stages.
        tensors: their tensors under the names of the release, of a head under the names of ``specs``.
        config: the configuration in this folder's config.json, which says how these weights are stored.
        unknown: tensors in the folder that do not belong to the layout.
        head: the head, or the stages; None of NextN layers.
    """

    folder: Path
    layout: str
    tensors: dict[str, Tensor]
    config: ModelConfig
    unknown: dict[str, Tensor] = field(default_factory=dict)
    head: DraftHead | None = None

    def described(self, raw: JsonObject, cfg: ModelConfig) -> "Draft":
        """The draft with its stages, if it has any, as config.json describes them. Raises ConfigError."""
        if self.layout != STAGES:
            return self
        count = len({mtp_layer_of(name) for name in self.tensors})
        try:
            return replace(self, head=StagesConfig.of(raw, cfg, count))
        except ConfigError as e:
            raise ConfigError(f"{self.folder} has {count} DSpark stages: {e}") from e


def nextn_of(cfg: ModelConfig, name: str) -> int | None:
    """Number of the NextN layer that a tensor of the release belongs to, None outside these layers."""
    return family_of(cfg).nextn_of(cfg, name)


def in_place(folder: Folder, cfg: ModelConfig) -> Draft:
    """The draft layers of a model's own folder; none if it has none.

    Raises CheckpointError if they do not follow the trunk's layers, or are of two kinds.
    """
    layout, names = family_of(cfg).draft_layers(cfg, folder.tensors, folder.path)
    return Draft(folder.path, layout or IN_PLACE, {name: folder.tensors[name] for name in names}, cfg)


def _of_layer(cfg: ModelConfig, name: str) -> object:
    """A field as far as it describes NextN layers: not which layers of the trunk share an indexer."""
    value = getattr(cfg, name)
    return replace(value, shared=()) if isinstance(value, IndexerConfig) else value


def open_draft(folder: Folder, cfg: ModelConfig, captures: Captures | None = None) -> Draft:
    """The NextN layers or the head of a separate folder for the model of ``cfg``.

    Names of tensors show the layout of NextN layers. captures: see ``DraftHead.read``. Raises
    CheckpointError for a folder without NextN layers, or whose layers do not fit the model; ConfigError for a
    head that does not.
    """
    raw = read_json(folder.path / "config.json")
    if found := _open_head(folder, raw, cfg, captures):
        return found
    if captures is not None:
        raise ConfigError(
            f"draft_captures = {captures!r}, but {folder.path} has NextN layers, which read no taps"
        )
    try:
        own = by_tensors(config_of_file(folder.path / "config.json"), folder.tensors)
    except ConfigError as e:
        raise ConfigError(
            f"{folder.path} has no head of a known kind (drafter names others), and as NextN layers: {e}"
        ) from e
    _check_fit(own, cfg, folder.path)
    first = cfg.num_hidden_layers
    if family_of(cfg).keeps_names:
        draft = replace(in_place(folder, cfg), config=own)
        if not draft.tensors:
            raise CheckpointError(
                f"{folder.path} has no tensor of mtp.*; expected MTP layers, mtp.0.enorm.weight, or DSpark "
                "stages, mtp.0.main_proj.weight"
            )
        return draft.described(raw, cfg)
    if nextn_layers(folder.tensors)[:1] == [first]:
        return replace(in_place(folder, cfg), config=own)
    return _exported(folder, own, first)


def _open_head(folder: Folder, raw: JsonObject, cfg: ModelConfig, captures: Captures | None) -> Draft | None:
    try:
        if not (kind := kind_of(raw, folder.tensors)):
            return None
        tensors = head_tensors(folder, kind)
        head = kind.read(raw, cfg, tensors, captures)
        check_ids(tensors, cfg.vocab_size)
    except ConfigError as e:
        raise ConfigError(f"{folder.path}: {e}") from e
    return Draft(folder.path, head.name, tensors, head.sizes or cfg, head=head)


def _check_fit(own: ModelConfig, cfg: ModelConfig, path: Path) -> None:
    pairs = ((f.name, _of_layer(own, f.name), _of_layer(cfg, f.name)) for f in fields(cfg))
    differing = [
        f"{name} is {mine!r}, the model's is {trunks!r}"
        for name, mine, trunks in pairs
        if name not in FREE and mine != trunks
    ]
    if differing:
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(differing)}")


def _exported(folder: Folder, own: ModelConfig, first: int) -> Draft:
    """NextN layers under the names of an export. first: number of the trunk's layers."""
    layers = nextn_layers(folder.tensors)
    if layers == [-1]:
        layout, rename = XLLM, _from_xllm
    elif layers and layers == list(range(len(layers))):
        layout, rename = LMSYS, _from_lmsys
    else:
        at = f"at layers {shortlist(map(str, layers))}" if layers else "nowhere"
        raise CheckpointError(
            f"{folder.path} has no NextN layer for this model: enorm.weight and the like are {at}; expected "
            f"them in model.layers.{first} (in place), model.layers.0 (lmsys NextN) or model (xLLM export)"
        )
    draft = Draft(folder.path, layout, {}, own)
    for name, tensor in folder.tensors.items():
        new = rename(name, first)
        if new is None:
            draft.unknown[name] = tensor
        else:
            draft.tensors[new] = tensor
    return draft


def _from_lmsys(name: str, first: int) -> str | None:
    match = LAYER.fullmatch(name)
    return f"model.layers.{first + int(match[1])}.{match[2]}" if match else None


def is_beside_block(name: str) -> bool:
    """Whether a tensor of a NextN layer, by its name in the layer, is none of its decoder block."""
    return _BESIDE_BLOCK.fullmatch(name) is not None


def _from_xllm(name: str, first: int) -> str | None:
    if name.startswith("model.") and is_beside_block(special := name.removeprefix("model.")):
        return f"model.layers.{first}.{special}"
    return _from_lmsys(name, first) if layer_of(name) == 0 else None
