"""Contents and needs of a checkpoint, from its config and headers alone, or from its config."""

import math
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jax.sharding import AbstractMesh

from mtp_jax.checkpoint.folder import read_config
from mtp_jax.checkpoint.formats import (
    FORMATS,
    STORED,
    Kept,
    declared,
    names_of,
    spec_names,
    staying,
)
from mtp_jax.checkpoint.orbax_store import check_no_draft, is_orbax, read_about
from mtp_jax.checkpoint.plan import make_plan
from mtp_jax.checkpoint.safetensors_file import Tensor
from mtp_jax.errors import ConfigError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_json
from mtp_jax.model.head import DraftFolder, head_of
from mtp_jax.model.params import type_of
from mtp_jax.model.sharding import check_divisible
from mtp_jax.model.spec import Spec, leaves
from mtp_jax.model.specs import Params, param_specs, parameter_counts

_NARROW, _ON_CPU = (frozenset(s.name for s in kinds) for kinds in (FORMATS, STORED))


@dataclass(frozen=True)
class DtypeTotals:
    """Tensors of one dtype: their number, elements and bytes."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class Summary:
    """The figures that ``mtp-jax info`` prints.

    Attributes:
        architecture: model_type of config.json.
        config: the model, with the NextN layers that are present.
        nextn_layout: where the drafter is: "in place", "lmsys NextN", "xLLM export", "Orbax", a head's kind,
            or "declared" where there is no tensor at all; None without any.
        files: number of safetensors files.
        stored: tensors on disk that will be read, by dtype ("BF16", "F8_E4M3", ...).
        parameters: number in the trunk, embedding and head included (tied tables count once).
        active_parameters: number in the trunk that one token uses.
        nextn_parameters: number in the NextN layers without copies of the trunk's embedding and head, or in
            the draft head.
        weight_bytes: memory for all parameters, by engine dtype, and where weights are narrow by their format
            ("fp8", "int4", "fp4 and fp8"): weights in a narrow format stay in it, the rest is bfloat16.
        weight_bytes_per_device: the same, of each device of a 1 x N mesh.
        weight_bytes_on_cpu: bytes of all parameters on a CPU. An engine there computes in float32, but
            projections, embedding and head stay in memory as they are stored.
        cache_bytes_per_token: cache of all layers, the drafter's included, by engine dtype and as FP8 rows.
        unread: tensors of a multimodal checkpoint outside its text model, which are not read, by part.
    """

    architecture: str
    config: ModelConfig
    nextn_layout: str | None
    files: int
    stored: dict[str, DtypeTotals]
    parameters: int
    active_parameters: int
    nextn_parameters: int
    weight_bytes: dict[str, int]
    weight_bytes_per_device: dict[str, int]
    weight_bytes_on_cpu: int
    cache_bytes_per_token: dict[str, int]
    unread: dict[str, DtypeTotals]

    @property
    def stored_bytes(self) -> int:
        """Bytes that a load will read."""
        return sum(s.nbytes for s in self.stored.values())

    def text(self) -> str:
        """Turns the summary into lines for people."""
        c, own, head = self.config, self.config.attention, head_of(self.config)
        moe = sum(map(c.is_moe, range(c.num_hidden_layers)))
        kinds = ", ".join("MoE" if m else "dense" for m in c.nextn_moe)
        experts = (
            f"{c.n_routed_experts} routed, {c.num_experts_per_tok} per token, {c.n_shared_experts} shared"
        )
        stored = [f"{_size(s.nbytes)} {name} ({s.tensors:,})" for name, s in sorted(self.stored.items())]
        rows = {
            "architecture": self.architecture,
            "layers": f"{c.num_hidden_layers} ({c.num_hidden_layers - moe} dense, {moe} MoE)",
            "experts": experts if moe or any(c.nextn_moe) else "none",
            "hidden, heads": f"{c.hidden_size}, {own.heads_described(c.num_attention_heads)}",
            **({"attention": own.described} if own.described else {}),
            "vocabulary": f"{c.vocab_size:,}{' (tied)' if c.tie_word_embeddings else ''}",
            "context": f"{c.max_position_embeddings:,} tokens",
            "NextN layers": f"{len(c.nextn_moe)} ({kinds}; {self.nextn_layout})" if c.nextn_moe else "none",
            **({"draft head": head.described} if head else {}),
            "parameters": f"{self.parameters:,} ({self.active_parameters:,} active per token)",
            "draft parameters" if head else "NextN parameters": f"{self.nextn_parameters:,}",
            "on disk": f"{_size(self.stored_bytes)}: {', '.join(stored)}" if stored else "no weights",
            "memory for weights": by_dtype(self.weight_bytes),
            "weights on a CPU": f"{_size(self.weight_bytes_on_cpu)}, computed with in float32",
            "cache per token": ", ".join(f"{n:,} B as {k}" for k, n in self.cache_bytes_per_token.items()),
        }
        if own.page_unit > 1:
            rows["cache per token"] += f", in pages of {c.usual_page} tokens"
        if self.unread:
            parts = (f"{name} ({s.tensors:,} tensors, {_size(s.nbytes)})" for name, s in self.unread.items())
            rows["not read"] = ", ".join(parts)
        return "\n".join(f"{name:<20}{value}" for name, value in rows.items())


def by_dtype(nbytes: dict[str, int]) -> str:
    """Byte counts by dtype, as text."""
    return ", ".join(f"{_size(n)} as {k}" for k, n in nbytes.items())


def summarise(
    model_dir: str | Path,
    draft_model: str | Path | DraftFolder | None = None,
    num_nextn_layers: int | None = None,
    devices: int = 1,
) -> Summary:
    """Check a folder in Hugging Face layout, or an Orbax folder, and count its tensors; no weights are read.

    A folder without weights is described as its config.json declares it. num_nextn_layers: number of NextN
    layers to count; None for all. devices: number of devices over which weights are split. Raises ConfigError
    or CheckpointError as ``load`` would, and ConfigError for a model that does not divide over the devices.
    """
    stored: dict[str, DtypeTotals] = {}
    if is_orbax(model_dir):
        check_no_draft(model_dir, draft_model)
        about = read_about(Path(model_dir)).keeping(Path(model_dir), num_nextn_layers)
        for spec in leaves(about.specs):
            name = "F32" if spec.dtype(about.dtype) == "float32" else "BF16"
            _add(stored, name, spec.size, spec.nbytes(about.dtype))
        architecture = config_json(about.config)["model_type"]
        return _summary(_Checkpoint(architecture, about.config, about.specs, "Orbax", stored), devices)
    if draft_model is None and _has_no_weights(Path(model_dir)):
        return _declared(Path(model_dir), num_nextn_layers, devices)
    plan = make_plan(model_dir, draft_model, num_nextn_layers)
    for t in plan.tensors.values():
        _add(stored, t.dtype, math.prod(t.shape), t.nbytes)
    specs, layout = param_specs(plan.config), plan.layout

    def kept(spec: Spec, among: Collection[str]) -> tuple[Kept, ...]:
        stays = staying(spec, plan.tensors, among)
        return () if stays is None else stays.arrays(spec, plan.tensors)

    found = _Checkpoint(
        plan.architecture,
        plan.config,
        specs,
        layout,
        stored,
        files=len(plan.files),
        formats=names_of(f for f in FORMATS if any(f.holds(plan.tensors, n) for n in _weights(specs))),
        kept=kept,
        unread=_by_part(plan.unread),
    )
    return _summary(found, devices)


def _weights(specs: Params) -> Iterator[str]:
    return (str(name) for spec in leaves(specs) for name in spec_names(spec).flat)


def _by_part(tensors: dict[str, Tensor]) -> dict[str, DtypeTotals]:
    """Tensors of each module at the top."""
    found: dict[str, DtypeTotals] = {}
    for name, t in tensors.items():
        _add(found, name.split(".")[0], math.prod(t.shape), t.nbytes)
    return found


def _has_no_weights(path: Path) -> bool:
    # An index may have come without the files that it names: from a hub, for a description.
    return os.path.isfile(path / "config.json") and not any(path.glob("*.safetensors"))


def _declared(path: Path, num_nextn_layers: int | None, devices: int) -> Summary:
    """The model that config.json promises, with its weights in the formats that it announces."""
    cfg, raw = read_config(path)
    if num_nextn_layers is not None:
        if num_nextn_layers > cfg.num_nextn_predict_layers:
            raise ConfigError(
                f"num_nextn_layers = {num_nextn_layers}; {path} declares {cfg.num_nextn_predict_layers}"
            )
        cfg = cfg.with_nextn(cfg.nextn_moe[:num_nextn_layers])

    def kept(spec: Spec, among: Collection[str]) -> tuple[Kept, ...]:
        found = declared(cfg, spec)
        return found[1] if found and found[0].name in among else ()

    formats = names_of(f for f in FORMATS if f.announced(cfg))
    architecture = raw.get("model_type", "deepseek_v3")
    found = _Checkpoint(architecture, cfg, param_specs(cfg), "declared", {}, formats=formats, kept=kept)
    return _summary(found, devices)


@dataclass(frozen=True)
class _Checkpoint:
    """Facts of a checkpoint that a summary is made of.

    Attributes:
        architecture, config, layout, stored, files, unread: see ``Summary``.
        specs: the tree of Spec in memory.
        formats: names of the narrow formats.
        kept: of a parameter and the names of formats, the arrays of the parameter if it stays in one of these
            formats; else nothing.
    """

    architecture: str
    config: ModelConfig
    specs: Params
    layout: str | None
    stored: dict[str, DtypeTotals]
    files: int = 0
    formats: str = ""
    kept: Callable[[Spec, Collection[str]], tuple[Kept, ...]] = lambda spec, among: ()
    unread: dict[str, DtypeTotals] = field(default_factory=dict)


def _summary(found: _Checkpoint, devices: int) -> Summary:
    cfg, mesh = found.config, {"data": 1, "model": devices}
    check_divisible(cfg, AbstractMesh(tuple(mesh.values()), tuple(mesh)))
    specs = list(leaves(found.specs))
    total, active, nextn = parameter_counts(cfg)
    layers, page = range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers), cfg.usual_page

    def per_token(dtype: str) -> float:
        """Bytes of a token in the caches of all layers, the drafter's included."""
        sizes = (head := head_of(cfg)) and head.sizes
        last = sizes.num_hidden_layers if sizes else 0  # a head's layers cache as NextN layers do
        of_head = last * sizes.attention.token_bytes(last, dtype, page) if sizes else 0
        return of_head + sum(cfg.attention.token_bytes(i, dtype, page) for i in layers)

    def narrow(spec: Spec, among: Collection[str] = _NARROW, others: str = "bfloat16") -> int:
        return sum(a.nbytes for a in found.kept(spec, among)) or spec.nbytes(others)

    sizes: dict[str, Callable[[Spec], int]] = {d: lambda s, d=d: s.nbytes(d) for d in type_of}
    if found.formats:
        sizes[found.formats] = narrow
    return Summary(
        architecture=found.architecture,
        config=cfg,
        nextn_layout=found.layout if cfg.drafts else None,
        files=found.files,
        stored=found.stored,
        parameters=total,
        active_parameters=active,
        nextn_parameters=nextn,
        weight_bytes={name: sum(map(size, specs)) for name, size in sizes.items()},
        weight_bytes_per_device={
            name: sum(size(s) // s.parts(mesh) for s in specs) for name, size in sizes.items()
        },
        weight_bytes_on_cpu=sum(narrow(s, _ON_CPU, "float32") for s in specs),
        cache_bytes_per_token={dtype: math.ceil(per_token(dtype)) for dtype in (*type_of, "fp8")},
        unread=found.unread,
    )


def _add(stored: dict[str, DtypeTotals], name: str, elements: int, nbytes: int) -> None:
    s = stored.get(name, DtypeTotals(0, 0, 0))
    stored[name] = DtypeTotals(s.tensors + 1, s.elements + elements, s.nbytes + nbytes)


def _size(nbytes: int) -> str:
    """A byte count as text: four digits and a unit."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.4g} {units[0]}"
