"""Seconds of one step on the busiest GPU: a roofline for each piece, a price for launches and collectives.

A piece takes the longer of two times, reading its bytes and computing its operations, at the shares of
the peaks that a ``Fit`` names. Pieces add up. Only exchange and computing overlap, with two micro-batches.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.exchange import Sent, sums_of_group, to_experts
from mtp_jax.lab.planning.fit import (
    BAND,
    OF_ATTENTION,
    OF_COMPRESSOR,
    OF_DENSE,
    OF_DRAFT,
    OF_HYPER,
    OF_INDEXER,
    OF_MOE,
    OF_STEP,
    Fit,
)
from mtp_jax.lab.planning.hardware import Rate
from mtp_jax.lab.planning.weights import (
    BFLOAT16,
    BlockWeights,
    WeightCounts,
    WeightFormat,
    declared,
    drafting_blocks,
    drafts,
    trunk,
)
from mtp_jax.lab.planning.work import attention, expected_experts
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import head_of
from mtp_jax.model.layer_specs import Weight

COMPUTING = ("attention", "projections", "mlp", "experts", "head")


@dataclass(frozen=True)
class StepTime:
    """One step.

    Attributes:
        seconds: time of each piece: the pieces of COMPUTING, streams (of a model that has several), launches,
            exchange, hidden (negative: the time that two micro-batches save), drafting.
        launches: number of kernels of the trunk and head.
        sent: bytes that one GPU sends for the trunk.
    """

    seconds: dict[str, float]
    launches: int
    sent: float

    @property
    def total(self) -> float:
        """Seconds of all pieces."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Band:
    """The same step with usual and with lean software.

    Attributes:
        usual, lean: the two ends.
        micro_batches: 1 or 2, in this step.
    """

    usual: StepTime
    lean: StepTime
    micro_batches: int

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds with usual and with lean software."""
        return self.usual.total, self.lean.total


def band(d: Deployment) -> Band:
    """The band that the time of a deployment's step lies in."""
    usual, lean = (step(d, fit.on(d.gpu)) for fit in BAND)
    return Band(usual, lean, d.micro_batches)


def fastest(d: Deployment) -> Band:
    """The band of one micro-batch or of two: the band with the smaller middle."""
    one = band(replace(d, micro_batches=1))
    if d.data == 1 or d.busiest < 2:
        return one
    two = band(replace(d, micro_batches=2))

    def squared_middle(b: Band) -> float:
        return b.usual.total * b.lean.total

    return min(one, two, key=squared_middle)


def step(d: Deployment, fit: Fit) -> StepTime:
    """One step, with software of one quality."""
    parts, q = d.micro_batches, d.depth + 1
    times = _Times(d, d.cfg, fit, d.busiest / parts, d.requests / parts, q)
    seconds: dict[str, float] = dict.fromkeys(COMPUTING, 0.0)
    sent, launches = Sent(), 0
    for number, b, alike in _kinds(d.cfg):
        for piece, value in times.block(number, b).items():
            seconds[piece] = seconds.get(piece, 0.0) + value * parts * alike
        sent += times.exchange(b) * (parts * alike)
        launches += _launches(d, number, b) * alike
    seconds["head"] = times.head() * parts
    launches = launches * parts + OF_STEP
    overlapped = fit.overlap * min(sum(seconds.values()), sent.seconds) if parts > 1 else 0.0
    seconds |= {"launches": launches * fit.launch, "exchange": sent.seconds, "hidden": -overlapped}
    seconds["drafting"] = drafting(d, fit)
    return StepTime(seconds, launches, sent.bytes)


@cache
def _kinds(cfg: ModelConfig) -> Sequence[tuple[int, BlockWeights, int]]:
    """Blocks of the trunk that differ: the first of its kind, the block, and how often it occurs."""
    kinds = [(b, cfg.indexes(number)) for number, b in enumerate(trunk(cfg))]
    return [(kinds.index(kind), kind[0], times) for kind, times in Counter(kinds).items()]


def drafting(d: Deployment, fit: Fit) -> float:
    """Seconds of K passes of a NextN layer, or of a head, over one row of each request, with the logits; and
    of the rows that the window adds to its cache, each of which takes the merge and the layer's keys.

    A head that drafts blocks makes one pass over its rows.
    """
    if not d.depth:
        return 0.0
    head, parts, total = head_of(d.cfg), drafts(d.cfg), entries(d, fit, d.depth + 1)
    sizes, first, rows = d.cfg, d.cfg.num_hidden_layers, None
    if head is not None:
        sizes, first, rows = head.sizes or sizes, 0, head.rows
    once = _Times(d, sizes, fit, d.busiest, d.requests, rows or 1)
    drawn = replace(once, width=d.depth if rows else 1)
    launches = OF_DRAFT + OF_HYPER * (sizes.streams > 1)
    for k in range(1 if rows else d.depth):
        number = k % len(parts)
        part = parts[number]
        for i, b in enumerate(drafting_blocks(d.cfg, number)):
            total += sum(once.block(first + number + i, b).values()) + once.exchange(b).seconds
        total += (
            once.product(WeightCounts.of(part.merging)) + drawn.draft_head(part.head) + launches * fit.launch
        )
    return total


