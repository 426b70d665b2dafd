"""Prompt tokens per second that a GPU prefills while it does no other work."""

from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.fit import LEAN, PREFILL, USUAL
from mtp_jax.lab.planning.weights import trunk
from mtp_jax.model.config import ModelConfig


def prompt_tokens_per_second(d: Deployment, seen: float | None = None) -> tuple[float, float]:
    """Rates of one GPU with usual and with lean software.

    Products with the weights that a token uses, and causal attention with expanded keys and values. seen:
    mean number of tokens that a token attends to; None: half of ``context``, the mean of a whole prompt.
    """
    seen = d.context / 2 if seen is None else seen
    c, peak, attending = d.cfg, d.gpu.peak, 0.0
    experts, narrow, half = 0, 0, 0
    for number, b in enumerate(trunk(c)):
        experts += b.expert * c.num_experts_per_tok if b.experts else 0
        narrow += sum(w.narrow for w in b.parts)
        half += sum(w.half + w.single for w in b.parts)
        attending += _attention_flops(c, number, seen)
    seconds = 2 * experts / peak(d.storage.experts.rate) + 2 * narrow / peak(d.storage.others.rate)
    seconds += (2 * half + attending) / peak("bf16")
    return PREFILL * USUAL.products / LEAN.products / seconds, PREFILL / seconds


def _attention_flops(c: ModelConfig, number: int, seen: float) -> float:
    """Operations of a token that attends to ``seen`` tokens, in one layer, with its indexer."""
    rows, scoring = c.attention.prompt_reads(number, seen)
    return 2 * c.num_attention_heads * (c.attention.key_dim + c.attention.value_dim) * rows + scoring
