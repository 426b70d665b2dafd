"""The parameters of DeepSeek-V4's blocks as they are declared, under the names of its release."""

from dataclasses import replace

from mtp_jax.model.config import CompressedConfig, HyperConfig, ModelConfig
from mtp_jax.model.layer_specs import Layer, Mlp, Moe, Weight, norm
from mtp_jax.model.spec import Spec, parameters


@parameters
class Compressor:
    """Makes an entry of r tokens, and of the r tokens before them where it overlaps: c = 2, else 1."""

    rows: Weight  # [c * d, D] float32, wkv
    gates: Weight  # [c * d, D] float32, wgate
    places: Weight  # [r, c * d] float32, ape: added to gates, by the token's place in the entry
    norm: Weight  # [d]


@parameters
class EntryIndexer:
    """Chooses the entries that a token attends to, by index keys that a compressor makes."""

    q: Weight  # [H, i, Q]
    weights: Weight  # [H, D] float32
    compressor: Compressor


@parameters
class CompressedAttention:
    """Window and compressed attention. ``compressor`` and ``indexer`` are None where a layer has none."""

    q_a: Weight  # [Q, D]
    q_norm: Weight  # [Q]
    q_b: Weight  # [N, d, Q]
    kv: Weight  # [d, D]
    kv_norm: Weight  # [d]
    sink: Weight  # [N] float32, a score without a value
    o_a: Weight  # [g, R, N / g * d]
    o: Weight  # [D, g, R], wo_b
    compressor: Compressor | None
    indexer: EntryIndexer | None

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make rows, entries and index keys."""
        return self.kv, self.kv_norm, self.compressor, self.indexer and self.indexer.compressor


@parameters
class Hyper:
    """Makes the gates of a sublayer's S streams, and the matrix that mixes them, of all S * D values."""

    mix: Weight  # [(2 + S) * S, S * D] float32, fn
    base: Weight  # [(2 + S) * S] float32
    scale: Weight  # [3] float32: of gates in, of gates out, of the matrix


@parameters
class HyperHead:
    """Makes the gates by which S streams become one, behind the last block."""

    mix: Weight  # [S, S * D] float32, fn
    base: Weight  # [S] float32
    scale: Weight  # [1] float32


def whole(name: str, *shape: int, init: str = "normal", float32: bool = False) -> Spec:
    """A tensor as it is, whole on every device."""
    return Spec(shape, (None,) * len(shape), name, shape, init, float32=float32)


def hyper_head(cfg: ModelConfig, prefix: str) -> HyperHead:
    """The gates behind the last block. prefix: "" for the trunk."""
    assert cfg.hyper is not None, "a DeepSeek-V4 has hyper-connections"
    s, p = cfg.hyper.streams, f"{prefix}hc_head_"
    return HyperHead(
        whole(f"{p}fn", s, s * cfg.hidden_size, float32=True),
        whole(f"{p}base", s, init="zeros", float32=True),
        whole(f"{p}scale", 1, init="ones", float32=True),
    )


def v4_block(cfg: ModelConfig, p: str, number: int) -> Layer:
    """A decoder block; draft layers count on from the trunk's."""
    assert cfg.compressed is not None, "a DeepSeek-V4 has compressed attention"
    assert cfg.hyper is not None, "a DeepSeek-V4 has hyper-connections"
    d = cfg.hidden_size
    return Layer(
        attention_norm=norm(f"{p}.attn_norm.weight", d),
        attention=_attention(cfg, cfg.compressed, f"{p}.attn", cfg.compressed.ratio(number)),
        mlp_norm=norm(f"{p}.ffn_norm.weight", d),
        mlp=_moe(cfg, f"{p}.ffn", hashed=number < cfg.num_hash_layers),
        attention_hyper=_hyper(cfg.hyper, d, f"{p}.hc_attn_"),
        mlp_hyper=_hyper(cfg.hyper, d, f"{p}.hc_ffn_"),
    )


