"""Room that the weights leave in a GPU's memory, and the number of tokens that can be cached there."""

from dataclasses import dataclass

from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.weights import BFLOAT16, declared, drafts
from mtp_jax.model.room import OVERHEAD, Room
from mtp_jax.model.spec import leaves

_GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU.

    Attributes:
        of: the whole memory, the weights (with NextN layers if there are drafts) and the programs' part.
        experts: bytes of routed experts among the weights.
        per_token: bytes of the cache of a token, in all layers.
        per_slot: bytes of the cache of a request beside its tokens, in all layers.
        groups: number of groups of GPUs, each with a cache for requests of its own.
        context: number of cached tokens of a request.
    """

    of: Room
    experts: float
    per_token: int
    per_slot: int
    groups: int
    context: int

    @property
    def overhead(self) -> float:
        """Bytes that programs take or that stay free."""
        return (1 - self.of.fraction) * self.of.total + self.of.programs

    @property
    def tokens(self) -> int:
        """Tokens that all groups together can cache, without any slot."""
        return self.beside(0) * self.groups

    def beside(self, slots: int) -> int:
        """Tokens that one group can cache beside the parts of its slots."""
        return max(int((self.of.bytes - slots * self.per_slot) // self.per_token), 0)

    @property
    def requests(self) -> int:
        """Requests of ``context`` tokens that all groups together can cache."""
        return self.of.holds(self.request) * self.groups

    @property
    def request(self) -> int:
        """Bytes of a request's cache."""
        return self.per_token * self.context + self.per_slot

    @property
    def needed(self) -> float:
        """The least memory: weights, overhead and one request's cache."""
        return self.of.taken + self.overhead + self.request


def memory(d: Deployment) -> Memory:
    """Memory of each GPU of a deployment; the number of requests does not change it."""
    specs, mesh = declared(d.cfg), {"data": d.data, "model": d.model}
    routed, others = [], []
    for spec in leaves(specs if d.depth else specs.with_drafts()):
        (routed if spec.axes[0] == "experts" else others).append(d.storage.nbytes(spec) / spec.parts(mesh))
    others.append(d.draft_rows * BFLOAT16.bytes / d.model)
    experts = sum(routed) * (1 + d.redundant / max(d.cfg.n_routed_experts, 1))
    return Memory(
        of=Room(d.gpu.memory, d.memory_fraction, experts + sum(others), OVERHEAD),
        experts=experts,
        per_token=d.cache_bytes,
        per_slot=d.slot_bytes,
        groups=d.data,
        context=d.context,
    )


@dataclass(frozen=True)
class DraftBytes:
    """Bytes of weights that one draft of one request reads, over all GPUs.

    Attributes:
        layers: bytes of its layers, with the experts that its token visits.
        table: bytes of the output table, or of the rows of it that drafts choose among.
    """

    layers: float
    table: float


def draft_bytes(d: Deployment) -> DraftBytes:
    """The weights of a pass of the first NextN layer, or of the head."""
    part, nbytes = drafts(d.cfg)[0], d.storage.nbytes
    layers = 0.0
    for spec in leaves((part.blocks, part.merging)):
        visited = d.cfg.num_experts_per_tok / d.cfg.n_routed_experts if spec.axes[0] == "experts" else 1.0
        layers += nbytes(spec) * visited
    whole = sum(map(nbytes, leaves(part.head or declared(d.cfg).table)))
    rows = (d.draft_vocab or 0) * d.cfg.hidden_size * BFLOAT16.bytes
    return DraftBytes(layers, rows or whole)


def misfit(d: Deployment) -> str | None:
    """The reason why a deployment does not fit, with its needs; None if at least one request does."""
    m = memory(d)
    if m.needed <= m.of.total:
        return None
    sizes = (m.needed, m.of.total, m.of.taken, m.overhead, m.request)
    needed, total, weights, overhead, cache = (f"{n / _GIB:.1f}" for n in sizes)
    return (
        f"{d.gpus} x {d.gpu.name.upper()}: needs {needed} GiB per GPU, has {total}: weights {weights}, "
        f"activations and reserve {overhead}, cache of one request of {d.context:,} tokens {cache}"
    )
