"""Which executable a piece of work needs: buckets of slots, pages, prompt chunks and sampling modes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mtp_jax.decode.keys import Key, PrefillKey, SamplingMode, StepKey, buckets
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.depth import adaptive_depths
from mtp_jax.engine.request import MAX_LOGPROBS, Request


@dataclass(frozen=True)
class Buckets:
    """The sizes that programs come in: a piece of work runs in the smallest one that holds it.

    Attributes:
        slots: factor between the slots of steps, from 1 to max_num_seqs.
        chunk: tokens of the shortest chunk of a prompt.
        chunks: factor between the lengths of chunks, up to prefill_chunk.
        prompts: most prompts per data shard in one prefill, which reads the weights once.
        pages: factor between the widths of page tables, down from that of the longest request.
        rows: cached rows that the narrowest page table holds at least. On a CPU attention ends at the last
            row that a token sees, so a narrower table saves nothing there.
        logprobs: widths of log-probabilities: the chosen token's alone, or with so many alternatives.
    """

    slots: int = 2
    chunk: int = 16
    chunks: int = 4
    prompts: int = 4
    pages: int = 4
    rows: int = 2048
    logprobs: tuple[int, ...] = (0, 5, MAX_LOGPROBS)


BUCKETS = Buckets()
# Short prompts in one prefill.
TOGETHER = BUCKETS.prompts


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
    widest = _holding(_page_buckets(config), max(config.pages_for(r.capacity) for r in requests))
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
            page = _holding(_prefill_pages(config, size), -(-rows // config.page_size))[-1]
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

    Every program costs memory (docs/architecture.md), so there is one only where it computes much less than
    the next larger one: sampling programs serve greedy rows, too; long histories, whose steps are dominated
    by attention, get the fewest and the most slots alone; structured steps wait for the host in any case.
    """
    deepest = config.num_speculative_tokens
    depths = adaptive_depths(deepest) if config.adaptive_depth else (deepest,)
    sampled = SamplingMode(config.drafting, config.verifier)
    scored = replace(sampled, logprobs=MAX_LOGPROBS)
    slots, pages = _step_slots(config, shards), _page_buckets(config)
    ends, chunk = (slots[0], slots[-1]), config.prefill_chunk
    first: list[Key] = [
        PrefillKey(chunk, pages[-1]),
        StepKey(slots[-1], deepest, pages[-1], sampled),
        PrefillKey(chunk, pages[-1], MAX_LOGPROBS, MAX_LOGPROBS),
        StepKey(slots[-1], deepest, pages[-1], scored),
    ]
    if structured:
        first.append(StepKey(slots[-1], deepest, pages[-1], replace(scored, structured=True)))
    rest: list[Key] = []
    for size in _chunk_buckets(config):
        prompts = {1, _together(config, size, shards)}
        rest += [
            PrefillKey(size, p, prompts=n) for p in _prefill_pages(config, size) for n in sorted(prompts)
        ]
    for p in pages:
        some = slots if p == pages[0] else ends
        rest += [StepKey(b, d, p, sampled) for b in some for d in reversed(depths)]
    if structured:
        rest.append(StepKey(slots[0], deepest, pages[0], replace(sampled, structured=True)))
    return first, [k for k in dict.fromkeys(rest) if k not in first]


def all_keys(config: EngineConfig, shards: int = 1, structured: bool = True) -> list[Key]:
    """Everything that a server compiles."""
    first, rest = warm_up_keys(config, shards, structured)
    return first + rest


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
    return buckets(config.max_num_seqs, 1, BUCKETS.slots)


def _chunk_buckets(config: EngineConfig) -> Sequence[int]:
    return buckets(config.prefill_chunk, min(BUCKETS.chunk, config.prefill_chunk), BUCKETS.chunks)


def _page_buckets(config: EngineConfig) -> Sequence[int]:
    """Widths of the page tables of steps, and of the chunks that end a prompt."""
    sizes = [config.columns]
    while sizes[-1] > 1 and (narrower := -(-sizes[-1] // BUCKETS.pages)) * config.page_size >= BUCKETS.rows:
        sizes.append(narrower)
    return sizes[::-1]


def _prefill_pages(config: EngineConfig, tokens: int) -> Sequence[int]:
    """Widths of the page tables of chunks of so many tokens.

    Full chunks attend to the whole of their table, in the form that expands it (``prefill_form``): the first
    chunk of a prompt, which sees itself alone, has a table of its own length.
    """
    if tokens < config.prefill_chunk:
        return _page_buckets(config)
    own = min(-(-tokens // config.page_size), config.columns)
    return buckets(config.columns, own, BUCKETS.pages)


def _holding(sizes: Sequence[int], needed: int) -> Sequence[int]:
    """Sizes up to the first that holds ``needed``."""
    return [b for i, b in enumerate(sizes) if i == 0 or sizes[i - 1] < needed]


def _widths(requests: Iterable[Request]) -> tuple[int | None, int | None]:
    requests = list(requests)
    return _width(r.params.logprobs for r in requests), _width(r.params.prompt_logprobs for r in requests)


def _width(wanted: Iterable[int | None]) -> int | None:
    most = max((w for w in wanted if w is not None), default=None)
    return None if most is None else next(w for w in BUCKETS.logprobs if w >= most)
