"""Weights of each part of a model, as ``param_specs`` declares them, and their bytes in a GPU's memory."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mtp_jax.lab.planning.hardware import Rate
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import HeadTree
from mtp_jax.model.hf_quantization import FP4_GROUP, FP8_BLOCK, NVFP4_GROUP
from mtp_jax.model.layer_specs import Layer
from mtp_jax.model.spec import Spec, count, leaves
from mtp_jax.model.specs import NextN, Params, param_specs


@dataclass(frozen=True)
class WeightFormat:
    """The format in which weights are stored.

    Attributes:
        name: the name in printed tables.
        bytes: bytes of a weight, scales included.
        rate: the format in which tensor cores multiply these weights, a key of ``Gpu.peak``.
        row: bytes of a value in the multiplied rows, as they travel between GPUs.
    """

    name: str
    bytes: float
    rate: Rate
    row: float


BFLOAT16 = WeightFormat("bfloat16", 2, "bf16", 2)
# A float32 scale per block of 128 x 128; rows have one per 128 values (arXiv 2412.19437, section 3.3).
FP8 = WeightFormat("fp8", 1 + 4 / FP8_BLOCK**2, "fp8", 1 + 4 / FP8_BLOCK)
# DeepSeek-V4's experts: a power of two in a byte per 32 values; they are expanded where they are multiplied.
FP4 = WeightFormat("fp4", 0.5 + 1 / FP4_GROUP, "bf16", 2)
# NVIDIA's FP4: an e4m3 scale per 16 values, which published measurements multiply as it is.
NVFP4 = WeightFormat("nvfp4", 0.5 + 1 / NVFP4_GROUP, "fp4", 0.5 + 1 / NVFP4_GROUP)
# The same as the engine multiplies it.
EXPANDED_NVFP4 = WeightFormat("nvfp4", 0.5 + 1 / NVFP4_GROUP, "bf16", 2)


def int4(group: int) -> WeightFormat:
    """int4 with a bfloat16 scale for each ``group`` weights; it is expanded where it is multiplied."""
    return WeightFormat("int4", 0.5 + 2 / group, "bf16", 2)


@dataclass(frozen=True)
class Storage:
    """The formats in which a checkpoint has its experts and its other projections."""

    experts: WeightFormat
    others: WeightFormat

    @classmethod
    def of(cls, cfg: ModelConfig) -> "Storage":
        """The formats that config.json announces, bfloat16 by default."""
        others = FP8 if cfg.fp8 else BFLOAT16
        experts = FP4 if cfg.fp4 else EXPANDED_NVFP4 if cfg.nvfp4 else others
        return cls(experts if cfg.int4_group is None else int4(cfg.int4_group), others)

    @property
    def name(self) -> str:
        """The name in printed tables: "fp8", or "bfloat16, experts in int4"."""
        same = self.experts == self.others
        return self.others.name if same else f"{self.others.name}, experts in {self.experts.name}"

    def nbytes(self, spec: Spec) -> float:
        """Bytes of a parameter."""
        kept = self.experts if spec.axes[0] == "experts" else self.others
        return spec.size * {"narrow": kept.bytes, "half": 2, "single": 4}[_kind(spec)]


def _kind(spec: Spec) -> Literal["narrow", "half", "single"]:
    """The field of ``WeightCounts`` that counts a parameter. The parts of kv_b are absorbed, in 16 bits."""
    if spec.float32 or spec.ids:
        return "single"
    return "narrow" if spec.projects and spec.rows is None else "half"


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of weights, by the way in which they are stored.

    Attributes:
        narrow: number of weights of projections, in the checkpoint's format if it has one.
        half: number of weights of tables, biases, matrices absorbed by queries and outputs, the merge of
            NextN: always in 16 bits.
        single: number of weights of norms, routers, compressors and hyper-connections: always in float32.
    """

    narrow: int = 0
    half: int = 0
    single: int = 0

    @classmethod
    def of(cls, specs: object) -> "WeightCounts":
        """The weights of a tree of specs."""
        sizes: Counter[str] = Counter()
        for spec in leaves(specs):
            sizes[_kind(spec)] += spec.size
        return cls(sizes["narrow"], sizes["half"], sizes["single"])


@dataclass(frozen=True)
class BlockWeights:
    """A decoder block, in the parts that the GPUs of one data shard divide in different ways.

    Attributes:
        whole: parts of attention that each GPU has whole: norms, low ranks, the indexer, keys and values of
            grouped-query attention, compressors, hyper-connections.
        heads: parts of attention that GPUs divide by heads.
        mlp: the dense MLP or the shared experts, which GPUs divide by width.
        router: the router, whole on each GPU; zero in a dense block.
        expert: number of weights of one routed expert. Experts are divided over all GPUs.
        experts: number of routed experts; 0 in a dense block.
    """

    whole: WeightCounts
    heads: WeightCounts
    mlp: WeightCounts
    router: WeightCounts = WeightCounts()
    expert: int = 0
    experts: int = 0

    @classmethod
    def of(cls, layer: Layer) -> "BlockWeights":
        """The block of a layer's specs."""
        own = layer.attention_norm, layer.attention, layer.mlp_norm
        attention = tuple(leaves((*own, layer.attention_hyper, layer.mlp_hyper)))
        whole = WeightCounts.of(tuple(s for s in attention if "heads" not in s.axes))
        heads = WeightCounts.of(tuple(s for s in attention if "heads" in s.axes))
        if not (moe := layer.moe):
            return cls(whole, heads, WeightCounts.of(layer.mlp))
        experts = moe.down.shape[0]
        router = WeightCounts.of((moe.router, moe.bias))
        return cls(whole, heads, WeightCounts.of(moe.shared), router, count(moe.routed) // experts, experts)

    @property
    def parts(self) -> tuple[WeightCounts, ...]:
        """All parts but routed experts."""
        return self.whole, self.heads, self.mlp, self.router


@cache
def declared(cfg: ModelConfig) -> Params:
    """The specs of a model's parameters."""
    return param_specs(cfg)


@cache
def trunk(cfg: ModelConfig) -> tuple[BlockWeights, ...]:
    """The blocks of the trunk."""
    return tuple(map(BlockWeights.of, declared(cfg).layers))


@cache
def drafts(cfg: ModelConfig) -> tuple[NextN | HeadTree, ...]:
    """The specs of the NextN layers, or of the draft head."""
    specs = declared(cfg)
    return specs.nextn if specs.drafter is None else (specs.drafter,)


@cache
def drafting_blocks(cfg: ModelConfig, number: int) -> tuple[BlockWeights, ...]:
    """The blocks of one of ``drafts``."""
    return tuple(map(BlockWeights.of, drafts(cfg)[number].blocks))
