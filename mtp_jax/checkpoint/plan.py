"""The plan of a load: each expected tensor found, each found tensor accounted for. Reads headers only."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from mtp_jax.checkpoint.draft import Draft, in_place, nextn_of, open_draft
from mtp_jax.checkpoint.folder import Folder, open_folder, read_config
from mtp_jax.checkpoint.formats import (
    FORMATS,
    IDS,
    PLAIN,
    Format,
    by_tensors,
    format_of,
    spec_names,
    tensors_of,
)
from mtp_jax.checkpoint.safetensors_file import Tensor
from mtp_jax.errors import CheckpointError, ConfigError, shortlist
from mtp_jax.heads.tables import EMBED
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import family_of
from mtp_jax.model.family.family import no_model
from mtp_jax.model.family.hints import TensorNames
from mtp_jax.model.family.mtp_layers import STAGES
from mtp_jax.model.head import DraftFolder, head_of
from mtp_jax.model.spec import leaves, may_be_narrow
from mtp_jax.model.specs import Params, param_specs

# Scales of inputs and of a cache in FP8, which stay in whole precision here.
_IGNORABLE = re.compile(r".*(rotary_emb\.inv_freq|\.input_(global_)?scale|\.[kv]_scale)")


@dataclass(frozen=True)
class LoadPlan:
    """A checkpoint whose tensors match its config.

    Attributes:
        config: the model, with the NextN layers or the head that will be loaded.
        tensors: tensors that will be read, scales included, by name in the release.
        duplicates: tensor that may be a copy of another: name -> name of the trunk's.
        architecture: model_type of config.json.
        layout: layout of the NextN layers or of the head, None without any.
        files: the safetensors files that are read.
        unread: tensors of other parts of a multimodal model, which are not read.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    duplicates: dict[str, str]
    architecture: str
    layout: str | None
    files: tuple[Path, ...]
    unread: dict[str, Tensor] = field(default_factory=dict)

    def specs(self, own: frozenset[str] = frozenset()) -> Params:
        """The tree of Spec to fill; ``own``: duplicates that turned out to differ."""
        cfg = self.config
        copies = (family_of(cfg).nextn_copies(cfg, k) for k in range(cfg.num_nextn_predict_layers))
        return param_specs(cfg, [(embed in own, head in own) for embed, head in copies])

    def keeping(self, own: frozenset[str]) -> "LoadPlan":
        """The plan whose draft head has an embedding of its own only if it differs; own: as in ``specs``."""
        head = head_of(self.config)
        if head is None or EMBED not in self.duplicates or EMBED in own:
            return self
        return replace(self, config=replace(self.config, drafter=replace(head, embeds=False)))


def copied_from(cfg: ModelConfig, copy: str) -> str:
    """The trunk's tensor that a possible duplicate may be a copy of."""
    names = family_of(cfg).names
    return names.embed if ".emb" in copy or cfg.tie_word_embeddings else names.head


def make_plan(
    model_dir: str | Path,
    draft_model: str | Path | DraftFolder | None = None,
    num_nextn_layers: int | None = None,
) -> LoadPlan:
    """Read config and headers and match them.

    Args:
        model_dir: folder in Hugging Face layout.
        draft_model: folder with the NextN layers or a draft head; None: the layers in ``model_dir``.
        num_nextn_layers: number of NextN layers to load; None: all, or none beside a head. 0: no DSpark
            stages in ``model_dir``, either.
    Raises:
        ConfigError: an unsupported model or head, or NextN layers asked for beside a head.
        CheckpointError: one error with everything that does not match.
    """
    cfg, raw = read_config(model_dir)
    folder = open_folder(model_dir)
    cfg = by_tensors(cfg, folder.tensors)
    own = in_place(folder, cfg)
    if own.tensors and not family_of(cfg).has_trunk(folder.tensors):
        raise no_model(folder.path, own.layout if own.layout == STAGES else "MTP layers")
    if beside := DraftFolder.of(draft_model):
        draft = open_draft(open_folder(beside.path), cfg, beside.captures)
    else:
        draft = own if num_nextn_layers == 0 else own.described(raw, cfg)
    if draft.head is not None:
        if num_nextn_layers:
            raise ConfigError(
                f"num_nextn_layers = {num_nextn_layers} beside the {draft.head.name} head of {draft.folder}; "
                "leave one of them out, or give 0"
            )
        cfg = replace(cfg.with_nextn(()), drafter=draft.head)
        return match(cfg, folder, draft, str(raw.get("model_type", "deepseek_v3")))
    declared = raw.get("num_nextn_predict_layers") if draft_model is None else None
    wanted = _count_nextn(cfg, draft, declared, num_nextn_layers)
    cfg = cfg.with_nextn(tuple(_is_moe(cfg, k, draft.tensors) for k in range(wanted)))
    return match(cfg, folder, draft, str(raw.get("model_type", "deepseek_v3")))


