"""New values for the parameters of a model in memory, found and checked as a whole before one is replaced."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from numpy.typing import ArrayLike

from mtp_jax.checkpoint.draft import FREE, Draft, in_place, open_draft
from mtp_jax.checkpoint.folder import Folder, as_folder, open_folder, read_config
from mtp_jax.checkpoint.formats import STORED
from mtp_jax.checkpoint.int4 import PACKED
from mtp_jax.checkpoint.nvfp4 import OVER, SCALE
from mtp_jax.checkpoint.orbax_store import is_orbax
from mtp_jax.checkpoint.plan import LoadPlan, copied_from, match
from mtp_jax.checkpoint.read import Loader, is_copy
from mtp_jax.checkpoint.safetensors_file import hold
from mtp_jax.errors import CheckpointError, ConfigError, shortlist
from mtp_jax.heads.tables import EMBED
from mtp_jax.model.config import HeadConfig, ModelConfig
from mtp_jax.model.family import family_of
from mtp_jax.model.head import Captures, head_of
from mtp_jax.model.narrow import is_narrow, without_bits
from mtp_jax.model.params import Params

WeightSource = str | Path | Mapping[str, ArrayLike]
"""A folder of safetensors files, or the tensors themselves by the names of the release."""


def open_source(source: WeightSource) -> Folder:
    """The tensors of an update. Raises CheckpointError."""
    if isinstance(source, Mapping):
        return as_folder(Path("arrays"), {name: hold(name, array) for name, array in source.items()})
    if is_orbax(source):
        raise CheckpointError(f"{source} is an Orbax folder; weights are updated from safetensors files")
    return open_folder(source)


def read_update(
    cfg: ModelConfig,
    now: Params,
    source: WeightSource | Folder,
    draft_model: str | Path | Folder | None = None,
    *,
    dtype: str,
    keep_draft: bool = False,
) -> Params:
    """Read every parameter of a model to the host.

    Args:
        cfg: the loaded model; it counts the NextN layers that are in memory.
        now: its parameters, or a tree of their shapes.
        source: the tensors of the trunk, and of the NextN layers unless ``draft_model`` has them.
        draft_model: a folder with the NextN layers, in any layout that ``load`` takes.
        dtype: their dtype in memory, as at the load.
        keep_draft: leave the NextN layers as they are; ``source`` need not have them.

    Returns:
        Parameters of the shapes and dtypes of ``now`` as numpy arrays; without NextN layers if they are kept.

    Raises:
        CheckpointError: a tensor is missing, would not be read, or has another shape; files are damaged.
        ConfigError: arguments that exclude each other.
    """
    if keep_draft and draft_model is not None:
        raise ConfigError("keep_draft and draft_model exclude each other; leave one of them out")
    folder = source if isinstance(source, Folder) else open_source(source)
    given = _stored(folder, cfg)
    if keep_draft:
        given, now = given.without_drafts(), now.with_drafts()
    draft = _draft(folder, given, draft_model)
    plan = match(given, folder, draft)
    own = _own_copies(cfg, now)
    _share(plan, own)
    kept = {type(x) for x in jax.tree.leaves(now, is_leaf=is_narrow)}
    loaded = Loader(dtype, {s.name for s in STORED if s.kept in kept}, on_host=True).read(plan, own)
    now, new = (jax.tree.map(without_bits, p, is_leaf=is_narrow) for p in (now, loaded.params))
    _check_same(now, new)
    return new


def _draft(folder: Folder, cfg: ModelConfig, draft_model: str | Path | Folder | None) -> Draft:
    """The drafter's tensors, of the update itself or of a folder. Raises CheckpointError, ConfigError."""
    head = head_of(cfg)
    if draft_model is None and head is not None and not head.inside:
        raise ConfigError(
            "the loaded model drafts with a head that has a folder of its own; give draft_model=, or "
            "keep_draft=True"
        )
    if draft_model is None and (head is None or not (folder.path / "config.json").is_file()):
        return in_place(folder, cfg)
    path = folder if draft_model is None else draft_model
    own = path if isinstance(path, Folder) else open_folder(path)
    return open_draft(own, cfg) if head is None else _head_like(head, own, cfg)


