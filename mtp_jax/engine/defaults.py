"""Sizes of an engine that nobody gave, derived from the model, the device and its memory. No jax here.

docs/options.md has each derivation in a sentence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mtp_jax.engine.config import EngineConfig, EngineOptions
from mtp_jax.model.attention_config import Reach
from mtp_jax.model.config import ModelConfig

LONG = 8192
"""Tokens of a long request: the prompts of the load by which public servers are compared (InferenceX, 8k/1k).
Slots are counted in such requests. A chunk has no more tokens: it holds such a prompt.
"""

_SLOTS, _CHUNK = 8, 256
# Rows for which a product takes as long as the reading of its weight: the peak over twice the bandwidth,
# times the bytes of a weight. In FP8 and bfloat16 alike 206 on an H200, 295 on an H100
# (lab/planning/hardware.py).
_ROWS = 250


@dataclass(frozen=True)
class Target:
    """The devices that an engine's sizes are for.

    Attributes:
        cpu: whether they are processors.
        reach: the reach of the model's attention there.
        unit: number that slots are a multiple of: data shards, and micro-batches of each.
    """

    cpu: bool = True
    reach: Reach = "rows"
    unit: int = 1

    def length(self, cfg: ModelConfig) -> int:
        """Most tokens of a request, before the pages are known."""
        longest = cfg.max_position_embeddings
        return min(longest, LONG) if self.reach == "table" else longest

    def chunk(self, cfg: ModelConfig) -> int:
        """Tokens of a chunk: the rows of an expert take the time of reading it.

        A power of two, the nearest one. Where every token has scores of the whole table, they decide: a chunk
        is short.
        """
        if self.cpu or self.reach != "rows" or not cfg.n_routed_experts:
            return _CHUNK
        rows = _ROWS * cfg.n_routed_experts // cfg.num_experts_per_tok
        return max(min(_nearest(rows), LONG), _CHUNK)

    @property
    def slots(self) -> int:
        """Slots, before the pages are known."""
        return _divided(_SLOTS, self.unit)


def slots(config: EngineConfig, pages: int, shards: int) -> int:
    """Slots for a cache of ``pages`` pages per data shard: one for each long request that they hold.

    A power of two per shard, whose windows have no more rows than a chunk, as products gain nothing from
    more.
    """
    held = pages * config.page_size // LONG
    full, unit = config.prefill_chunk // (1 + config.num_speculative_tokens), shards * config.micro_batches
    return max(_below(min(held, full)) * shards, _divided(_SLOTS, unit))


def unasked(
    config: EngineConfig,
    options: EngineOptions,
    shards: int,
    most: Callable[[], int] | None = None,
    least: Callable[[int], int] = int,
) -> tuple[EngineConfig, str]:
    """The config with pages and a length that need no share of memory, and the reason for the pages.

    most: returns the pages of a data shard for which there is memory; None: a request has no more than
    ``LONG`` tokens, as nobody knows how many pages there is memory for. least: of all hosts.
    """
    own = options.max_model_len is None
    if options.num_pages is not None:
        return shortened(config, options.num_pages) if own else config, "as the options say"
    if own and most is None:
        config = replace(config, max_model_len=min(config.max_model_len, LONG))
    if not own or config.max_model_len <= LONG:
        return config, "for every slot"
    every = config.max_num_seqs // shards * config.pages_for(LONG)
    wanted, limit = max(every, config.columns), least(most() if most else 1)
    pages = min(wanted, limit)
    why = "for a request of that length" if pages > every else f"for every slot {LONG:,} tokens"
    if pages == limit:
        why = "half of the memory that weights leave"
    return shortened(replace(config, num_pages=pages), pages), why


def shortened(config: EngineConfig, pages: int) -> EngineConfig:
    """The config with a length that ``pages`` pages hold."""
    return replace(config, max_model_len=max(min(config.max_model_len, config.held(pages)), 2))


def told(config: EngineConfig, options: EngineOptions, cfg: ModelConfig, pages: str) -> str:
    """The sizes of an engine and their reasons, in a line. pages: the reason for the number of pages."""
    length, own = config.max_model_len, cfg.max_position_embeddings
    if options.max_model_len is not None:
        why = "as the options say"
    elif length == own:
        why = "the model's own"
    else:
        less = "more must be asked for here" if length == LONG else "the pages hold no more"
        why = f"the model's own is {own:,}; {less}"
    count = "" if config.num_pages is None else f"{config.num_pages:,} "
    return (
        f"{length:,} tokens of a request ({why}), {config.max_num_seqs} slots, chunks of "
        f"{config.prefill_chunk:,}, {count}pages of {config.page_size} tokens ({pages})"
    )


def _divided(count: int, unit: int) -> int:
    """A number, raised to a multiple of another."""
    return -(-count // unit) * unit


def _below(number: int) -> int:
    """The greatest power of two that is not above a number; 0 for 0."""
    return 1 << number.bit_length() - 1 if number else 0


def _nearest(number: int) -> int:
    """The power of two whose ratio to a number is nearest to 1."""
    below = _below(number)
    return below if number * number <= 2 * below * below else 2 * below
