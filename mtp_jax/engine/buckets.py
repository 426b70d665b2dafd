"""Which executable a piece of work needs: buckets of slots, pages, prompt chunks and sampling modes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from mtp_jax.decode.keys import Key, PageKey, SamplingMode, StepKey, buckets
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.depth import adaptive_depths
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True)
class Buckets:
    """The sizes that programs come in: a piece of work runs in the smallest one that holds it.

    Attributes:
        slots: factor between the slots of steps, from 1 to max_num_seqs.
        chunk: tokens of the shortest chunk of a prompt.
        chunks: factor between the lengths of chunks, up to prefill_chunk.
        prompts: most prompts per data shard in one chunk.
        pages: factor between the widths of page tables, down from that of the longest request.
        rows: cached rows that the narrowest page table holds at least. On a CPU attention ends at the last
            row that a token sees, so a narrower table saves nothing there.
        moved: pages that one program reads or writes, where the host's memory keeps pages.
        logprobs: widths of log-probabilities: the chosen token's alone, or with this number of alternatives.
    """

    slots: int = 2
    chunk: int = 16
    chunks: int = 4
    prompts: int = 4
    pages: int = 4
    rows: int = 2048
    moved: tuple[int, ...] = (1, 8)
    logprobs: tuple[int, ...] = (0, 5, MAX_LOGPROBS)


BUCKETS = Buckets()


@dataclass(frozen=True)
class Prompts:
    """The chunk that a step takes along: of each data shard some requests, and how many tokens of each."""

    tokens: int
    requests: Sequence[Sequence[Request]]

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.requests)

    def first(self, most: int) -> "Prompts":
        """The first ``most`` prompts of each shard."""
        return Prompts(self.tokens, [some[:most] for some in self.requests])

    def rows(self, prompts: int) -> list[Request | None]:
        """Requests by row of a chunk that takes ``prompts`` prompts per shard; None: an idle row."""
        return [r for some in self.requests for r in (*some, *[None] * (prompts - len(some)))]


def next_prompts(config: EngineConfig, waiting: Sequence[Sequence[Request]]) -> Prompts | None:
    """The waiting requests of each data shard to prefill now: the first, and requests like it.

    Chunks of other lengths wait: they would be padded, or cut. None if no request waits.
    """
    tokens = max((_next_chunk(config, w[0]) for w in waiting if w), default=0)
    if not tokens:
        return None
    alike = [[*w[:1], *(r for r in w[1:] if _next_chunk(config, r) == tokens)] for w in waiting]
    return Prompts(tokens, alike).first(_together(config, tokens, len(waiting)))


def step_key(
    config: EngineConfig, running: Sequence[Request], depth: int, prompts: Prompts | None = None
) -> StepKey:
    """The least key of one step of ``depth`` drafts over these requests and prompts."""
    return step_keys(config, running, [depth], prompts)[0]


def step_keys(
    config: EngineConfig, running: Sequence[Request], depths: Iterable[int], prompts: Prompts | None = None
) -> list[StepKey]:
    """The least keys of one step of each of these depths over these requests and prompts."""
    slots, mode, pages = max((r.residence.slot + 1 for r in running), default=0), mode_of(config, running), 0
    rows, chunk = {(r.progress.rows_bound, r.capacity) for r in running}, (0, 0, None)
    if prompts:
        ends = [r.residence.prefilled_after(prompts.tokens) for r in prompts]
        pages = -(-max(ends) // config.page_size)
        logprobs, scores = _widths(prompts)
        mode = replace(mode, logprobs=max((mode.logprobs, logprobs), key=lambda w: -1 if w is None else w))
        chunk = prompts.tokens, max(map(len, prompts.requests)), scores

    def key(depth: int) -> StepKey:
        windows = (config.pages_for_step(bound, depth, most) for bound, most in rows)
        return StepKey(slots, depth, max([pages, *windows]), mode, None, *chunk)

    return [key(depth) for depth in depths]


def keys_for(
    config: EngineConfig,
    requests: list[Request],
    shards: int,
    *,
    slots: int,
    pages: int,
    any_depth: bool = False,
    every_size: bool = False,
) -> list[Key]:
    """The executables to compile so that these requests can be served together.

    slots: the highest slot in use, which a step must reach however few requests there are. pages: that a
    data shard has; requests that need more together may be preempted, and prefilled again with their output.
    any_depth: see ``Runner``. every_size: smaller slot buckets, too, for when few of them run.
    """
    if not requests:
        return []
    needed = config.max_num_seqs
    if shards == 1:
        needed = max(slots, min(len(requests), needed))
    slots = slot_bucket(config, needed)
    # A prompt's first token comes with its chunk, but for a grammar's: who wants no more is in no window.
    windows = any(r.max_tokens > 1 or r.constraints for r in requests)
    sizes = [b for b in _step_slots(config, shards) if windows and (b == slots or (every_size and b < slots))]
    deepest, mode = max(r.depth for r in requests), mode_of(config, requests)
    fixed = all(r.fixed_depth for r in requests)
    depths = {deepest} if fixed else _depths(deepest, any_depth)
    widest = _holding(_page_buckets(config), max(config.pages_for(r.capacity) for r in requests))
    modes = [mode]
    if mode.structured and not all(r.constraints for r in requests):
        modes.append(replace(mode, structured=False))
    keys = [
        StepKey(b, d, p, m)
        for p in widest
        for d in sorted(depths, reverse=True)
        for m in modes
        for b in sizes
    ]
    # One request has nothing to run beside its prompt; no structured step takes a prompt while nothing runs.
    besides = []
    if len(requests) > 1:
        besides += [k for k in keys if k.slots == slots and k.depth in (min(depths), deepest)]
    if all(k.mode.structured for k in besides):
        besides += [StepKey(0, 0, p, SamplingMode(logprobs=mode.logprobs)) for p in widest]
    shapes = _shapes_for(config, requests, shards, pages)
    scores = _width(r.params.prompt_logprobs for r in requests)
    keys += [replace(k, tokens=t, prompts=n, prompt_logprobs=scores) for k in besides for t, n in shapes]
    return list(dict.fromkeys([*_page_keys(config), *keys]))


def _page_keys(config: EngineConfig) -> list[PageKey]:
    """Programs that move pages to the host's memory and back."""
    return [PageKey(n) for n in BUCKETS.moved] if config.host_cache_gib else []


