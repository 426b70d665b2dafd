"""A plan as text."""

from mtp_jax.lab.planning.memory import Memory
from mtp_jax.lab.planning.table import Plan, Range, Row
from mtp_jax.model.specs import parameter_counts

_GIB = 2**30
_SHOWN = 3
"""Pieces of a step that are shown."""


def text(plan: Plan, name: str) -> str:
    """Header, memory, and a line per number of requests and depth. name: the model's."""
    notes = ["", *plan.notes] if plan.notes else []
    return "\n".join([*_header(plan, name), "", *_rows(plan), *notes])


def _header(plan: Plan, name: str) -> list[str]:
    d = plan.base
    sizes = parameter_counts(d.cfg)
    trunk, _, nextn = (f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" for n in sizes)
    hosts = f"{d.hosts} host{'s' * (d.hosts > 1)}"
    way = f"experts over all GPUs, {d.exchange}" if d.data > 1 else "experts over all GPUs"
    drafting = f", {nextn} in NextN layers" if d.cfg.nextn_moe else ", no NextN layers"
    read, draft = _band(plan.prompts, 0), []
    if (own := plan.draft) is not None:
        total, among = own.layers + own.table, d.draft_vocab or d.cfg.vocab_size
        draft = [
            f"a draft chooses among {among:,} tokens and reads {total / 1e9:.2f} GB of weights, "
            f"{own.table / total:.0%} of them the output table"
        ]
    return [
        f"{name}: {trunk} parameters{drafting}; weights in {d.storage.name}, cache in {d.cache}",
        f"{d.gpus} x {d.gpu.name.upper()} in {hosts}, mesh {d.data}x{d.model}; {way}",
        f"prompts of {d.context:,} tokens: {read} tokens/s per GPU, while nothing is decoded",
        *draft,
        "",
        f"{'GiB per GPU':<16}{'has':>6}{'= weights':>11}{'(experts)':>10}{'+ reserve':>10}{'+ cache':>8}"
        f"{'bytes/token':>13}{'tokens fit':>13}{'requests':>9}",
        *(_memory("with drafts" if drafts else "without drafts", m) for drafts, m in plan.memory.items()),
    ]


def _memory(name: str, m: Memory) -> str:
    """Experts are part of the weights; the reserve is for activations, buffers and code, too."""
    total, weights, experts, overhead, room = (
        f"{n / _GIB:.1f}" for n in (m.of.total, m.of.taken, m.experts, m.overhead, m.of.bytes)
    )
    sizes = f"{total:>6}{weights:>11}{f'({experts})':>10}{overhead:>10}{room:>8}"
    return f"{name:<16}{sizes}{m.per_token:>13,}{m.tokens:>13,}{m.requests:>9,}"


def _rows(plan: Plan) -> list[str]:
    paid = plan.price is not None
    head = f"{'requests':>8} {'depth':>5} {'per step':>8} {'step, ms':>12} {'tokens/s, user':>15} "
    head += f"{'tokens/s, GPU':>14} {'$ per million ' if paid else ''}{'launches':>8}  "
    head += "longest parts, with lean software"
    return [head, *(_row(row, plan.price) for row in plan.rows)]


def _row(row: Row, price: float | None) -> str:
    d = row.deployment
    step = _band((row.band.seconds[0] * 1e3, row.band.seconds[1] * 1e3), 1)
    parts = ", ".join(f"{k} {v:.0%}" for k, v in list(row.shares.items())[:_SHOWN])
    halves = ", in two micro-batches" * (row.band.micro_batches > 1)
    cost = "" if price is None else f"{_band(row.cost(price), 2):>13} "
    return (
        f"{d.requests:>8,} {d.depth:>5} {d.tokens_per_step:>8.2f} {step:>12} {_band(row.user, 1):>15} "
        f"{_band(row.gpu, 0):>14} {cost}{row.band.lean.launches:>8,}  {parts}{halves}"
    )


def _band(ends: Range, digits: int) -> str:
    """Both ends of a band as text, the lower first."""
    low, high = sorted(ends)
    return f"{low:,.{digits}f}-{high:,.{digits}f}"
