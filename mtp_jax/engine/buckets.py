"""Which executable a piece of work needs: buckets of slots, pages, prompt chunks and sampling modes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from mtp_jax.decode.keys import Key, PrefillKey, SamplingMode, StepKey, buckets
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.depth import adaptive_depths
from mtp_jax.engine.request import MAX_LOGPROBS, Request

_LOGPROB_WIDTHS = (0, 5, MAX_LOGPROBS)
# Rows of the narrowest page tables, of steps and of prefill: a short prompt sees no more.
_SMALLEST_ROWS, _SMALLEST_PROMPT = 256, 64
_SMALLEST_CHUNK = 16
# Short prompts in one prefill: the weights are read once for all of them.
TOGETHER = 4


def step_key(config: EngineConfig, running: list[Request], depth: int) -> StepKey:
    """What one step of ``depth`` drafts over these requests needs at least."""
    return step_keys(config, running, [depth])[0]


def step_keys(config: EngineConfig, running: list[Request], depths: Iterable[int]) -> list[StepKey]:
    """What one step of each of these depths over these requests needs at least."""
    slots, mode = max(r.slot for r in running) + 1, mode_of(config, running)
    rows = {(r.rows_bound, r.capacity) for r in running}
    return [
        StepKey(slots, depth, max(config.pages_for_step(bound, depth, most) for bound, most in rows), mode)
        for depth in depths
    ]


def prefill_key(config: EngineConfig, requests: list[Request], prompts: int = 1) -> PrefillKey:
    """What prefilling the next chunk of these requests together needs at least; ``prompts``: per shard."""
    tokens = max(_next_chunk(config, r) for r in requests)
    rows = max(min(r.prefilled + tokens, len(r.tokens)) for r in requests)
    return PrefillKey(tokens, -(-rows // config.page_size), *_widths(requests), prompts)


def prefill_together(config: EngineConfig, waiting: list[list[Request]]) -> list[list[Request]]:
    """Of each data shard's waiting requests those to prefill now: the first, and those alike.

    At least one request must wait. Chunks of other lengths wait: they would be padded, or cut.
    """
    tokens = max(_next_chunk(config, w[0]) for w in waiting if w)
    alike = [w[:1] + [r for r in w[1:] if _next_chunk(config, r) == tokens] for w in waiting]
    most = _together(config, tokens, len(waiting))
    return [w[:most] for w in alike]


def prompt_bucket(prompts: int) -> int:
    """Prompts per data shard of the smallest prefill that takes so many."""
    return next(b for b in _prompt_buckets(TOGETHER) if b >= prompts)


def keys_for(
    config: EngineConfig,
    requests: list[Request],
    shards: int,
    *,
    slots: int,
    pages: int,
    every_size: bool = False,
) -> list[Key]:
    """The executables to compile so that these requests can be served together.

    slots: the highest slot in use, which a step must reach however few requests there are. pages: that a
    data shard has; requests that need more together may be preempted, and prefilled again with their output.
    every_size: smaller slot buckets, too, for when few of them run.
    """
    if not requests:
        return []
    needed = config.max_num_seqs
    if shards == 1:
        needed = max(slots, min(len(requests), needed))
    slots = slot_bucket(config, needed)
    sizes = [b for b in _step_slots(config, shards) if b == slots or (every_size and b < slots)]
    deepest, mode = max(r.depth for r in requests), mode_of(config, requests)
    depths = {deepest} if all(r.fixed_depth for r in requests) else adaptive_depths(deepest)
    widest = _page_buckets(config, max(config.pages_for(r.capacity) for r in requests))
    modes = [mode]
    if mode.structured and not all(r.matcher for r in requests):
        modes.append(replace(mode, structured=False))
    keys: list[Key] = [
        StepKey(b, d, p, m)
        for p in widest
        for d in sorted(depths, reverse=True)
        for m in modes
        for b in sizes
    ]
    widths = _widths(requests)
    # A prompt that begins in the prefix cache, or meets another shard's, may need the longest chunk with the
    # longest history.
    tokens, columns = 0, 0
    alike: dict[int, list[int]] = {}
    for r in requests:
        start = 0
        while start < len(r.prompt):
            size = next(chunks(config, len(r.prompt) - start))
            rows = min(start + size, len(r.prompt))
            page = _page_buckets(config, -(-rows // config.page_size), _SMALLEST_PROMPT)[-1]
            keys.append(PrefillKey(size, page, *_widths([r])))
            alike.setdefault(size, []).append(page)
            tokens, columns = max(tokens, size), max(columns, page)
            start += size
    if sum(config.pages_for(r.capacity) for r in requests) > pages:
        tokens = max(next(chunks(config, r.capacity)) for r in requests)
        columns = widest[-1]
    keys.append(PrefillKey(tokens, columns, *widths))
    for size, found in alike.items():
        most = prompt_bucket(min(len(found), _together(config, size, shards)))
        keys += [PrefillKey(size, max(found), *widths, n) for n in _prompt_buckets(most) if n > 1]
    return list(dict.fromkeys(keys))


def warm_up_keys(config: EngineConfig, shards: int, structured: bool) -> tuple[list[Key], list[Key]]:
    """The executables of a server: a few that can serve anything, and the rest, cheaper, likely ones first.

    Long histories get fewer buckets: their steps are dominated by attention, not by slots that idle.
    """
    deepest = config.num_speculative_tokens
    depths = adaptive_depths(deepest) if config.adaptive_depth else (deepest,)
    greedy, sampled = SamplingMode(), SamplingMode(config.drafting, config.verifier)
    scored = replace(sampled, logprobs=MAX_LOGPROBS)
    slots, pages = _step_slots(config, shards), _page_buckets(config, config.columns)
    chunk = config.prefill_chunk
    first: list[Key] = [
        PrefillKey(chunk, pages[-1]),
        StepKey(slots[-1], deepest, pages[-1], sampled),
        PrefillKey(chunk, pages[-1], MAX_LOGPROBS, MAX_LOGPROBS),
        StepKey(slots[-1], deepest, pages[-1], scored),
    ]
    if structured:
        first.append(StepKey(slots[-1], deepest, pages[-1], replace(scored, structured=True)))
    rest: list[Key] = []
    prefills = _page_buckets(config, config.columns, _SMALLEST_PROMPT)
    for p in sorted({*prefills, *pages}):
        # A chunk of bucket b has more than a tokens: page tables of so few rows never meet it.
        sizes = [b for a, b in pairwise((0, *_chunk_buckets(config))) if a < p * config.page_size]
        for size in sizes if p in prefills else ():
            rest += [PrefillKey(size, p, prompts=n) for n in _prompt_buckets(_together(config, size, shards))]
        some = () if p not in pages else slots if p in pages[:2] else (slots[0], slots[-1])
        rest += [StepKey(b, d, p, mode) for mode in (greedy, sampled) for d in reversed(depths) for b in some]
    if structured:
        mode = replace(sampled, structured=True)
        ends = [(b, d) for d in (deepest, 0) for b in (slots[0], slots[-1])]
        rest += [StepKey(b, d, p, mode) for p in (pages[0], pages[-1]) for b, d in ends]
    return first, [k for k in dict.fromkeys(rest) if k not in first]


def chunks(config: EngineConfig, tokens: int) -> Iterator[int]:
    """Chunk sizes of a prompt: full chunks, then the smallest bucket that holds the rest."""
    sizes = _chunk_buckets(config)
    while tokens > 0:
        size = next((b for b in sizes if b >= tokens), config.prefill_chunk)
        yield size
        tokens -= size


def _next_chunk(config: EngineConfig, request: Request) -> int:
    return next(chunks(config, len(request.tokens) - request.prefilled))


def _together(config: EngineConfig, tokens: int, shards: int) -> int:
    """Most prompts per data shard that are prefilled at once, by so many tokens each."""
    fitting = min(config.prefill_chunk // tokens, config.max_num_seqs // shards)
    return max((n for n in _prompt_buckets(TOGETHER) if n <= fitting), default=1)


def _prompt_buckets(most: int) -> Sequence[int]:
    return buckets(most, 1, 2)


def mode_of(config: EngineConfig, requests: Iterable[Request]) -> SamplingMode:
    """Static sampling choices that serve every one of these requests."""
    requests = list(requests)
    logprobs = _width(r.params.logprobs for r in requests)
    structured = any(r.matcher for r in requests)
    if all(r.params.is_plain_greedy for r in requests):
        return SamplingMode(logprobs=logprobs, structured=structured)
    return SamplingMode(config.drafting, config.verifier, logprobs, structured)


def slot_bucket(config: EngineConfig, slots: int) -> int:
    """Slots of the smallest step that reaches so many."""
    return next(b for b in _slot_buckets(config) if b >= slots)


def _step_slots(config: EngineConfig, shards: int) -> Sequence[int]:
    """Slots of the steps to compile: over several data shards all, as the first few are one shard's alone."""
    return _slot_buckets(config) if shards == 1 else (config.max_num_seqs,)


def _slot_buckets(config: EngineConfig) -> Sequence[int]:
    return buckets(config.max_num_seqs, 1, 2)


def _chunk_buckets(config: EngineConfig) -> Sequence[int]:
    return buckets(config.prefill_chunk, min(_SMALLEST_CHUNK, config.prefill_chunk), 4)


def _page_buckets(config: EngineConfig, needed: int, rows: int = _SMALLEST_ROWS) -> list[int]:
    """Page-table widths, from one of ``rows``, up to the first that holds ``needed`` pages."""
    smallest = min(-(-rows // config.page_size), config.columns)
    sizes = buckets(config.columns, smallest, 4)
    return [b for i, b in enumerate(sizes) if i == 0 or sizes[i - 1] < needed]


def _widths(requests: Iterable[Request]) -> tuple[int | None, int | None]:
    requests = list(requests)
    return _width(r.params.logprobs for r in requests), _width(r.params.prompt_logprobs for r in requests)


def _width(wanted: Iterable[int | None]) -> int | None:
    most = max((w for w in wanted if w is not None), default=None)
    return None if most is None else next(w for w in _LOGPROB_WIDTHS if w >= most)
