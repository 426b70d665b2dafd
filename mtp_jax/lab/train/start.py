"""Loads or makes the head to tune, with its trunk's tables; writes the tuned head to a folder."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtp_jax.api.demo import DEMO, path_of
from mtp_jax.api.options import LLMOptions
from mtp_jax.checkpoint.folder import read_config
from mtp_jax.checkpoint.orbax_store import is_orbax
from mtp_jax.checkpoint.plan import make_plan
from mtp_jax.checkpoint.read import Loader
from mtp_jax.checkpoint.write import save_drafter
from mtp_jax.errors import ConfigError
from mtp_jax.heads.eagle3.declared import Eagle3Config
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench.vocabulary import commonest
from mtp_jax.lab.train.tune_options import TuneOptions
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import family_of
from mtp_jax.model.head import DraftFolder
from mtp_jax.model.hf_config import read_json
from mtp_jax.model.narrow import expand
from mtp_jax.model.params import NextN, Params, init_tree, param_specs
from mtp_jax.model.sharding import check_divisible, param_sharding
from mtp_jax.options import check_company


@dataclass(frozen=True)
class Start:
    """A head to tune.

    Attributes:
        cfg: the model with it.
        params: its parameters in float32 and the trunk's tables; the trunk has no layers.
        raw: the config.json of its folder.
    """

    cfg: ModelConfig
    params: Params
    raw: JsonObject

    @property
    def dense(self) -> "Start":
        """The same without indexers: a window of at most ``index_topk`` tokens attends to all its rows."""
        return replace(
            self, cfg=replace(self.cfg, indexer=None), params=_with_indexers(self.params, repeat(None))
        )

    def save(self, directory: Path, drafts: Any) -> None:
        """Write the head with other parameters, which may be ``dense``."""
        params = self.params.with_drafts(drafts)
        own = (getattr(layer.layer.attention, "indexer", None) for layer in self.params.nextn)
        save_drafter(directory, self.cfg, _with_indexers(params, own), self.raw)


def begin(model: LLMOptions, options: TuneOptions, answers: np.ndarray | None = None) -> Start:
    """Load the head of a model, or make one.

    Raises ConfigError for options that do not fit the model, CheckpointError for its files.
    answers: tokens, the commonest of which a head with fewer tokens drafts; None: it drafts the first
    tokens, which serves to know its sizes.
    """
    check_company(ConfigError, options, model)
    folder, fresh, mesh = path_of(model.model or DEMO), options.fresh, model.mesh
    if is_orbax(folder):
        raise ConfigError(f"{folder} is an Orbax folder; a head is tuned for a folder as it was released")
    declared, raw = read_config(folder)
    if fresh and not declared.attention.trained:
        title = family_of(declared).title
        raise ConfigError(f"fresh = {fresh!r}: no head is made for {title} here; name another model")
    if (options.draft_vocab or 0) >= declared.vocab_size:
        raise ConfigError(
            f"draft_vocab = {options.draft_vocab}; expected fewer than the model's {declared.vocab_size} "
            "tokens; leave it out to draft them all"
        )
    beside = DraftFolder.of(model.draft_model, model.draft_captures)
    plan = make_plan(folder, beside, 0 if fresh else model.num_nextn_layers)
    loaded = Loader(mesh=mesh, layers=False).load(plan)
    if not fresh:
        if loaded.config.drafter is not None and beside is not None:
            raw = read_json(Path(beside.path) / "config.json")
        return Start(loaded.config, loaded.params, raw | _counted(loaded.config))
    if fresh == "nextn":
        cfg = loaded.config.with_nextn(declared.nextn_moe[:1] or (False,))
        raw = raw | _counted(cfg)
    else:
        raw = Eagle3Config.fresh(loaded.config, options.draft_vocab, options.draft_mlp)
        cfg = replace(loaded.config, drafter=Eagle3Config.read(raw, loaded.config, {}, None))
    check_divisible(cfg, mesh)
    specs = param_specs(cfg).drafts
    where = mesh and jax.tree.map(lambda spec: param_sharding(spec, mesh), specs)
    drafts = jax.jit(lambda key: init_tree(specs, key), out_shardings=where)(jax.random.key(options.seed))
    params = loaded.params.with_drafts(drafts)
    if options.draft_vocab and answers is not None:
        counts = np.bincount(answers, minlength=cfg.vocab_size)
        ids = commonest(counts + 1, options.draft_vocab, cfg.eos_token_ids)  # never fewer than asked for
        params = _drafting(params, np.sort(ids))
    return Start(cfg, params, raw)


def _drafting(params: Params, ids: np.ndarray) -> Params:
    """Parameters whose head drafts these tokens, from a table that begins with the trunk's rows of them."""
    head: Any = params.drafter
    offsets = (ids - np.arange(len(ids))).astype(np.int32)
    offsets = jax.device_put(offsets, head.target_offset.sharding)
    table = head.head
    rows = jax.device_put(expand(params.table, table.dtype)[ids].astype(table.dtype), table.sharding)
    return replace(params, drafter=replace(head, target_offset=offsets, head=rows))


def _counted(cfg: ModelConfig) -> JsonObject:
    """The keys of config.json that count NextN layers."""
    count = cfg.num_nextn_predict_layers
    return {"num_nextn_predict_layers": count, "nextn_moe": list(cfg.nextn_moe)} if count else {}


def _with_indexers(params: Params, indexers: Iterable[Any]) -> Params:
    """Parameters whose NextN layers have these indexers."""

    def one(p: NextN, indexer: Any) -> NextN:
        attention = p.layer.attention
        if not hasattr(attention, "indexer"):
            return p
        return replace(p, layer=replace(p.layer, attention=replace(attention, indexer=indexer)))

    return replace(params, nextn=tuple(map(one, params.nextn, indexers)))
