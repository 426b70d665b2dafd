"""A model on some GPUs, with its load; deployments that cannot be estimated are refused."""

import math
from dataclasses import dataclass
from typing import Literal

from mtp_jax.errors import ConfigError
from mtp_jax.lab.planning.fit import IMBALANCE
from mtp_jax.lab.planning.hardware import Gpu, Rate
from mtp_jax.lab.planning.weights import Storage, drafts
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import head_of
from mtp_jax.model.room import MEMORY_FRACTION

ExchangeWay = Literal["gather", "all-to-all", "per-expert"]
"""The exchange: the way of rows to their experts. gather: every GPU gets all rows, and sums are reduced and
scattered. all-to-all: a row goes once to each GPU that holds experts of it. per-expert: a row goes once for
each of its experts, as DeepEP's low-latency kernels send it.
"""


@dataclass(frozen=True)
class Deployment:
    """A model, GPUs, and a load.

    Attributes:
        cfg: the model.
        storage: formats of its weights.
        gpu: the kind of GPU.
        data: number of groups of GPUs, each with requests of its own.
        model: number of GPUs in a group, which divide heads, dense layers and the vocabulary. All divide the
            experts.
        hosts: number of NVLink domains that the GPUs are spread over.
        requests: number of requests decoded at a time, by all GPUs together.
        context: number of cached tokens of each request.
        depth: number of drafts per step.
        tokens_per_step: number of tokens that a request gains per step.
        cache: "bfloat16" or "fp8".
        attention: the format that attention multiplies. This engine first expands an FP8 cache to bfloat16.
        redundant: number of second copies of experts.
        imbalance: ratio of the rows of experts of the busiest GPU to the mean.
        exchange: the way of rows to their experts.
        memory_fraction: share of a GPU's memory that is used.
        micro_batches: 1, or 2: one half is computed while the other is exchanged.
        page_size: number of tokens of a page of the cache; None: the usual number.
        draft_vocab: number of tokens that drafts choose among; None: all.
    """

    cfg: ModelConfig
    storage: Storage
    gpu: Gpu
    data: int
    model: int = 1
    hosts: int = 1
    requests: int = 1
    context: int = 4096
    depth: int = 0
    tokens_per_step: float = 1.0
    cache: str = "bfloat16"
    attention: Rate = "bf16"
    redundant: int = 0
    imbalance: float = IMBALANCE
    exchange: ExchangeWay = "all-to-all"
    memory_fraction: float = MEMORY_FRACTION
    micro_batches: int = 1
    page_size: int | None = None
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.data * self.model

    @property
    def busiest(self) -> int:
        """Number of requests of the group with most."""
        return -(-self.requests // self.data)

    @property
    def domain(self) -> int:
        """GPUs of an NVLink domain."""
        return self.gpus // self.hosts

    @property
    def layers(self) -> list[tuple[ModelConfig, int]]:
        """Sizes and numbers of layers with a cache: the trunk's, and the drafter's if anything is drafted."""
        c, head = self.cfg, head_of(self.cfg)
        own = [(c, i) for i in range(c.num_hidden_layers + (c.num_nextn_predict_layers if self.depth else 0))]
        sizes = head.sizes if head and self.depth else None
        return own if sizes is None else [*own, *((sizes, i) for i in range(sizes.num_hidden_layers))]

    @property
    def draft_rows(self) -> int:
        """Weights of the copy of the trunk's output table that drafts read; 0: there is none."""
        return (self.draft_vocab or 0) * self.cfg.hidden_size if self.depth else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of a cached token."""
        page = self.page_size or self.cfg.usual_page
        return math.ceil(sum(c.attention.token_bytes(i, self.cache, page) for c, i in self.layers))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot beside its cached tokens."""
        return sum(c.attention.slot_bytes(i, self.cache, self.depth + 1) for c, i in self.layers)


def hosts_for(gpu: Gpu, gpus: int) -> int:
    """The fewest NVLink domains that hold ``gpus`` GPUs."""
    return -(-gpus // gpu.domain)


def tokens_per_step(rates: tuple[float, ...], depth: int) -> float:
    """Tokens that a step of ``depth`` drafts emits on average.

    rates: the share of drafts accepted at a position once all earlier drafts are; the last rate holds for
    all further positions.
    """
    kept, total = 1.0, 1.0
    for position in range(depth):
        kept *= rates[min(position, len(rates) - 1)]
        total += kept
    return total


def _check(d: Deployment) -> None:
    c, gpus = d.cfg, d.gpus

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    for name in ("requests", "context"):
        need(getattr(d, name) >= 1, f"{name} = {getattr(d, name)}; expected 1 or more")
    need(0 < d.memory_fraction <= 1, f"memory_fraction = {d.memory_fraction:g}; expected above 0, at most 1")
    page, unit = c.usual_page if d.page_size is None else d.page_size, c.attention.page_unit
    need(
        page > 0 and page % unit == 0,
        f"page_size = {page}; expected a multiple of {unit}, such as {c.usual_page}",
    )
    limit = c.max_position_embeddings
    need(d.context <= limit, f"context = {d.context}; the model has positions for {limit}")
    need(0 <= d.depth <= 8, f"depth = {d.depth}; expected 0 to 8 drafts")
    need(
        not d.depth or c.drafts,
        f"depth = {d.depth}; config.json declares no NextN layer to draft with: expected depth 0",
    )
    need(
        d.draft_vocab is None or 0 < d.draft_vocab <= c.vocab_size,
        f"draft_vocab = {d.draft_vocab}; expected 1 to {c.vocab_size} tokens",
    )
    own = next((p.head for p in drafts(c)), None)
    need(
        d.draft_vocab is None or own is None,
        f"draft_vocab = {d.draft_vocab}, but the head has an output table of its own; leave it out",
    )
    most = c.drafter.most_drafts if c.drafter else None
    need(most is None or d.depth <= most, f"depth = {d.depth}; the head makes {most} drafts at most")
    need(gpus % d.hosts == 0, f"hosts = {d.hosts}; {gpus} GPUs do not divide over them")
    least = hosts_for(d.gpu, gpus)
    need(d.hosts >= least, f"hosts = {d.hosts}; {gpus} x {d.gpu.name.upper()} need {least} or more")
    need(
        d.domain % d.model == 0,
        f"a mesh of {d.data}x{d.model} has groups of {d.model} GPUs, a host {d.domain}: expected groups that "
        "lie within one host",
    )
    experts = c.n_routed_experts + d.redundant
    need(
        experts % gpus == 0, f"{experts} experts do not divide over {gpus} GPUs; choose a number that divides"
    )
    split = {"num_attention_heads": c.num_attention_heads, "intermediate_size": c.intermediate_size}
    split |= {"moe_intermediate_size": c.moe_intermediate_size, "vocab_size": c.vocab_size}
    split |= c.attention.parts()
    for name, size in split.items():
        need(
            size % d.model == 0,
            f"{name} = {size} does not divide over the {d.model} GPUs of a group; choose another mesh",
        )