def _head_like(head: HeadConfig, folder: Folder, cfg: ModelConfig) -> Draft:
    """The head in this folder, whose list of taps may count as either kind does. Raises CheckpointError."""
    faults: list[str] = []
    for captures in (None, *get_args(Captures)):
        try:
            draft = open_draft(folder, cfg, captures)
        except (CheckpointError, ConfigError) as error:
            faults.append(str(error))
            continue
        if draft.head is not None and replace(draft.head, embeds=head.embeds) == head:
            return draft
        faults.append(f"it is {draft.head}")
    raise CheckpointError(f"{folder.path} does not fit the loaded drafter, {head}: {faults[0]}")


def _stored(folder: Folder, cfg: ModelConfig) -> ModelConfig:
    """The model's config with the formats of new tensors: FP8, int4, FP4, or none. Raises CheckpointError."""
    group = cfg.int4_group
    if (folder.path / "config.json").is_file():
        own, _ = read_config(folder.path)
        group = own.int4_group
        differing = [
            f"{name} is {a!r:.200}, the loaded model's is {b!r:.200}"
            for name, a, b in _differing(own, cfg)
            if name not in _FREE
        ]
        if differing:
            raise CheckpointError(f"{folder.path} is of another model: {'; '.join(differing)}")
    kinds = {t.dtype for t in folder.tensors.values()}
    packed = any(name.endswith(PACKED) for name in folder.tensors)
    fours = {"fp4": "I8" in kinds, "int4_group": group if packed else None}
    layout = "compressed-tensors" if any(name.endswith(OVER) for name in folder.tensors) else "modelopt"
    blocks = any(t.dtype == "F8_E4M3" and not name.endswith(SCALE) for name, t in folder.tensors.items())
    return replace(cfg, fp8=blocks, nvfp4=layout if "U8" in kinds else None, **fours)


def _differing(one: Any, other: Any, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Fields that differ between two configurations, and both values; fields of parts have dotted names."""
    for name in (f.name for f in fields(one)):
        a, b = getattr(one, name), getattr(other, name)
        if is_dataclass(a) and type(a) is type(b):
            yield from _differing(a, b, f"{prefix}{name}.")
        elif a != b:
            yield f"{prefix}{name}", a, b


# A draft's config.json may differ in these keys; a model's may not change the trunk.
_FREE = FREE - {"num_hidden_layers", "first_k_dense_replace", "moe_layer_freq", "tie_word_embeddings"}


def _own_copies(cfg: ModelConfig, now: Params) -> frozenset[str]:
    """Names of the own embeddings and heads that NextN layers in memory have."""
    names = set()
    for k, layer in enumerate(now.nextn):
        embed, head = family_of(cfg).nextn_copies(cfg, k)
        names |= {name for name, table in ((embed, layer.embed), (head, layer.head)) if table is not None}
    if now.drafter is not None and cfg.drafter is not None and cfg.drafter.embeds:
        names.add(EMBED)
    return frozenset(names)


def _share(plan: LoadPlan, own: frozenset[str]) -> None:
    """Embeddings and heads of NextN layers must be shared with the trunk where they are in memory.

    A table that memory has and the update lacks is the trunk's.
    """
    for name in own - plan.duplicates.keys():
        plan.tensors[name] = plan.tensors[copied_from(plan.config, name)]
    new = sorted(name for name in plan.duplicates.keys() - own if not is_copy(plan, name))
    if new:
        raise CheckpointError(
            f"{shortlist(new)}: differs from the trunk's, which the loaded model shares; load the model anew"
        )


def _check_same(now: Params, new: Params) -> None:
    """Raises CheckpointError unless new parameters can replace the parameters in memory."""

    def kinds(tree: Params) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): (leaf.shape, np.dtype(leaf.dtype)) for path, leaf in found}

    before, after = kinds(now), kinds(new)
    wrong = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    if wrong:
        name = min(wrong)
        raise CheckpointError(
            f"{len(wrong)} parameters do not fit: {name} would be {after.get(name)}, in memory it is "
            f"{before.get(name)}; give weights of the width that the model was loaded with"
        )
