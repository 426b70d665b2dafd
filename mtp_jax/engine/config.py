"""Sizes and choices of an engine."""

from dataclasses import dataclass
from typing import Literal

from mtp_jax.decode.keys import Drafting, Verifier
from mtp_jax.engine.request import MAX_DRAFTS
from mtp_jax.errors import ConfigError

KernelChoice = Literal["auto", "xla", "mosaic_gpu"]
CacheType = Literal["auto", "fp8"]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and choices of an engine.

    Attributes:
        num_speculative_tokens: depth K: drafts per step unless a request asks for fewer; at most 31.
        max_num_seqs: slots.
        max_model_len: most tokens of prompt and output together.
        page_size: cache rows per page.
        num_pages: pages per data shard; None: enough for every slot at max_model_len.
        prefill_chunk: most prompt tokens per prefill launch, and between two steps while most slots run.
        prefix_cache: keep the pages of past requests for prompts that begin the same.
        adaptive_depth: choose the depth of each step by measured speed; num_speculative_tokens is the most.
        drafting: "sampled" draws from the draft distribution, "greedy" takes its argmax; both lossless.
        verifier: "rejection" (arXiv 2211.17192), "block" (arXiv 2403.10444), or "coupled" (arXiv 2408.07978):
            a seed gives one text at every depth, for somewhat fewer accepted drafts.
        kernels: who computes attention, experts and FP8 products: "auto", a kernel where there is one for the
            device and the shapes; "xla", none; "mosaic_gpu", always a kernel, or an error. What lies between
            them (routing, norms, quantisation) is a kernel's where one can.
        dtype: of weights and cache.
        kv_cache_dtype: "auto", as dtype says; "fp8", latents in e4m3, with a scale per 128 of them.
        seed: from which seeds of requests without one are drawn.
    """

    num_speculative_tokens: int = 3
    max_num_seqs: int = 8
    max_model_len: int = 2048
    page_size: int = 64
    num_pages: int | None = None
    prefill_chunk: int = 256
    prefix_cache: bool = True
    adaptive_depth: bool = False
    drafting: Drafting = "sampled"
    verifier: Verifier = "block"
    kernels: KernelChoice = "auto"
    dtype: str = "float32"
    kv_cache_dtype: CacheType = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (("num_pages", 1, 2**22),) if self.num_pages is not None else ()
        for name, low, high in (
            *sizes,
            ("num_speculative_tokens", 0, MAX_DRAFTS),
            ("max_num_seqs", 1, 4096),
            ("max_model_len", 2, 2**24),
            ("page_size", 1, 4096),
            ("prefill_chunk", 1, 2**16),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} = {value!r}; expected an integer from {low} to {high}")
        for name, allowed in (
            ("prefix_cache", (True, False)),
            ("adaptive_depth", (True, False)),
            ("drafting", ("sampled", "greedy")),
            ("verifier", ("rejection", "block", "coupled")),
            ("kernels", ("auto", "xla", "mosaic_gpu")),
            ("dtype", ("float32", "bfloat16")),
            ("kv_cache_dtype", ("auto", "fp8")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} = {getattr(self, name)!r}; expected one of {allowed}")

    @property
    def columns(self) -> int:
        """Width of the page table: the pages of the longest request."""
        return self.pages_for(self.max_model_len)

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output together: max_model_len, or what the pages hold."""
        if self.num_pages is None:
            return self.max_model_len
        held = self.num_pages * self.page_size - self.num_speculative_tokens
        return min(self.max_model_len, max(held, 0))

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of this many tokens needs, the drafts past its end included."""
        return -(-(tokens + self.num_speculative_tokens) // self.page_size)

    def pages_for_step(self, rows: int, depth: int, capacity: int) -> int:
        """Pages that a step of ``depth`` drafts after ``rows`` tokens needs; ``capacity``: all tokens."""
        return min(-(-(rows + depth) // self.page_size), self.pages_for(capacity))
