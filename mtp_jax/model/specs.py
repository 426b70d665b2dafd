"""Parameters as they are declared, without jax: one ``Spec`` per array, in trees of dataclasses.

Random initialisation, shardings, the tensors that a checkpoint must hold and every count of bytes derive from
``param_specs``. ``params`` registers the same trees with jax, where arrays stand in place of specs.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import family_of
from mtp_jax.model.head import HeadTree, head_of
from mtp_jax.model.layer_specs import Weight, norm, table
from mtp_jax.model.nextn_specs import NextN
from mtp_jax.model.spec import count, parameters
from mtp_jax.model.v4_specs import HyperHead


@parameters
class DraftRows:
    """Rows of the trunk's output table that drafts choose among: a copy that a runner makes."""

    table: Weight  # [n, D]
    places: Weight  # [V] int32, the row of each token


@parameters
class Params:
    """A whole model. ``head`` is None when the embedding is tied to it, ``drafter`` without a draft head.

    ``draft_rows`` is None where drafts choose among all tokens, and in files.
    """

    embed: Weight  # [V, D]
    layers: tuple[Any, ...]  # Layer, or in a runner Stack[Layer]
    norm: Weight  # [D]
    head: Weight  # [V, D]
    nextn: tuple[NextN, ...]
    drafter: HeadTree | None = None
    hyper_head: HyperHead | None = None
    draft_rows: DraftRows | None = None

    @property
    def table(self) -> Weight:
        """The vocabulary table behind the logits."""
        return self.embed if self.head is None else self.head

    @property
    def drafts(self) -> "DraftLayers":
        """The parameters that draft."""
        return self.nextn, self.drafter

    @property
    def can_draft(self) -> bool:
        """Whether there are parameters that draft."""
        return bool(self.nextn) or self.drafter is not None

    def with_drafts(self, drafts: "DraftLayers" = ((), None)) -> "Params":
        """The same trunk with other parameters that draft; without an argument it has none."""
        return replace(self, nextn=drafts[0], drafter=drafts[1], draft_rows=None)


DraftLayers = tuple[tuple[NextN, ...], HeadTree | None]
"""NextN layers and a draft head, of which a model has one kind or none."""


def param_specs(cfg: ModelConfig, own: Iterable[tuple[bool, bool]] = ()) -> Params:
    """The tree of ``Spec`` of a model.

    own: for the first NextN layers, whether embedding and head differ from the trunk's and are kept; the
    tables of the rest are the trunk's.
    """
    layers, nextn = range(cfg.num_hidden_layers), range(cfg.num_nextn_predict_layers)
    tables = itertools.chain(own, itertools.repeat((False, False)))
    family, head = family_of(cfg), head_of(cfg)
    names = family.names
    return Params(
        embed=table(names.embed, cfg),
        layers=tuple(family.layer(cfg, i) for i in layers),
        norm=norm(names.norm, cfg.hidden_size),
        head=None if cfg.tie_word_embeddings else table(names.head, cfg),
        nextn=tuple(family.nextn(cfg, k, has) for k, has in zip(nextn, tables, strict=False)),
        drafter=head and head.specs(cfg),
        **family.beside_layers(cfg),
    )


def parameter_counts(cfg: ModelConfig) -> tuple[int, int, int]:
    """Parameters of (trunk, trunk active per token, NextN layers without copies of embedding and head)."""
    specs = param_specs(cfg)
    total = count(specs.with_drafts())
    routed = sum(count(p.moe.routed) for p in specs.layers if p.moe)
    idle = routed - routed // max(cfg.n_routed_experts, 1) * cfg.num_experts_per_tok
    return total, total - idle, count(specs.drafts)
