"""Parameters as they are declared, without jax: one ``Spec`` per array, in trees of dataclasses.

Random initialisation, shardings, the tensors that a checkpoint must hold and every count of bytes derive from
``param_specs``. ``params`` registers the same trees with jax, where arrays stand in place of specs.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mtp_jax.model.config import Eagle3Config, GqaConfig, IndexerConfig, ModelConfig
from mtp_jax.model.spec import Spec, count

Weight = Any
"""A parameter: its ``Spec``, or in its place an array, a ``Narrow``, a shape or a sharding; or None."""


@dataclass(frozen=True)
class Indexer:
    """Parameters that choose the entries of sparse attention (arXiv 2512.02556, section 2.1)."""

    q: Weight  # [H, i, Q], of the queries' low rank
    k: Weight  # [i, D]
    k_norm: Weight  # [i]
    k_bias: Weight  # [i]
    weights: Weight  # [H, D] float32


@dataclass(frozen=True)
class Attention:
    """MLA (arXiv 2405.04434, section 2.1). ``q_a`` and ``q_norm`` are None when queries have no low rank.

    ``indexer`` is None without sparse attention, and where a layer attends to another layer's choice.
    """

    q_a: Weight  # [Q, D]
    q_norm: Weight  # [Q]
    q_b: Weight  # [N, nope + R, Q or D]
    kv_a: Weight  # [C + R, D]
    kv_norm: Weight  # [C]
    k_up: Weight  # [N, nope, C]
    v_up: Weight  # [N, v, C]
    o: Weight  # [D, N, v]
    indexer: Indexer | None = None


@dataclass(frozen=True)
class GqaAttention:
    """Grouped-query attention (GQA, arXiv 2305.13245): G heads of keys and values for N query heads.

    Biases and norms are None where the model has none. Keys and values are small, and whole on every device.
    """

    q: Weight  # [N, h, D]
    k: Weight  # [G, h, D]
    v: Weight  # [G, h, D]
    o: Weight  # [D, N, h]
    q_bias: Weight  # [N * h]
    k_bias: Weight  # [G * h]
    v_bias: Weight  # [G * h]
    q_norm: Weight  # [h]
    k_norm: Weight  # [h]


@dataclass(frozen=True)
class Mlp:
    """SwiGLU: gate and up stacked."""

    gate_up: Weight  # [2, I, D]
    down: Weight  # [D, I]


@dataclass(frozen=True)
class Moe:
    """Routed experts and the shared expert (None when the model has none).

    With ``copies`` the first axis of gate_up and down is slots, more than E, each of which holds some expert:
    ``copies[e]`` are the slots of expert e, then -1 (see ``expert_slots``).
    """

    router: Weight  # [E, D] float32
    bias: Weight  # [E] float32, selection only
    gate_up: Weight  # [E, 2, I, D]
    down: Weight  # [E, D, I]
    shared: Mlp | None
    copies: Weight = None  # [E, c] int32

    @property
    def routed(self) -> tuple[Weight, Weight]:
        """The matrices of all routed experts."""
        return self.gate_up, self.down


@dataclass(frozen=True)
class Layer:
    """A pre-norm decoder block."""

    attention_norm: Weight  # [D]
    attention: Attention | GqaAttention
    mlp_norm: Weight  # [D]
    mlp: Mlp | Moe

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make the layer's entries of its rows: the norm, and latents or keys and values."""
        a = self.attention
        kv = (a.k, a.v, a.k_bias, a.v_bias, a.k_norm) if isinstance(a, GqaAttention) else (a.kv_a, a.kv_norm)
        return self.attention_norm, *kv