def _hyper(h: HyperConfig, d: int, p: str) -> Hyper:
    s = h.streams
    rows = (2 + s) * s
    return Hyper(
        whole(f"{p}fn", rows, s * d, float32=True),
        whole(f"{p}base", rows, init="zeros", float32=True),
        whole(f"{p}scale", 3, init="ones", float32=True),
    )


def _compressor(cfg: ModelConfig, p: str, ratio: int, width: int) -> Compressor:
    rows = width * (2 if CompressedConfig.overlap(ratio) else 1)
    return Compressor(
        rows=whole(f"{p}.wkv.weight", rows, cfg.hidden_size, float32=True),
        gates=whole(f"{p}.wgate.weight", rows, cfg.hidden_size, float32=True),
        places=whole(f"{p}.ape", ratio, rows, float32=True),
        norm=norm(f"{p}.norm.weight", width),
    )


def _attention(cfg: ModelConfig, c: CompressedConfig, p: str, ratio: int) -> CompressedAttention:
    n, d, q, g, h = cfg.num_attention_heads, c.head_dim, cfg.q_lora_rank or 0, c.groups, cfg.hidden_size
    group = n // g * d
    indexer = EntryIndexer(
        q=Spec(
            (c.index_heads, c.index_dim, q),
            (None, None, None),
            f"{p}.indexer.wq_b.weight",
            (c.index_heads * c.index_dim, q),
        ),
        weights=whole(f"{p}.indexer.weights_proj.weight", c.index_heads, h, float32=True),
        compressor=_compressor(cfg, f"{p}.indexer.compressor", ratio or 1, c.index_dim),
    )
    return CompressedAttention(
        q_a=whole(f"{p}.wq_a.weight", q, h),
        q_norm=norm(f"{p}.q_norm.weight", q),
        q_b=Spec((n, d, q), ("heads", None, None), f"{p}.wq_b.weight", (n * d, q)),
        kv=whole(f"{p}.wkv.weight", d, h),
        kv_norm=norm(f"{p}.kv_norm.weight", d),
        sink=Spec((n,), ("heads",), f"{p}.attn_sink", (n,), "zeros", float32=True),
        o_a=Spec(
            (g, c.group_rank, group),
            ("heads", None, None),
            f"{p}.wo_a.weight",
            (g * c.group_rank, group),
        ),
        o=Spec((h, g, c.group_rank), (None, "heads", None), f"{p}.wo_b.weight", (h, g * c.group_rank)),
        compressor=_compressor(cfg, f"{p}.compressor", ratio, d) if ratio else None,
        indexer=indexer if ratio == 4 else None,
    )


def _moe(cfg: ModelConfig, p: str, hashed: bool) -> Moe:
    e, i, d, k = cfg.n_routed_experts, cfg.moe_intermediate_size, cfg.hidden_size, cfg.num_experts_per_tok
    experts, shared = [f"{p}.experts.{n}" for n in range(e)], f"{p}.shared_experts"
    table = replace(whole(f"{p}.gate.tid2eid", cfg.vocab_size, k, init="zeros"), ids=True)
    return Moe(
        router=whole(f"{p}.gate.weight", e, d, float32=True),
        bias=None if hashed else whole(f"{p}.gate.bias", e, init="zeros", float32=True),
        gate_up=Spec(
            (e, 2, i, d),
            ("experts", None, None, None),
            tuple((f"{x}.w1.weight", f"{x}.w3.weight") for x in experts),
            (i, d),
        ),
        down=Spec((e, d, i), ("experts", None, None), tuple(f"{x}.w2.weight" for x in experts), (d, i)),
        shared=Mlp(
            gate_up=Spec(
                (2, i, d), (None, "mlp", None), (f"{shared}.w1.weight", f"{shared}.w3.weight"), (i, d)
            ),
            down=Spec((d, i), (None, "mlp"), f"{shared}.w2.weight", (d, i)),
        ),
        by_token=table if hashed else None,
    )