def _shapes_for(
    config: EngineConfig, requests: list[Request], shards: int, pages: int
) -> list[tuple[int, int]]:
    """Tokens and prompts per shard of the chunks that these requests' prompts come in."""
    alike = Counter(size for r in requests for size in {*chunks(config, len(r.prompt))})
    if sum(config.pages_for(r.capacity) for r in requests) > pages:  # preempted requests come back longer
        alike[max(next(chunks(config, r.capacity)) for r in requests)] += 1
    shapes = []
    for size, count in alike.items():
        most = _together(config, size, shards, count)
        shapes += [(size, n) for n in sorted({1, most})]
    return shapes


def _depths(most: int, any_depth: bool) -> Sequence[int]:
    """The depths that adaptive steps need executables for."""
    return sorted({0, most}) if any_depth else adaptive_depths(most)


def warm_up_keys(
    config: EngineConfig, shards: int, structured: bool, any_depth: bool = False
) -> tuple[list[Key], list[Key]]:
    """The executables of a server: a few that can serve anything, and the rest, cheaper and likely ones
    first.

    any_depth: see ``Runner``; where it holds, ``_few_keys`` are enough. Elsewhere there is a program where it
    computes much less than the next larger one, as every program costs memory (docs/programs.md).
    Sampling programs serve greedy rows, too. Long histories, whose steps are dominated by attention, get the
    fewest and the most slots alone. Structured steps wait for the host in any case. Beside windows the
    shortest chunk has no program, as the windows cost the same, and the depth is none or the most, as the
    chunk costs more than drafts.
    """
    if any_depth:
        return _few_keys(config, shards, structured)
    deepest = config.num_speculative_tokens
    depths = adaptive_depths(deepest) if config.adaptive_depth else (deepest,)
    sampled = SamplingMode(config.drafting, config.verifier)
    scored = replace(sampled, logprobs=MAX_LOGPROBS)
    slots, pages, sizes = _step_slots(config, shards), _page_buckets(config), chunk_sizes(config)
    longest: dict[str, Any] = {"tokens": sizes[-1], "prompts": 1}
    anything: dict[str, Any] = longest | {"prompt_logprobs": MAX_LOGPROBS}
    widest = StepKey(slots[-1], deepest, pages[-1], scored)
    first = [StepKey(0, 0, pages[-1], SamplingMode(logprobs=MAX_LOGPROBS), **anything)]
    for mode in (scored, replace(scored, structured=True)) if structured else (scored,):
        first += [replace(widest, mode=mode), replace(widest, mode=mode, **anything)]
    rest: list[StepKey] = []
    for p in pages:
        narrow = p == pages[0]
        alone = sizes if narrow else sizes[-1:]
        rest += [StepKey(0, 0, p, SamplingMode(), None, size, 1) for size in alone]
        for b in slots if narrow else dict.fromkeys((slots[0], slots[-1])):
            rest += [StepKey(b, d, p, sampled) for d in reversed(depths)]
        ends = dict.fromkeys((depths[-1], depths[0]))
        for size in (sizes[1:] or sizes) if narrow else sizes[-1:]:
            for n, d in product(dict.fromkeys((1, _together(config, size, shards))), ends):
                rest.append(StepKey(slots[-1], d, p, sampled, None, size, n))
    if structured:
        rest.append(StepKey(slots[0], deepest, pages[0], replace(sampled, structured=True)))
    return [*_page_keys(config), *first], [k for k in dict.fromkeys(rest) if k not in first]