@dataclass(frozen=True)
class NextN:
    """A Multi-Token-Prediction module. ``embed`` and ``head`` are None when they are the trunk's own."""

    token_norm: Weight  # [D], enorm
    hidden_norm: Weight  # [D], hnorm
    merge: Weight  # [D, 2D], eh_proj
    layer: Layer
    norm: Weight  # [D], shared_head.norm
    embed: Weight
    head: Weight

    @property
    def merging(self) -> tuple[Weight, ...]:
        """The matrix and the norms beside the layer."""
        return self.token_norm, self.hidden_norm, self.merge, self.norm

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make NextN entries of tokens: the merge, and latents or keys and values."""
        return self.token_norm, self.hidden_norm, self.merge, *self.layer.entries


@dataclass(frozen=True)
class Eagle3:
    """An EAGLE-3 head (arXiv 2503.01840, section 3.1) for a trunk of width D, itself of width d.

    ``embed`` is None where the trunk's serves, ``target_offset`` where head and trunk have one vocabulary.
    """

    tap_norms: tuple[Weight, ...]  # [D] of every tap, [taps * D] of all, or none
    fuse: Weight  # [d, taps * D], fc
    hidden_norm: Weight  # [d]
    layer: Layer  # its attention reads 2d values: the normed embedding, the normed hidden state
    norm: Weight  # [d]
    head: Weight  # [v, d], of the head's own vocabulary
    embed: Weight  # [V, d]
    target_offset: Weight  # [v] int32, d2t: token i of the head is token i + d2t[i] of the trunk

    @property
    def merging(self) -> tuple[Weight, ...]:
        """The norms beside the layer that a draft reads."""
        return self.hidden_norm, self.norm

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make entries of tokens: the fusion of taps, and latents or keys and values."""
        return *self.tap_norms, self.fuse, self.hidden_norm, *self.layer.entries


@dataclass(frozen=True)
class Params:
    """A whole model. ``head`` is None when the embedding is tied to it, ``drafter`` without a draft head."""

    embed: Weight  # [V, D]
    layers: tuple[Any, ...]  # Layer, or in a runner Stack[Layer]
    norm: Weight  # [D]
    head: Weight  # [V, D]
    nextn: tuple[NextN, ...]
    drafter: Eagle3 | None = None

    @property
    def table(self) -> Weight:
        """The vocabulary table behind the logits."""
        return self.embed if self.head is None else self.head

    @property
    def drafts(self) -> "Drafting":
        """The parameters that draft."""
        return self.nextn, self.drafter

    @property
    def can_draft(self) -> bool:
        """Whether there are parameters that draft."""
        return bool(self.nextn) or self.drafter is not None

    def with_drafts(self, drafts: "Drafting" = ((), None)) -> "Params":
        """The same trunk with other parameters that draft; without an argument it has none."""
        return replace(self, nextn=drafts[0], drafter=drafts[1])


def _norm(name: str, size: int) -> Spec:
    return Spec((size,), (None,), name, (size,), "ones", float32=True)


def _indexer(cfg: ModelConfig, index: IndexerConfig, p: str) -> Indexer:
    h, i, d, q = index.heads, index.dim, cfg.hidden_size, cfg.q_lora_rank or 0
    return Indexer(
        q=Spec((h, i, q), (None, None, None), f"{p}.wq_b.weight", (h * i, q)),
        k=Spec((i, d), (None, None), f"{p}.wk.weight", (i, d)),
        k_norm=_norm(f"{p}.k_norm.weight", i),
        k_bias=Spec((i,), (None,), f"{p}.k_norm.bias", (i,), "zeros", float32=True),
        weights=Spec((h, d), (None, None), f"{p}.weights_proj.weight", (h, d), float32=True),
    )


def _attention(cfg: ModelConfig, p: str, indexes: bool, inputs: int) -> Attention:
    n, d, c, q = cfg.num_attention_heads, cfg.hidden_size, cfg.kv_lora_rank, cfg.q_lora_rank
    qk, nope, v = cfg.qk_head_dim, cfg.qk_nope_head_dim, cfg.v_head_dim
    kv_b, kv_shape = f"{p}.kv_b_proj.weight", (n * (nope + v), c)
    kv_a = (cfg.latent_dim, inputs)
    q_name = f"{p}.q_proj.weight" if q is None else f"{p}.q_b_proj.weight"
    return Attention(
        q_a=None if q is None else Spec((q, inputs), (None, None), f"{p}.q_a_proj.weight", (q, inputs)),
        q_norm=None if q is None else _norm(f"{p}.q_a_layernorm.weight", q),
        q_b=Spec((n, qk, q or inputs), ("heads", None, None), q_name, (n * qk, q or inputs)),
        kv_a=Spec(kv_a, (None, None), f"{p}.kv_a_proj_with_mqa.weight", kv_a),
        kv_norm=_norm(f"{p}.kv_a_layernorm.weight", c),
        k_up=Spec((n, nope, c), ("heads", None, None), kv_b, kv_shape, rows=(0, nope)),
        v_up=Spec((n, v, c), ("heads", None, None), kv_b, kv_shape, rows=(nope, nope + v)),
        o=Spec((d, n, v), (None, "heads", None), f"{p}.o_proj.weight", (d, n * v)),
        indexer=_indexer(cfg, cfg.indexer, f"{p}.indexer") if cfg.indexer and indexes else None,
    )


