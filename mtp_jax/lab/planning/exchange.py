"""Bytes that GPUs send each other in a step: rows to experts and back, sums of a group that divides heads."""

from dataclasses import dataclass

from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.fit import Fit
from mtp_jax.lab.planning.work import expected_gpus

_BFLOAT16 = 2
"""Bytes of a value of a sum."""


@dataclass(frozen=True)
class Sent:
    """Bytes that one GPU sends, and the seconds that it takes."""

    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.bytes + other.bytes, self.seconds + other.seconds)

    def __mul__(self, times: int) -> "Sent":
        return Sent(self.bytes * times, self.seconds * times)


def to_experts(d: Deployment, rows: float, fit: Fit) -> Sent:
    """The exchange of one MoE layer, there and back, of ``rows`` rows of the busiest group.

    Rows travel in the format that experts multiply, and sums return in bfloat16. The GPUs of a group share
    the work. Bytes divide over NVLink and the network in the ratio of GPUs inside and outside of the domain.
    """
    if d.data == 1:
        return Sent()
    copies = {
        "gather": d.gpus,
        "all-to-all": expected_gpus(d.cfg, d.gpus),
        "per-expert": d.cfg.num_experts_per_tok,
    }[d.exchange]
    sent = rows / d.model * copies * d.cfg.hidden_size * (d.storage.experts.row + _BFLOAT16)
    inside = d.domain / d.gpus
    per_byte = inside / d.gpu.nvlink + (1 - inside) / d.gpu.network
    # The busiest GPU is the busiest in part of the links only: between its imbalance and none.
    return Sent(sent, sent * per_byte / fit.wire * d.imbalance**0.5 + 2 * fit.collective)


def sums_of_group(d: Deployment, rows: float, fit: Fit) -> Sent:
    """The two sums of a layer, of attention and of the MLP, over the GPUs that divide heads and width."""
    if d.model == 1:
        return Sent()
    sent = 2 * rows * d.cfg.hidden_size * _BFLOAT16 * (d.model - 1) / d.model
    return Sent(sent, sent / (d.gpu.nvlink * fit.wire) + fit.collective) * 2