def _copies(cfg: ModelConfig) -> list[str]:
    """Names of tensors that a folder may hold and that must equal another one, so that they are not read."""
    names, head = family_of(cfg), head_of(cfg)
    copies = [name for k in range(cfg.num_nextn_predict_layers) for name in names.nextn_copies(cfg, k)]
    if cfg.tie_word_embeddings:
        copies.append(names.names.head)
    if head and head.sizes and head.sizes.hidden_size == cfg.hidden_size:
        copies.append(EMBED)
    return copies


def match(cfg: ModelConfig, folder: Folder, draft: Draft, architecture: str = "") -> LoadPlan:
    """Match tensors with a config that counts the NextN layers to load; further layers need not be read.

    Args:
        cfg: the model.
        folder: the trunk's tensors; NextN layers among them are the layers of ``draft``, or are passed over.
        draft: the NextN layers, or a head.
        architecture: model_type of config.json.
    Raises:
        CheckpointError: one error with everything that does not match.
    """
    own = draft.tensors if draft.folder == folder.path else in_place(folder, cfg).tensors
    found = {n: t for n, t in folder.tensors.items() if n not in own} | draft.tensors
    wanted = cfg.num_nextn_predict_layers
    unread = () if cfg.drafter else {n for n in draft.tensors if (nextn_of(cfg, n) or 0) >= wanted}
    duplicates = {name: copied_from(cfg, name) for name in _copies(cfg) if name in found}

    check = _Accounting(cfg, found, dict.fromkeys(draft.tensors, draft.config))
    if max(cfg.num_hidden_layers, cfg.n_routed_experts) > len(found):  # each has a tensor at least
        check.refuse(folder.path, draft.folder, [])
    check.expect_all(duplicates)
    check.finish(folder.path, draft.folder, check.left_over(unread, draft.unknown))
    files = sorted({t.file.path for t in found.values()})
    layout = draft.layout if wanted or draft.head else None
    tensors = {n: found[n] for n in check.used}
    return LoadPlan(cfg, tensors, duplicates, architecture, layout, tuple(files), folder.unread)


def _count_nextn(cfg: ModelConfig, draft: Draft, declared: int | None, wanted: int | None) -> int:
    present = len({nextn_of(cfg, n) for n in draft.tensors})
    if wanted is not None and not 0 <= wanted <= present:
        raise CheckpointError(
            f"num_nextn_layers = {wanted}, but {draft.folder} has {present}; expected 0 to {present}"
        )
    if wanted is not None:
        return wanted
    if declared is None or declared == present:
        return present
    fix = (
        "name a folder that has them with draft_model=, or do without: num_speculative_tokens=0 to run it, "
        "num_nextn_layers=0 to describe or convert it"
        if declared > present
        else "correct config.json"
    )
    raise CheckpointError(
        f"{draft.folder}: config.json says num_nextn_predict_layers = {declared}, but tensors of {present} "
        "NextN layers are present "
        f"({family_of(cfg).nextn_name(cfg, min(present, declared))}.enorm.weight "
        f"{'is missing' if declared > present else 'is there'}); {fix}"
    )


def _is_moe(cfg: ModelConfig, k: int, tensors: dict[str, Tensor]) -> bool:
    dense = f"{family_of(cfg).nextn_name(cfg, k)}.mlp.gate_proj.weight"
    return cfg.n_routed_experts > 0 and not any(name in tensors for name in tensors_of(dense))


