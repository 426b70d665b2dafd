"""Which executable a piece of work needs: buckets of slots, pages, prompt chunks and sampling modes."""

from collections.abc import Iterable, Iterator

from mtp_jax.decode.compiled import Key, PrefillKey, StepKey, buckets
from mtp_jax.decode.step import SamplingMode
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.request import MAX_LOGPROBS, Request

_LOGPROB_WIDTHS = (0, 5, MAX_LOGPROBS)
_SMALLEST_ROWS = 256
_SMALLEST_CHUNK = 16


def step_key(config: EngineConfig, running: list[Request]) -> StepKey:
    """What one step over these requests needs at least."""
    depth = max(r.depth for r in running)
    pages = max(min(-(-(r.rows_bound + depth + 1) // config.page_size), len(r.pages)) for r in running)
    return StepKey(max(r.slot for r in running) + 1, depth, pages, mode_of(config, running))


def prefill_key(config: EngineConfig, requests: list[Request]) -> PrefillKey:
    """What prefilling the next chunk of these requests together needs at least."""
    tokens = max(next(chunks(config, len(r.prompt) - r.prefilled)) for r in requests)
    rows = max(min(r.prefilled + tokens, len(r.prompt)) + 1 for r in requests)
    return PrefillKey(tokens, -(-rows // config.page_size), *_widths(requests))


def keys_for(config: EngineConfig, requests: list[Request], shards: int, slots: int = 0) -> list[Key]:
    """The executables to compile so that these requests can be served together.

    slots: the highest slot in use, which a step must reach however few requests there are.
    """
    if not requests:
        return []
    needed = config.max_num_seqs
    if shards == 1:
        needed = max(slots, min(len(requests), needed))
    slots = next(b for b in buckets(config.max_num_seqs, 1, 2) if b >= needed)
    depth, mode = max(r.depth for r in requests), mode_of(config, requests)
    pages = _page_buckets(config, max(config.pages_for(r.capacity) for r in requests))
    keys: list[Key] = [StepKey(slots, depth, p, mode) for p in pages]
    largest = PrefillKey(0, 0, *_widths(requests))
    for r in requests:
        start = 0
        while start < len(r.prompt):
            size = next(chunks(config, len(r.prompt) - start))
            rows = min(start + size, len(r.prompt)) + 1
            page = _page_buckets(config, -(-rows // config.page_size))[-1]
            keys.append(PrefillKey(size, page, largest.logprobs, largest.prompt_logprobs))
            largest = PrefillKey(max(size, largest.tokens), max(page, largest.pages), *_widths(requests))
            start += size
    # Shards prefill different prompts in one launch: the longest chunk may meet the longest history.
    return list(dict.fromkeys([*keys, largest] if shards > 1 else keys))


def chunks(config: EngineConfig, tokens: int) -> Iterator[int]:
    """Chunk sizes of a prompt: full chunks, then the smallest bucket that holds the rest."""
    full = config.prefill_chunk
    sizes = buckets(full, min(_SMALLEST_CHUNK, full), 4)
    while tokens > 0:
        size = next((b for b in sizes if b >= tokens), full)
        yield size
        tokens -= size


def mode_of(config: EngineConfig, requests: Iterable[Request]) -> SamplingMode:
    """Static sampling choices that serve every one of these requests."""
    requests = list(requests)
    logprobs = _width(r.params.logprobs for r in requests)
    if all(r.params.is_plain_greedy for r in requests):
        return SamplingMode(logprobs=logprobs)
    return SamplingMode(config.drafting, config.verifier, logprobs)


def _page_buckets(config: EngineConfig, needed: int) -> list[int]:
    """Page-table widths up to the first that holds ``needed`` pages."""
    smallest = min(-(-_SMALLEST_ROWS // config.page_size), config.columns)
    sizes = buckets(config.columns, smallest, 4)
    return [b for i, b in enumerate(sizes) if i == 0 or sizes[i - 1] < needed]


def _widths(requests: Iterable[Request]) -> tuple[int | None, int | None]:
    requests = list(requests)
    return _width(r.params.logprobs for r in requests), _width(r.params.prompt_logprobs for r in requests)


def _width(wanted: Iterable[int | None]) -> int | None:
    most = max((w for w in wanted if w is not None), default=None)
    return None if most is None else next(w for w in _LOGPROB_WIDTHS if w >= most)
