"""Parameters as they are declared, without jax: one ``Spec`` per array, in trees of dataclasses.

Random initialisation, shardings, the tensors that a checkpoint must hold and every count of bytes derive from
``param_specs``. ``params`` registers the same trees with jax, where arrays stand in place of specs.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import HeadTree, head_of
from mtp_jax.model.layer_specs import Layer, Moe, Weight, block, norm, table
from mtp_jax.model.spec import Spec, count, parameters
from mtp_jax.model.v4_specs import HyperHead, hyper_head, v4_block, v4_merge


@parameters
class NextN:
    """A Multi-Token-Prediction module. ``embed`` and ``head`` are None when they are the trunk's own.

    ``stream_merge`` merges each of several residual streams with the token.
    """

    token_norm: Weight  # [D], enorm
    hidden_norm: Weight  # [D], hnorm
    merge: Weight  # [D, 2D], eh_proj; [D, D], e_proj, beside stream_merge
    layer: Layer
    norm: Weight  # [D], shared_head.norm
    embed: Weight
    head: Weight
    stream_merge: Weight = None  # [D, D], h_proj
    hyper_head: HyperHead | None = None

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """Its layer."""
        return (self.layer,)

    @property
    def merging(self) -> tuple[Weight, ...]:
        """The matrices and the norms beside the layer."""
        return self.token_norm, self.hidden_norm, self.merge, self.stream_merge, self.norm, self.hyper_head

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make NextN entries of tokens: the merge, and latents or keys and values."""
        return self.token_norm, self.hidden_norm, self.merge, self.stream_merge, *self.layer.entries


class TrunkNames(NamedTuple):
    """Names of the trunk's tensors beside its layers."""

    embed: str
    norm: str
    head: str


TRUNK = TrunkNames("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
TRUNK_V4 = TrunkNames("embed.weight", "norm.weight", "head.weight")


def trunk_names(cfg: ModelConfig) -> TrunkNames:
    """The names that a model's files have."""
    return TRUNK_V4 if cfg.compressed else TRUNK


def nextn_name(cfg: ModelConfig, k: int) -> str:
    """The beginning of the names of a NextN layer's tensors."""
    return f"mtp.{k}" if cfg.compressed else f"model.layers.{cfg.num_hidden_layers + k}"


def nextn_copies(cfg: ModelConfig, k: int) -> tuple[str, str]:
    """Names of the copies of embedding and head that NextN layer ``k`` may carry."""
    p = nextn_name(cfg, k)
    if cfg.compressed:  # V4-Flash-Base has them
        return f"{p}.emb.tok_emb.weight", f"{p}.head.weight"
    return f"{p}.embed_tokens.weight", f"{p}.shared_head.head.weight"


@parameters
class Params:
    """A whole model. ``head`` is None when the embedding is tied to it, ``drafter`` without a draft head."""

    embed: Weight  # [V, D]
    layers: tuple[Any, ...]  # Layer, or in a runner Stack[Layer]
    norm: Weight  # [D]
    head: Weight  # [V, D]
    nextn: tuple[NextN, ...]
    drafter: HeadTree | None = None
    hyper_head: HyperHead | None = None

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
        return replace(self, nextn=drafts[0], drafter=drafts[1])


def _layer(cfg: ModelConfig, number: int, moe: bool) -> Layer:
    if cfg.compressed:
        return v4_block(cfg, f"layers.{number}", number)
    return block(cfg, f"model.layers.{number}", moe, cfg.indexes(number), cfg.hidden_size)


def _nextn(cfg: ModelConfig, k: int, own_embed: bool, own_head: bool) -> NextN:
    number, d, p = cfg.num_hidden_layers + k, cfg.hidden_size, nextn_name(cfg, k)
    own, names = (own_embed, own_head), nextn_copies(cfg, k)
    embed, head = (table(name, cfg) if has else None for has, name in zip(own, names, strict=True))
    if cfg.compressed:
        merge, stream_merge = v4_merge(cfg, p)
        return NextN(
            token_norm=norm(f"{p}.enorm.weight", d),
            hidden_norm=norm(f"{p}.hnorm.weight", d),
            merge=merge,
            layer=v4_block(cfg, p, number),
            norm=norm(f"{p}.norm.weight", d),
            embed=embed,
            head=head,
            stream_merge=stream_merge,
            hyper_head=hyper_head(cfg, f"{p}."),
        )
    return NextN(
        token_norm=norm(f"{p}.enorm.weight", d),
        hidden_norm=norm(f"{p}.hnorm.weight", d),
        merge=Spec((d, 2 * d), (None, None), f"{p}.eh_proj.weight", (d, 2 * d)),
        layer=_layer(cfg, number, cfg.nextn_moe[k]),
        norm=norm(f"{p}.shared_head.norm.weight", d),
        embed=embed,
        head=head,
    )


DraftLayers = tuple[tuple[NextN, ...], HeadTree | None]
"""NextN layers and a draft head, of which a model has one kind or none."""


def param_specs(cfg: ModelConfig, own: Iterable[tuple[bool, bool]] = ()) -> Params:
    """The tree of ``Spec`` of a model.

    own: for the first NextN layers, whether embedding and head differ from the trunk's and are kept; the
    tables of the rest are the trunk's.
    """
    layers, nextn = range(cfg.num_hidden_layers), range(cfg.num_nextn_predict_layers)
    tables = itertools.chain(own, itertools.repeat((False, False)))
    names, head = trunk_names(cfg), head_of(cfg)
    return Params(
        embed=table(names.embed, cfg),
        layers=tuple(_layer(cfg, i, cfg.is_moe(i)) for i in layers),
        norm=norm(names.norm, cfg.hidden_size),
        head=None if cfg.tie_word_embeddings else table(names.head, cfg),
        nextn=tuple(_nextn(cfg, k, embed, head) for k, (embed, head) in zip(nextn, tables, strict=False)),
        drafter=head and head.specs(cfg),
        hyper_head=hyper_head(cfg, ""),
    )


def parameter_counts(cfg: ModelConfig) -> tuple[int, int, int]:
    """Parameters of (trunk, trunk active per token, NextN layers without copies of embedding and head)."""
    specs = param_specs(cfg)
    total = count(specs.with_drafts())
    routed = sum(count(p.mlp.routed) for p in specs.layers if isinstance(p.mlp, Moe))
    idle = routed - routed // max(cfg.n_routed_experts, 1) * cfg.num_experts_per_tok
    return total, total - idle, count(specs.drafts)
