"""The parameters of a decoder block as they are declared, and of its parts."""

from typing import Any

from mtp_jax.model.config import GqaConfig, MlaConfig, ModelConfig
from mtp_jax.model.spec import Spec, parameters

Weight = Any
"""A parameter: its ``Spec``, or in its place an array, a ``Narrow``, a shape or a sharding; or None."""


@parameters
class Indexer:
    """Parameters that choose the entries of sparse attention (arXiv 2512.02556, section 2.1)."""

    q: Weight  # [H, i, Q], of the queries' low rank
    k: Weight  # [i, D]
    k_norm: Weight  # [i]
    k_bias: Weight  # [i]
    weights: Weight  # [H, D] float32


@parameters
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

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make latents."""
        return self.kv_a, self.kv_norm


@parameters
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

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make keys and values."""
        return self.k, self.v, self.k_bias, self.v_bias, self.k_norm


@parameters
class Mlp:
    """SwiGLU: gate and up stacked."""

    gate_up: Weight  # [2, I, D]
    down: Weight  # [D, I]


@parameters
class Moe:
    """Routed experts and the shared expert (None when the model has none).

    With ``copies`` the first axis of gate_up and down is slots, more than E, each of which holds some expert:
    ``copies[e]`` are the slots of expert e, then -1 (see ``expert_slots``). ``by_token`` lists the experts of
    each token, where a row's token chooses them; there is no bias then.
    """

    router: Weight  # [E, D] float32
    bias: Weight  # [E] float32, selection only
    gate_up: Weight  # [E, 2, I, D]
    down: Weight  # [E, D, I]
    shared: Mlp | None
    copies: Weight = None  # [E, c] int32
    by_token: Weight = None  # [V, k] int32, tid2eid

    @property
    def routed(self) -> tuple[Weight, Weight]:
        """The matrices of all routed experts."""
        return self.gate_up, self.down


@parameters
class Layer:
    """A pre-norm decoder block. Its halves have hyper-connections where there are several streams."""

    attention_norm: Weight  # [D]
    attention: Any  # Attention, GqaAttention or CompressedAttention
    mlp_norm: Weight  # [D]
    mlp: Mlp | Moe
    attention_hyper: Any = None  # Hyper
    mlp_hyper: Any = None  # Hyper

    @property
    def moe(self) -> Moe | None:
        """Its routed experts; None of a dense layer."""
        return self.mlp if isinstance(self.mlp, Moe) else None

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make the layer's entries of its rows: the norm, and latents or keys and values."""
        return self.attention_norm, self.attention_hyper, *self.attention.entries


def norm(name: str, size: int) -> Spec:
    """The weight of an RMSNorm, or of a LayerNorm."""
    return Spec((size,), (None,), name, (size,), "ones", float32=True)


def _indexer(cfg: ModelConfig, p: str) -> Indexer:
    index = cfg.indexer
    assert index is not None, "a layer with an indexer has a configuration of it"
    h, i, d, q = index.heads, index.dim, cfg.hidden_size, cfg.q_lora_rank or 0
    return Indexer(
        q=Spec((h, i, q), (None, None, None), f"{p}.wq_b.weight", (h * i, q)),
        k=Spec((i, d), (None, None), f"{p}.wk.weight", (i, d)),
        k_norm=norm(f"{p}.k_norm.weight", i),
        k_bias=Spec((i,), (None,), f"{p}.k_norm.bias", (i,), "zeros", float32=True),
        weights=Spec((h, d), (None, None), f"{p}.weights_proj.weight", (h, d), float32=True),
    )


def _attention(cfg: ModelConfig, p: str, indexes: bool, inputs: int) -> Attention:
    n, d, c, q = cfg.num_attention_heads, cfg.hidden_size, cfg.kv_lora_rank, cfg.q_lora_rank
    qk, nope, v = cfg.attention.key_dim, cfg.qk_nope_head_dim, cfg.v_head_dim
    kv_b, kv_shape = f"{p}.kv_b_proj.weight", (n * (nope + v), c)
    kv_a = (cfg.row.width, inputs)
    q_name = f"{p}.q_proj.weight" if q is None else f"{p}.q_b_proj.weight"
    return Attention(
        q_a=None if q is None else Spec((q, inputs), (None, None), f"{p}.q_a_proj.weight", (q, inputs)),
        q_norm=None if q is None else norm(f"{p}.q_a_layernorm.weight", q),
        q_b=Spec((n, qk, q or inputs), ("heads", None, None), q_name, (n * qk, q or inputs)),
        kv_a=Spec(kv_a, (None, None), f"{p}.kv_a_proj_with_mqa.weight", kv_a),
        kv_norm=norm(f"{p}.kv_a_layernorm.weight", c),
        k_up=Spec((n, nope, c), ("heads", None, None), kv_b, kv_shape, rows=(0, nope)),
        v_up=Spec((n, v, c), ("heads", None, None), kv_b, kv_shape, rows=(nope, nope + v)),
        o=Spec((d, n, v), (None, "heads", None), f"{p}.o_proj.weight", (d, n * v)),
        indexer=_indexer(cfg, f"{p}.indexer") if indexes else None,
    )


def _gqa(cfg: ModelConfig, p: str, indexes: bool, inputs: int) -> GqaAttention:
    g = cfg.attention
    assert isinstance(g, GqaConfig)
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
        q_norm=norm(f"{p}.q_norm.weight", h) if g.qk_norm else None,
        k_norm=norm(f"{p}.k_norm.weight", h) if g.qk_norm else None,
    )


_ATTENTION = {MlaConfig: _attention, GqaConfig: _gqa}


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


def block(cfg: ModelConfig, p: str, moe: bool, indexes: bool, inputs: int) -> Layer:
    """inputs: number of values that the attention reads."""
    d, own = cfg.hidden_size, f"{p}.self_attn"
    return Layer(
        attention_norm=norm(f"{p}.input_layernorm.weight", d),
        attention=_ATTENTION[type(cfg.attention)](cfg, own, indexes, inputs),
        mlp_norm=norm(f"{p}.post_attention_layernorm.weight", d),
        mlp=_moe(cfg, f"{p}.mlp") if moe else _mlp(f"{p}.mlp", cfg.intermediate_size, d),
    )


def table(name: str, cfg: ModelConfig, vocabulary: int | None = None) -> Spec:
    """A vocabulary table. vocabulary: its rows; None: the model's."""
    shape = (cfg.vocab_size if vocabulary is None else vocabulary, cfg.hidden_size)
    return Spec(shape, ("vocab", None), name, shape, "embedding")