def _gqa(cfg: ModelConfig, g: GqaConfig, p: str, inputs: int) -> GqaAttention:
    n, d, h = cfg.num_attention_heads, cfg.hidden_size, g.head_dim

    def heads(name: str, count: int, axis: str | None) -> Spec:
        shape = (count * h, inputs)
        return Spec((count, h, inputs), (axis, None, None), f"{p}.{name}_proj.weight", shape)

    def bias(name: str, count: int, axis: str | None) -> Spec | None:
        shape = (count * h,)
        return Spec(shape, (axis,), f"{p}.{name}_proj.bias", shape, "zeros") if g.bias else None

    return GqaAttention(
        q=heads("q", n, "heads"),
        k=heads("k", g.kv_heads, None),
        v=heads("v", g.kv_heads, None),
        o=Spec((d, n, h), (None, "heads", None), f"{p}.o_proj.weight", (d, n * h)),
        q_bias=bias("q", n, "heads"),
        k_bias=bias("k", g.kv_heads, None),
        v_bias=bias("v", g.kv_heads, None),
        q_norm=_norm(f"{p}.q_norm.weight", h) if g.qk_norm else None,
        k_norm=_norm(f"{p}.k_norm.weight", h) if g.qk_norm else None,
    )


def _mlp(p: str, width: int, d: int) -> Mlp:
    gate_up = (f"{p}.gate_proj.weight", f"{p}.up_proj.weight")
    return Mlp(
        gate_up=Spec((2, width, d), (None, "mlp", None), gate_up, (width, d)),
        down=Spec((d, width), (None, "mlp"), f"{p}.down_proj.weight", (d, width)),
    )


def _moe(cfg: ModelConfig, p: str) -> Moe:
    e, i, d = cfg.n_routed_experts, cfg.moe_intermediate_size, cfg.hidden_size
    experts = [f"{p}.experts.{k}" for k in range(e)]
    pairs = tuple((f"{x}.gate_proj.weight", f"{x}.up_proj.weight") for x in experts)
    downs = tuple(f"{x}.down_proj.weight" for x in experts)
    return Moe(
        router=Spec((e, d), (None, None), f"{p}.gate.weight", (e, d), float32=True),
        bias=Spec((e,), (None,), f"{p}.gate.e_score_correction_bias", (e,), "zeros", float32=True),
        gate_up=Spec((e, 2, i, d), ("experts", None, None, None), pairs, (i, d)),
        down=Spec((e, d, i), ("experts", None, None), downs, (d, i)),
        shared=_mlp(f"{p}.shared_experts", i * cfg.n_shared_experts, d) if cfg.n_shared_experts else None,
    )


def _layer(cfg: ModelConfig, number: int, moe: bool) -> Layer:
    return _block(cfg, f"model.layers.{number}", moe, cfg.indexes(number), cfg.hidden_size)


def _block(cfg: ModelConfig, p: str, moe: bool, indexes: bool, inputs: int) -> Layer:
    """inputs: number of values that the attention reads."""
    d, own = cfg.hidden_size, f"{p}.self_attn"
    gqa = _gqa(cfg, cfg.gqa, own, inputs) if cfg.gqa else None
    return Layer(
        attention_norm=_norm(f"{p}.input_layernorm.weight", d),
        attention=gqa or _attention(cfg, own, indexes, inputs),
        mlp_norm=_norm(f"{p}.post_attention_layernorm.weight", d),
        mlp=_moe(cfg, f"{p}.mlp") if moe else _mlp(f"{p}.mlp", cfg.intermediate_size, d),
    )


