"""Shares of a GPU's peaks that software reaches: the only numbers that are fitted, not derived.

Fitted by hand, as of November 2026, to the 17 points of ``published.toml``: speeds of SGLang, of DeepSeek's
own service and of TensorRT-LLM. None was measured on a GPU with this engine. ``LEAN`` is software with fused
kernels, graphs and tuned products; ``USUAL`` is LEAN times a second set of factors, for software that has
fewer of them. A published speed is expected between the two; they are the band of every estimate.
"""

from dataclasses import dataclass, replace

from mtp_jax.lab.planning.hardware import Gpu


@dataclass(frozen=True)
class Fit:
    """Shares of the peaks that software reaches.

    Attributes:
        memory: share of the memory bandwidth.
        products: share of the peak, in products of the few rows of decoding, quantising them included.
        attention: share of the peak, in attention. FlashMLA publishes 660 of 989 TFLOP/s on an H800.
        launch: seconds of a kernel in a graph that nothing hides.
        collective: seconds of a collective, on top of its bytes.
        wire: share of a link's bandwidth.
        overlap: share of the shorter of exchange and computing that two micro-batches hide. SGLang gains
            25.5 % with them at 256 requests per GPU, which this was fitted to, and loses 27 % at 32, which it
            was not: the estimate says 24 % and 29 %.
    """

    memory: float
    products: float
    attention: float
    launch: float
    collective: float
    wire: float
    overlap: float

    def on(self, gpu: Gpu) -> "Fit":
        """The shares on one kind of GPU."""
        share = YOUNG if gpu.young else 1.0
        return replace(self, products=self.products * share, attention=self.attention * share)


LEAN = Fit(memory=0.75, products=0.45, attention=0.55, launch=3.2e-6, collective=9e-6, wire=0.85, overlap=0.7)
_OF_LEAN = Fit(memory=0.85, products=0.7, attention=0.7, launch=1.6, collective=1.3, wire=0.85, overlap=0.8)
USUAL = Fit(**{name: value * getattr(_OF_LEAN, name) for name, value in vars(LEAN).items()})
BAND = (USUAL, LEAN)

# Products and attention reach this share on Blackwell of their share on Hopper, in the points of 2025.
YOUNG = 0.7

# Kernels of a well fused program: per layer, per draft and per step. `make gpu-compile` counts 25 per MoE
# layer of this engine's own, collectives included, and with sparse attention 43 more (docs/kernels.md).
OF_ATTENTION, OF_MOE, OF_DENSE, OF_INDEXER, OF_DRAFT, OF_STEP = 11, 9, 5, 43, 24, 40

# Kernels of a layer's hyper-connections, the gates and the gated sum of either half (the streams are added to
# where a sum is without them), and of a compressor, its product and its entries. Assumed.
OF_HYPER, OF_COMPRESSOR = 4, 2

# The busiest GPU's rows of experts over the mean, where experts are not rebalanced. Assumed.
IMBALANCE = 1.3

# The share of the peak in products of prompts. SGLang reads 52,300 tokens/s of 2k prompts on 8 H100.
PREFILL = 0.28