class _Accounting:
    """Collects faults, so that one error reports all of them."""

    def __init__(self, cfg: ModelConfig, found: dict[str, Tensor], drafts: dict[str, ModelConfig]):
        """drafts: the config of the NextN layers' folder, for their tensors."""
        self.cfg, self.found, self.drafts = cfg, found, drafts
        self.seen: set[str] = set()
        self.used: dict[str, None] = {}
        self.missing: dict[str, None] = {}
        self.wrong: list[str] = []

    def expect_all(self, duplicates: Collection[str]) -> None:
        """Check every weight of the model, and possible copies of its tables."""
        for spec in leaves(param_specs(self.cfg)):
            for name in spec_names(spec).flat:
                self.expect(name, spec.tensor_shape, IDS if spec.ids else PLAIN)
        for name in duplicates:
            self.expect(name, (self.cfg.vocab_size, self.cfg.hidden_size))

    def left_over(self, unread: Collection[str], unknown: dict[str, Tensor]) -> list[Tensor]:
        """Tensors that no weight is made of. unread: names that need not be. unknown: further tensors."""
        rest = {n: t for n, t in self.found.items() if n not in self.used and n not in unread} | unknown
        return [t for n, t in rest.items() if not _IGNORABLE.fullmatch(n)]

    def expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = PLAIN) -> None:
        """Check a required weight: its shape, and the way in which it is stored."""
        if name in self.seen:
            return
        self.seen.add(name)
        stored = format_of(self.found, name) if may_be_narrow(name) else None
        if stored is not None:
            self._expect_narrow(name, shape, stored)
        elif (tensor := self._find(name)) is not None:
            if tensor.shape != shape:
                self.wrong.append(
                    f"{tensor} has shape {list(tensor.shape)}; expected {list(shape)} from config.json"
                )
            if tensor.dtype not in dtypes:
                also = family_of(self.cfg).narrow if may_be_narrow(name) else ()
                allowed = ", ".join((*dtypes, *also))
                self.wrong.append(f"{tensor} has dtype {tensor.dtype}; expected one of {allowed}")

    def _find(self, name: str) -> Tensor | None:
        """Find a tensor, and mark it as read."""
        (self.used if name in self.found else self.missing)[name] = None
        return self.found.get(name)

    def _expect_narrow(self, name: str, shape: tuple[int, ...], stored: Format) -> None:
        """Check all tensors of a narrow weight."""
        own = (self.drafts[part] for part in tensors_of(name) if part in self.drafts)
        cfg = next(own, self.cfg)
        parts = stored.parts(cfg, name, shape)
        found = [(part, t) for part in parts if (t := self._find(part.name))]
        _, first = found[0]
        if not stored.announced(cfg):
            self.wrong.append(
                f"{first} has dtype {first.dtype}, but config.json beside it has no quantization_config of "
                f"{stored.name}; expected one there, or a tensor of {', '.join(PLAIN)}"
            )
        elif (misfit := stored.misfit(cfg, shape)) is not None:
            self.wrong.append(f"{first}: {misfit}")
        else:
            self.wrong += [
                f"{t} is {t.dtype} {list(t.shape)}; expected {' or '.join(part.dtypes)} {list(part.shape)}"
                f"{part.why}"
                for part, t in found
                if t.dtype not in part.dtypes or t.shape != part.shape
            ]

    def finish(self, folder: Path, draft: Path, unexpected: list[Tensor]) -> None:
        """Raise one error with all faults, if there are any."""
        for stored in FORMATS:
            if stored.announced(self.cfg) and not any(stored.holds(self.found, name) for name in self.seen):
                self.wrong.append(
                    f"{folder}: config.json announces {stored.name}, but no tensor {stored.mark}"
                )
        if self.missing or self.wrong or unexpected:
            self.refuse(folder, draft, unexpected)

    def refuse(self, folder: Path, draft: Path, unexpected: list[Tensor]) -> NoReturn:
        """Raise one error with all faults, and with values of config.json that the tensors contradict."""
        where = str(folder) if draft == folder else f"{folder} with drafts of {draft}"
        lines = [f"{where}: the tensors do not match config.json"]
        lines += [f"missing ({len(self.missing)}): {shortlist(self.missing)}"] if self.missing else []
        lines += [f"unexpected ({len(unexpected)}): {_by_file(unexpected)}"] if unexpected else []
        lines += self.wrong[:20] + ([f"and {len(self.wrong) - 20} more"] if len(self.wrong) > 20 else [])
        lines += family_of(self.cfg).hints(self.cfg, TensorNames(self.found, self.missing))
        raise CheckpointError("\n  ".join(lines))


def _by_file(tensors: list[Tensor]) -> str:
    files: dict[Path, list[str]] = {}
    for t in tensors:
        files.setdefault(t.file.path, []).append(t.name)
    return "; ".join(f"{path.name}: {shortlist(names)}" for path, names in files.items())