def _table(name: str, cfg: ModelConfig, vocabulary: int | None = None) -> Spec:
    shape = (cfg.vocab_size if vocabulary is None else vocabulary, cfg.hidden_size)
    return Spec(shape, ("vocab", None), name, shape, "embedding")


def _nextn(cfg: ModelConfig, k: int, own_embed: bool, own_head: bool) -> NextN:
    number, d = cfg.num_hidden_layers + k, cfg.hidden_size
    p = f"model.layers.{number}"
    return NextN(
        token_norm=_norm(f"{p}.enorm.weight", d),
        hidden_norm=_norm(f"{p}.hnorm.weight", d),
        merge=Spec((d, 2 * d), (None, None), f"{p}.eh_proj.weight", (d, 2 * d)),
        layer=_layer(cfg, number, cfg.nextn_moe[k]),
        norm=_norm(f"{p}.shared_head.norm.weight", d),
        embed=_table(f"{p}.embed_tokens.weight", cfg) if own_embed else None,
        head=_table(f"{p}.shared_head.head.weight", cfg) if own_head else None,
    )


Drafting = tuple[tuple[NextN, ...], Eagle3 | None]
"""NextN layers and a draft head, of which a model has one kind or none."""

EAGLE3 = "eagle3"
"""The prefix, in names here, of the tensors of an EAGLE-3 head."""


def _eagle3(cfg: ModelConfig, e: Eagle3Config) -> Eagle3:
    d, width = e.layer.hidden_size, len(e.taps) * cfg.hidden_size
    one = [f"{EAGLE3}.input_norm.weight"]
    each = [f"{EAGLE3}.fc_norm.{i}.weight" for i in range(e.tap_norms)]
    names, size = (one, width) if e.tap_norms == 1 else (each, cfg.hidden_size)
    offset, v = f"{EAGLE3}.d2t", e.layer.vocab_size
    return Eagle3(
        tap_norms=tuple(_norm(name, size) for name in names if e.tap_norms),
        fuse=Spec((d, width), (None, None), f"{EAGLE3}.fc.weight", (d, width)),
        hidden_norm=_norm(f"{EAGLE3}.layer.hidden_norm.weight", d),
        layer=_block(e.layer, f"{EAGLE3}.layer", moe=False, indexes=False, inputs=2 * d),
        norm=_norm(f"{EAGLE3}.norm.weight", d),
        head=_table(f"{EAGLE3}.lm_head.weight", e.layer),
        embed=_table(f"{EAGLE3}.embed_tokens.weight", e.layer, cfg.vocab_size) if e.embeds else None,
        target_offset=Spec((v,), (None,), offset, (v,), "zeros", ids=True) if e.maps else None,
    )


def param_specs(cfg: ModelConfig, own: Iterable[tuple[bool, bool]] = ()) -> Params:
    """The tree of ``Spec`` of a model.

    own: for the first NextN layers, whether embedding and head differ from the trunk's and are kept; the
    tables of the rest are the trunk's.
    """
    layers, nextn = range(cfg.num_hidden_layers), range(cfg.num_nextn_predict_layers)
    tables = itertools.chain(own, itertools.repeat((False, False)))
    return Params(
        embed=_table("model.embed_tokens.weight", cfg),
        layers=tuple(_layer(cfg, i, cfg.is_moe(i)) for i in layers),
        norm=_norm("model.norm.weight", cfg.hidden_size),
        head=None if cfg.tie_word_embeddings else _table("lm_head.weight", cfg),
        nextn=tuple(_nextn(cfg, k, embed, head) for k, (embed, head) in zip(nextn, tables, strict=False)),
        drafter=_eagle3(cfg, cfg.drafter) if cfg.drafter else None,
    )


def parameter_counts(cfg: ModelConfig) -> tuple[int, int, int]:
    """Parameters of (trunk, trunk active per token, NextN layers without copies of embedding and head)."""
    specs = param_specs(cfg)
    total = count(specs.with_drafts())
    routed = sum(count(p.mlp.routed) for p in specs.layers if isinstance(p.mlp, Moe))
    idle = routed - routed // max(cfg.n_routed_experts, 1) * cfg.num_experts_per_tok
    return total, total - idle, count(specs.drafts)