def entries(d: Deployment, fit: Fit, rows: int) -> float:
    """Seconds of writing the NextN cache: ``rows`` rows of each request."""
    times = _Times(d, d.cfg, fit, d.busiest, d.requests, rows)
    return times.product(WeightCounts.of(drafts(d.cfg)[0].entries))


def _launches(d: Deployment, number: int, b: BlockWeights) -> int:
    c, found = d.cfg, OF_ATTENTION + (OF_MOE if b.experts else OF_DENSE)
    found += OF_INDEXER if attention(c, number, 1, d.context).keys else 0
    if c.attention.has_entries(number):
        found += OF_COMPRESSOR * (2 if c.indexes(number) else 1)
    return found + OF_HYPER * (c.streams > 1)


@dataclass(frozen=True)
class _Times:
    """Seconds of pieces for one load.

    Attributes:
        d, fit: the deployment, and the shares of peaks that it reaches.
        cfg: sizes of the layers: the model's, or its draft head's.
        busiest: number of requests of the busiest group.
        requests: number of requests of all groups.
        width: number of tokens of each request in this pass.
    """

    d: Deployment
    cfg: ModelConfig
    fit: Fit
    busiest: float
    requests: float
    width: int

    def roofline(self, nbytes: float, flops: float, rate: Rate, share: float) -> float:
        """The longer of the times of reading and of computing."""
        gpu = self.d.gpu
        return max(nbytes / (gpu.bandwidth * self.fit.memory), flops / (gpu.peak(rate) * share))

    def product(self, w: WeightCounts, ways: int = 1) -> float:
        """Rows of one group times weights that ``ways`` GPUs divide."""
        rows = self.busiest * self.width

        def of(count: int, kept: WeightFormat, nbytes: float) -> float:
            return self.roofline(count * nbytes / ways, 2 * rows * count / ways, kept.rate, self.fit.products)

        others = self.d.storage.others
        narrow, half = of(w.narrow, others, others.bytes), of(w.half, BFLOAT16, 2)
        return narrow + half + of(w.single, BFLOAT16, 4)

    def block(self, number: int, b: BlockWeights) -> dict[str, float]:
        """A decoder block, by piece."""
        streams = {"streams": self.streams()} if self.cfg.streams > 1 else {}
        return streams | {
            "attention": self.attention(number),
            "projections": self.product(b.whole) + self.product(b.heads, self.d.model),
            "mlp": self.product(b.mlp, self.d.model) + self.product(b.router),
            "experts": self.experts(b) if b.experts else 0.0,
        }

    def attention(self, number: int) -> float:
        """Attention over the cache of one group; heads are divided, cached rows and the indexer are not."""
        d = self.d
        a = attention(self.cfg, number, self.width, d.context)
        row, key = self.cfg.row.bytes(d.cache), self.cfg.attention.key_bytes(number, d.cache)
        nbytes, flops = a.rows * row + a.keys * key, a.flops / d.model + a.scoring
        return self.roofline(self.busiest * nbytes, self.busiest * flops, d.attention, self.fit.attention)

    def streams(self) -> float:
        """Both halves of a block read all streams twice, to enter and to add to them, and write them once."""
        values = self.busiest * self.width * self.cfg.streams * self.cfg.hidden_size
        return 2 * 3 * values * BFLOAT16.bytes / (self.d.gpu.bandwidth * self.fit.memory)

    def experts(self, b: BlockWeights) -> float:
        """Routed experts of the busiest GPU that some row of any GPU chose."""
        d, rows = self.d, self.requests * self.width
        held = (b.experts + d.redundant) / d.gpus
        seen = expected_experts(d.cfg, rows) / b.experts * held
        mean, spread = rows * d.cfg.num_experts_per_tok / d.gpus, d.imbalance if d.gpus > 1 else 1.0
        if d.gpus > 1:
            # Few experts are chosen, and unevenly: the busiest GPU is taken to have one standard deviation,
            # the root of the mean, more than the mean.
            seen = min(seen + seen**0.5, held)
        kept = d.storage.experts
        flops = 2 * mean * spread * b.expert
        return self.roofline(seen * b.expert * kept.bytes, flops, kept.rate, self.fit.products)

    def head(self, own: Weight = None) -> float:
        """Logits of all rows. own: a drafter's table in the place of the trunk's."""
        return self.product(WeightCounts.of(own or declared(self.d.cfg).table), self.d.model)

    def draft_head(self, own: Weight) -> float:
        """Logits of drafts, from a table of their own, or the rows of the trunk's that drafts read."""
        rows = self.d.draft_rows
        return self.product(WeightCounts(half=rows), self.d.model) if rows else self.head(own)

    def exchange(self, b: BlockWeights) -> Sent:
        """Bytes and seconds of the exchange of one block."""
        rows = self.busiest * self.width
        sums = sums_of_group(self.d, rows, self.fit)
        return sums + to_experts(self.d, rows, self.fit) if b.experts else sums
