"""How many weights each part of a model has, and in how many bytes a GPU keeps them.

`model/params.py` declares the same parameters, array by array; the tests hold the sums against it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.hf_quantization import FP8_BLOCK
from mtp_jax.planning.hardware import Rate


@dataclass(frozen=True)
class Format:
    """How weights are kept.

    Attributes:
        name: for people.
        bytes: of a weight, scales included.
        rate: what multiplies it.
        row: bytes of a value of the rows that it multiplies, as other GPUs are sent them.
    """

    name: str
    bytes: float
    rate: Rate
    row: float


BFLOAT16 = Format("bfloat16", 2, "bf16", 2)
# A float32 scale per block of 128 x 128; rows have one per 128 values (arXiv 2412.19437, section 3.3).
FP8 = Format("fp8", 1 + 4 / FP8_BLOCK**2, "fp8", 1 + 4 / FP8_BLOCK)
# NVIDIA's FP4: an e4m3 scale per 16 values. Published measurements have it; the engine does not read it.
NVFP4 = Format("nvfp4", 0.5 + 1 / 16, "fp4", 0.5 + 1 / 16)


def int4(group: int) -> Format:
    """int4 with a bfloat16 scale for each ``group`` weights; it is expanded where it is multiplied."""
    return Format("int4", 0.5 + 2 / group, "bf16", 2)


@dataclass(frozen=True)
class Storage:
    """In which format a checkpoint has its experts, and its other projections."""

    experts: Format
    others: Format

    @classmethod
    def of(cls, cfg: ModelConfig) -> "Storage":
        """What config.json announces; what it does not is bfloat16."""
        others = FP8 if cfg.fp8 else BFLOAT16
        return cls(others if cfg.int4_group is None else int4(cfg.int4_group), others)

    @property
    def name(self) -> str:
        """For people: "fp8", or "bfloat16, experts in int4"."""
        same = self.experts == self.others
        return self.others.name if same else f"{self.others.name}, experts in {self.experts.name}"


@dataclass(frozen=True)
class Weights:
    """Weights by the way in which they are kept.

    Attributes:
        narrow: in the checkpoint's format where it has one: projections.
        half: always in 16 bits: tables, biases, what queries and outputs absorb, the merge of NextN.
        single: always in float32: norms, routers.
    """

    narrow: int = 0
    half: int = 0
    single: int = 0

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.narrow + other.narrow, self.half + other.half, self.single + other.single)

    @property
    def count(self) -> int:
        """How many they are."""
        return self.narrow + self.half + self.single

    def nbytes(self, kept: Format) -> float:
        """Their bytes."""
        return self.narrow * kept.bytes + self.half * 2 + self.single * 4


@dataclass(frozen=True)
class Block:
    """A decoder block, by what the GPUs of one data shard divide among them.

    Attributes:
        whole: of attention, what each of them has whole: low ranks, grouped keys and values, the indexer.
        heads: of attention, what they divide by heads.
        mlp: the dense MLP or the shared experts, which they divide by width.
        router: the router, whole on each; nothing in a dense block.
        expert: weights of one routed expert. Experts are divided over all GPUs.
        experts: how many there are; 0 in a dense block.
    """

    whole: Weights
    heads: Weights
    mlp: Weights
    router: Weights = Weights()
    expert: int = 0
    experts: int = 0

    @property
    def once(self) -> Weights:
        """Everything but routed experts."""
        return self.whole + self.heads + self.mlp + self.router

    def nbytes(self, storage: Storage, model: int = 1, gpus: int = 1, redundant: int = 0) -> float:
        """Bytes on each of ``gpus`` GPUs, ``model`` of which divide a data shard's work among them."""
        split = (self.heads + self.mlp).nbytes(storage.others) / model
        physical = (self.experts + redundant) / gpus if self.experts else 0
        routed = self.expert * physical * storage.experts.bytes
        return (self.whole + self.router).nbytes(storage.others) + split + routed


def block(cfg: ModelConfig, layer: int, moe: bool) -> Block:
    """A decoder block; NextN layers count on from the trunk's."""
    d = cfg.hidden_size
    whole, heads = _grouped(cfg) if cfg.grouped else _latent(cfg, layer)
    whole += Weights(single=2 * d)  # the norms before attention and MLP
    if not moe:
        return Block(whole, heads, Weights(3 * d * cfg.intermediate_size))
    expert, e = 3 * d * cfg.moe_intermediate_size, cfg.n_routed_experts
    return Block(whole, heads, Weights(expert * cfg.n_shared_experts), Weights(single=e * d + e), expert, e)


def _latent(cfg: ModelConfig, layer: int) -> tuple[Weights, Weights]:
    """(whole, by heads) of MLA."""
    n, d, c, q = cfg.num_attention_heads, cfg.hidden_size, cfg.kv_lora_rank, cfg.q_lora_rank or 0
    whole = Weights(narrow=d * q + d * cfg.latent_dim, single=q + c)
    if cfg.indexer and cfg.indexes(layer):
        h, i = cfg.indexer.heads, cfg.indexer.dim
        whole += Weights(narrow=h * i * q + i * d, single=h * d + 2 * i)
    heads = n * cfg.qk_head_dim * (q or d) + d * n * cfg.v_head_dim
    return whole, Weights(heads, half=n * (cfg.qk_nope_head_dim + cfg.v_head_dim) * c)


def _grouped(cfg: ModelConfig) -> tuple[Weights, Weights]:
    """(whole, by heads) of grouped-query attention."""
    g, n, d = cfg.grouped, cfg.num_attention_heads, cfg.hidden_size
    assert g is not None, "a model without grouped-query attention has MLA"
    whole = Weights(2 * g.width * d, half=2 * g.width * g.bias, single=2 * g.head_dim * g.qk_norm)
    return whole, Weights(2 * n * g.head_dim * d, half=n * g.head_dim * g.bias)


def merge(cfg: ModelConfig) -> Weights:
    """What a NextN layer has beside its block: the merge of token and hidden state, three norms."""
    return Weights(half=2 * cfg.hidden_size**2, single=3 * cfg.hidden_size)


def table(cfg: ModelConfig) -> Weights:
    """A vocabulary table: the embedding, or the head."""
    return Weights(half=cfg.vocab_size * cfg.hidden_size)


def trunk(cfg: ModelConfig) -> tuple[Block, ...]:
    """The blocks of the trunk."""
    return tuple(block(cfg, i, cfg.is_moe(i)) for i in range(cfg.num_hidden_layers))


def nextn(cfg: ModelConfig) -> tuple[Block, ...]:
    """The blocks of the NextN layers."""
    return tuple(block(cfg, cfg.num_hidden_layers + k, moe) for k, moe in enumerate(cfg.nextn_moe))


def tables(cfg: ModelConfig) -> int:
    """How many vocabulary tables the trunk has."""
    return 1 if cfg.tie_word_embeddings else 2


def count(cfg: ModelConfig) -> tuple[int, int]:
    """Parameters of (trunk, NextN layers)."""

    def of(blocks: Iterable[Block]) -> int:
        return sum(b.once.count + b.expert * b.experts for b in blocks)

    whole = of(trunk(cfg)) + tables(cfg) * table(cfg).count + cfg.hidden_size  # the last norm
    return whole, of(nextn(cfg)) + len(cfg.nextn_moe) * merge(cfg).count