def _few_keys(config: EngineConfig, shards: int, structured: bool) -> tuple[list[Key], list[Key]]:
    """The executables of a server on a CPU: there each takes memory and seconds of compilation.

    Steps are as wide as the longest history, as attention ends at the last row that a token sees. A
    structured step, which is two programs, serves requests for log-probabilities, too. A step of all slots
    without drafts has a program, as its windows have one token instead of K + 1; one slot's deepest step
    makes no drafts in little more time. Prompts alone have two programs: one of the longest chunk, which
    gives log-probabilities, and a smaller one for short prompts.
    """
    deepest, pages, sizes = config.num_speculative_tokens, config.columns, chunk_sizes(config)
    one, every = _step_slots(config, shards)[0], config.max_num_seqs
    sampled = SamplingMode(config.drafting, config.verifier)
    scored = replace(sampled, logprobs=MAX_LOGPROBS, structured=structured)
    plain = StepKey(every, deepest, pages, sampled)
    prompts = StepKey(0, 0, pages, SamplingMode(logprobs=MAX_LOGPROBS), None, sizes[-1], 1, MAX_LOGPROBS)
    short = StepKey(0, 0, pages, SamplingMode(), None, sizes[-2:][0], 1)
    beside = replace(plain, tokens=sizes[-1], prompts=1)
    undrafted = [replace(plain, depth=0)] if config.adaptive_depth else []
    first = [prompts, replace(plain, mode=scored)]
    rest = dict.fromkeys([replace(plain, slots=one), short, beside, plain, *undrafted])
    return [*_page_keys(config), *first], list(rest)


def all_keys(
    config: EngineConfig, shards: int = 1, structured: bool = True, any_depth: bool = False
) -> list[Key]:
    """Everything that a server compiles."""
    first, rest = warm_up_keys(config, shards, structured, any_depth)
    return first + rest


def chunks(config: EngineConfig, tokens: int) -> Iterator[int]:
    """Chunk sizes of a prompt: full chunks, then the smallest bucket that holds the rest."""
    sizes = chunk_sizes(config)
    while tokens > 0:
        size = next((b for b in sizes if b >= tokens), config.prefill_chunk)
        yield size
        tokens -= size


def _next_chunk(config: EngineConfig, request: Request) -> int:
    return next(chunks(config, len(request.residence.tokens) - request.residence.prefilled))


def _together(config: EngineConfig, tokens: int, shards: int, waiting: int | None = None) -> int:
    """Most prompts per data shard that are prefilled at once, by ``tokens`` tokens each.

    waiting: prompts that there are; None: enough.
    """
    fitting = min(config.prefill_chunk // tokens, config.max_num_seqs // shards)
    sizes = [n for n in buckets(BUCKETS.prompts, 1, 2) if n <= fitting]
    return next((n for n in sizes if waiting is not None and n >= waiting), max(sizes, default=1))


def mode_of(config: EngineConfig, requests: Iterable[Request]) -> SamplingMode:
    """Static sampling choices that serve every one of these requests."""
    requests = list(requests)
    logprobs = _width(r.params.logprobs for r in requests)
    structured = any(r.constraints for r in requests)
    if all(r.params.is_plain_greedy for r in requests):
        return SamplingMode(logprobs=logprobs, structured=structured)
    return SamplingMode(config.drafting, config.verifier, logprobs, structured)


def slot_bucket(config: EngineConfig, slots: int) -> int:
    """Slots of the smallest step that reaches ``slots``."""
    return next(b for b in _slot_buckets(config) if b >= slots)


def _step_slots(config: EngineConfig, shards: int) -> Sequence[int]:
    """Slots of the steps to compile: over several data shards all, as the first few are one shard's alone."""
    return _slot_buckets(config) if shards == 1 else (config.max_num_seqs,)


def _slot_buckets(config: EngineConfig) -> Sequence[int]:
    return buckets(config.max_num_seqs, 1, BUCKETS.slots)


def chunk_sizes(config: EngineConfig) -> Sequence[int]:
    """Lengths of the chunks that prompts are cut into, the shortest first."""
    return buckets(config.prefill_chunk, min(BUCKETS.chunk, config.prefill_chunk), BUCKETS.chunks)


def _page_buckets(config: EngineConfig) -> Sequence[int]:
    """Widths of page tables."""
    sizes = [config.columns]
    while sizes[-1] > 1 and (narrower := -(-sizes[-1] // BUCKETS.pages)) * config.page_size >= BUCKETS.rows:
        sizes.append(narrower)
    return sizes[::-1]


def _holding(sizes: Sequence[int], needed: int) -> Sequence[int]:
    """Sizes up to the first that holds ``needed``."""
    return [b for i, b in enumerate(sizes) if i == 0 or sizes[i - 1] < needed]


def _widths(requests: Iterable[Request]) -> tuple[int | None, int | None]:
    requests = list(requests)
    return _width(r.params.logprobs for r in requests), _width(r.params.prompt_logprobs for r in requests)


def _width(wanted: Iterable[int | None]) -> int | None:
    most = max((w for w in wanted if w is not None), default=None)
    return None if most is None else next(w for w in BUCKETS.logprobs if w >= most)
