"""A plan: memory, and speeds and cost for numbers of requests and depths."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.planning.deployment import Deployment, hosts_for, tokens_per_step
from mtp_jax.lab.planning.memory import DraftBytes, Memory, draft_bytes, memory, misfit
from mtp_jax.lab.planning.prefill import prompt_tokens_per_second
from mtp_jax.lab.planning.step_time import Band, band, fastest

Range = tuple[float, float]
"""Two figures: with usual software, with lean software."""

_GROWTH = 4
"""Factor between the numbers of requests that are shown by default."""


@dataclass(frozen=True)
class Row:
    """A number of requests at a depth.

    Attributes:
        deployment: the GPUs and the load.
        band: the step.
    """

    deployment: Deployment
    band: Band

    @property
    def user(self) -> Range:
        """Tokens per second of each request."""
        usual, lean = (self.deployment.tokens_per_step / seconds for seconds in self.band.seconds)
        return usual, lean

    @property
    def gpu(self) -> Range:
        """Tokens per second of each GPU."""
        share = self.deployment.requests / self.deployment.gpus
        return self.user[0] * share, self.user[1] * share

    def cost(self, price: float) -> Range:
        """Cost of a million tokens where a GPU costs ``price`` per hour."""
        usual, lean = (price / 3600 / rate * 1e6 for rate in self.gpu)
        return usual, lean

    @property
    def shares(self) -> dict[str, float]:
        """Pieces of the step with lean software, the longest first, as shares of it."""
        step = self.band.lean
        pieces = dict(step.seconds)
        pieces["exchange"] += pieces.pop("hidden")
        return {k: v / step.total for k, v in sorted(pieces.items(), key=lambda kv: -kv[1])}


@dataclass(frozen=True)
class Plan:
    """Needs and speeds of a deployment.

    Attributes:
        base: model, GPUs and options; its load is not that of any row.
        memory: memory with and without drafts; a side that does not fit is left out.
        rows: the loads that fit, in order of requests and depth.
        notes: sentences about loads that do not fit.
        price: cost of a GPU per hour; None: not given.
    """

    base: Deployment
    memory: dict[bool, Memory]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    price: float | None = None

    @property
    def prompts(self) -> Range:
        """Prompt tokens per second of each GPU, for prompts as long as the context."""
        return prompt_tokens_per_second(self.base)

    @property
    def draft(self) -> DraftBytes | None:
        """Weights that a draft reads; None: nothing is drafted."""
        return draft_bytes(self.base) if any(row.deployment.depth for row in self.rows) else None

    def to_dict(self) -> JsonObject:
        """The plan as a JSON object. Pairs are [usual, lean]."""
        d = self.base
        return {
            "gpu": d.gpu.name,
            "gpus": d.gpus,
            "hosts": d.hosts,
            "mesh": [d.data, d.model],
            "context": d.context,
            "weights": d.storage.name,
            "cache": d.cache,
            "exchange": d.exchange,
            "memory": [{"drafts": drafts, **_memory(m)} for drafts, m in self.memory.items()],
            "draft_vocab": d.draft_vocab,
            "draft_bytes": self.draft and asdict(self.draft),
            "prompt_tokens_per_second_per_gpu": list(self.prompts),
            "rows": [self._row(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def _row(self, row: Row) -> JsonObject:
        d, step = row.deployment, row.band.lean
        cost = {} if self.price is None else {"dollars_per_million_tokens": list(row.cost(self.price))}
        return {
            "requests": d.requests,
            "depth": d.depth,
            "tokens_per_step": d.tokens_per_step,
            "step_seconds": list(row.band.seconds),
            "tokens_per_second_per_user": list(row.user),
            "tokens_per_second_per_gpu": list(row.gpu),
            **cost,
            "micro_batches": row.band.micro_batches,
            "launches": step.launches,
            "bytes_sent_per_gpu": step.sent,
            "shares_lean": row.shares,
        }


def _memory(m: Memory) -> JsonObject:
    return {
        "bytes_per_gpu": m.of.total,
        "memory_fraction": m.of.fraction,
        "weights": m.of.taken,
        "experts": m.experts,
        "overhead": m.overhead,
        "cache": m.of.bytes,
        "cache_bytes_per_token": m.per_token,
        "cache_bytes_per_slot": m.per_slot,
        "cache_tokens": m.tokens,
        "requests": m.requests,
    }


def make(
    base: Deployment,
    requests: Sequence[int] | None,
    depths: Sequence[int],
    rates: tuple[float, ...],
    micro_batches: int | None = None,
    price: float | None = None,
) -> Plan:
    """The plan of a deployment.

    requests: None: 1, 4, 16 ... up to the largest number that fits. rates: see ``tokens_per_step``.
    micro_batches: None: the faster of 1 and 2. Raises ConfigError, with a deployment that fits, if nothing
    fits.
    """
    kinds = [
        replace(base, requests=1, depth=depth, tokens_per_step=tokens_per_step(rates, depth))
        for depth in depths
    ]
    fits = {bool(d.depth): memory(d) for d in kinds if misfit(d) is None}
    if not fits:
        raise ConfigError(f"{misfit(kinds[0])}{_would_do(kinds[0])}")
    # Memory depends on whether anything is drafted, and hardly on how much.
    others = {bool(d.depth): misfit(d) for d in kinds if bool(d.depth) not in fits}
    notes = [f"{'with' if drafts else 'without'} drafts {why}" for drafts, why in others.items()]
    most = min(m.requests for m in fits.values())
    rows = [
        Row(at, fastest(at) if micro_batches is None else band(replace(at, micro_batches=micro_batches)))
        for n in requests or _numbers(most)
        for d in kinds
        if bool(d.depth) in fits and n <= fits[bool(d.depth)].requests
        for at in [replace(d, requests=n)]
    ]
    more = (
        f"the cache holds {most:,} requests of {base.context:,} tokens; an FP8 cache, fewer tokens or "
        "more GPUs hold more"
    )
    if requests and not rows:
        raise ConfigError(f"{min(requests):,} requests are too many: {more}")
    if requests and max(requests) > most:
        notes.append(f"not all requests are shown: {more}")
    return Plan(base, fits, tuple(rows), tuple(notes), price)


def _numbers(most: int) -> Iterator[int]:
    n = 1
    while n < most:
        yield n
        n *= _GROWTH
    yield most


def _would_do(d: Deployment) -> str:
    """A deployment that fits, in a sentence: groups as large as a host, or the least doubling of the GPUs."""
    found = []
    if d.model < d.domain and _fits(d, data=d.hosts, model=d.domain):
        found.append(f"a mesh of {d.hosts}x{d.domain}")
    times = 2
    while d.cfg.n_routed_experts and d.cfg.n_routed_experts % (d.gpus * times) == 0:
        gpus = d.gpus * times
        if _fits(d, data=d.data * times, hosts=max(d.hosts, hosts_for(d.gpu, gpus))):
            found.append(f"{gpus} GPUs")
            break
        times *= 2
    return f"; {' or '.join(found)} would do" if found else ""


def _fits(d: Deployment, **changes: int) -> bool:
    """Whether a deployment with these changes can be made, and holds a request."""
    try:
        return misfit(replace(d, **changes)) is None
    except ConfigError:
        return False
