"""What the weights leave of a GPU's memory, and how many tokens can be cached in it."""

from dataclasses import dataclass

from mtp_jax.model.room import Room
from mtp_jax.planning.deployment import Deployment
from mtp_jax.planning.fit import OVERHEAD
from mtp_jax.planning.weights import Block, merge, nextn, table, tables, trunk

_GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU.

    Attributes:
        of: all of it: the weights, the NextN layers' if anything is drafted, and what programs take.
        experts: of the weights, routed experts.
        per_token: cache of a token, in all layers.
        groups: groups of GPUs, each with a cache for requests of its own.
        context: cached tokens of a request.
    """

    of: Room
    experts: float
    per_token: int
    groups: int
    context: int

    @property
    def overhead(self) -> float:
        """What programs take, and what is left free."""
        return (1 - self.of.fraction) * self.of.total + self.of.programs

    @property
    def tokens(self) -> int:
        """Tokens that all groups together can cache."""
        return self.of.holds(self.per_token) * self.groups

    @property
    def requests(self) -> int:
        """Requests of ``context`` tokens that all groups together can cache."""
        return self.tokens // self.groups // self.context * self.groups

    @property
    def needed(self) -> float:
        """The least that must be there: weights, overhead and one request's cache."""
        return self.of.taken + self.overhead + self.per_token * self.context


def memory(d: Deployment) -> Memory:
    """Memory of each GPU of a deployment, whatever its requests."""
    c, drafts = d.cfg, bool(d.depth)

    def of(blocks: tuple[Block, ...]) -> float:
        return sum(b.nbytes(d.storage, d.model, d.gpus, d.redundant) for b in blocks)

    layers = trunk(c) + (nextn(c) if drafts else ())
    experts = sum(b.expert * (b.experts + d.redundant) for b in layers if b.experts) / d.gpus
    merges = len(c.nextn_moe) * merge(c).nbytes(d.storage.others) if drafts else 0
    vocabulary = tables(c) * table(c).nbytes(d.storage.others) / d.model
    weights = of(layers) + merges + vocabulary + c.hidden_size * 4
    return Memory(
        of=Room(d.gpu.memory, d.memory_fraction, weights, OVERHEAD),
        experts=experts * d.storage.experts.bytes,
        per_token=d.cache_bytes,
        groups=d.data,
        context=d.context,
    )


def misfit(d: Deployment) -> str | None:
    """Why a deployment does not fit, with what it needs; None if at least one request does."""
    m = memory(d)
    if m.needed <= m.of.total:
        return None
    sizes = (m.needed, m.of.total, m.of.taken, m.overhead, m.per_token * d.context)
    needed, total, weights, overhead, cache = (f"{n / _GIB:.1f}" for n in sizes)
    return (
        f"{d.gpus} x {d.gpu.name.upper()}: needs {needed} GiB per GPU, has {total}: weights {weights}, "
        f"activations and reserve {overhead}, cache of one request of {d.context:,} tokens {cache}"
    )
