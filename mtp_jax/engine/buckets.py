"""The program for each piece of work: buckets of slots, pages, prompt chunks and sampling modes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

from mtp_jax.decode.keys import Key, PageKey, SamplingMode, StepKey, buckets, cheapest
from mtp_jax.decode.launches import UNROLLED, Traits
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.depth_policy import adaptive_depths
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True)
class Sizes:
    """The sizes that programs come in: a piece of work runs in the smallest one that holds it.

    Attributes:
        slots: ratio of each number of slots that steps are compiled for to the next smaller one; the numbers
            run from 1 to max_num_seqs.
        chunk: number of tokens of the shortest chunk of a prompt.
        chunks: ratio of each length of chunks to the next smaller one, up to prefill_chunk.
        tile: number of tokens from which a longer chunk costs no less per token, where time goes into
            operations (on a CPU): the end of a prompt is cut into chunks that have fewer rows in all.
        prompts: most prompts per data shard in one chunk.
        pages: ratio of each width of page tables to the next smaller one, down from the longest request's.
        rows: least number of cached rows that a page table holds.
        moved: pages that one program reads or writes, where there is a host tier.
        middle: ratio of all slots to the number between one and all, where time goes into launches.
        logprobs: number of alternative tokens with log-probabilities, besides the chosen token.
    """

    slots: int = 2
    chunk: int = 16
    chunks: int = 4
    tile: int = 64
    prompts: int = 4
    pages: int = 4
    rows: int = 2048
    moved: tuple[int, ...] = (1, 8)
    middle: int = 8
    logprobs: tuple[int, ...] = (0, 5, MAX_LOGPROBS)


SIZES = Sizes()


@dataclass(frozen=True)
class ChunkPrompts:
    """The prompts of a chunk: some requests of each data shard, and ``tokens`` tokens of each."""

    tokens: int
    requests: Sequence[Sequence[Request]]

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.requests)

    def first(self, most: int) -> "ChunkPrompts":
        """The first ``most`` prompts of each shard."""
        return ChunkPrompts(self.tokens, [some[:most] for some in self.requests])

    def rows(self, prompts: int) -> list[Request | None]:
        """Requests by row of a chunk that takes ``prompts`` prompts per shard; None: an idle row."""
        return [r for some in self.requests for r in (*some, *[None] * (prompts - len(some)))]


class Buckets:
    """The programs of an engine: the key that a piece of work needs, and the keys that are compiled.

    Attributes:
        chunk_sizes: lengths of the chunks that prompts are cut into, the shortest first.
    """

    def __init__(self, config: EngineConfig, shards: int = 1, traits: Traits = UNROLLED) -> None:
        """shards: number of data shards. traits: see ``Runner``."""
        self._config, self._shards, self._traits = config, shards, traits
        self._any_depth, self._cuts = traits.any_depth, traits.any_depth and traits.by_rows
        self._steps, most = config.trees and config.trees.steps, config.prefill_chunk
        self.chunk_sizes: Sequence[int] = buckets(most, min(SIZES.chunk, most), SIZES.chunks)
        self._slots: Sequence[int] = buckets(config.max_num_seqs, 1, SIZES.slots)
        # Over several data shards a step has all slots, as the first slots all belong to one shard.
        self._step_slots = self._slots if shards == 1 else (config.max_num_seqs,)
        self._page_keys = [PageKey(n) for n in SIZES.moved] if config.host_cache_gib else list[PageKey]()

    # A piece of work

    def next_prompts(self, waiting: Sequence[Sequence[Request]]) -> ChunkPrompts | None:
        """The waiting requests of each data shard to prefill now: the first, and requests like it.

        Chunks of other lengths wait: they would be padded, or cut. None if no request waits.
        """
        tokens = max((self._next_chunk(w[0]) for w in waiting if w), default=0)
        if not tokens:
            return None
        alike = [[*w[:1], *(r for r in w[1:] if self._next_chunk(r) == tokens)] for w in waiting]
        return ChunkPrompts(tokens, alike).first(self._together(tokens))

    def step(
        self,
        running: Sequence[Request],
        depth: int,
        prompts: ChunkPrompts | None = None,
        kept: int | None = None,
    ) -> StepKey:
        """The smallest key for a step of ``depth`` drafts over these requests and prompts.

        kept: number of drafts per slot that it verifies, if it does not verify all.
        """
        config, mode, pages = self._config, self.mode(running), 0
        slots = max((r.residence.slot + 1 for r in running), default=0)
        rows, tokens, together, scores = {(r.progress.rows_bound, r.capacity) for r in running}, 0, 0, None
        if prompts:
            ends = [r.residence.prefilled_after(prompts.tokens) for r in prompts]
            pages = -(-max(ends) // config.page_size)
            logprobs = _width(r.params.logprobs for r in prompts)
            scores = _width(r.params.prompt_logprobs for r in prompts)
            widest = max((mode.logprobs, logprobs), key=lambda w: -1 if w is None else w)
            mode = replace(mode, logprobs=widest)
            tokens, together = prompts.tokens, max(map(len, prompts.requests))
        windows = (config.pages_for_step(bound, depth, most) for bound, most in rows)
        return StepKey(slots, depth, max([pages, *windows]), mode, tokens, together, scores, kept=kept)

    def ranked(self, depth: int) -> Sequence[int]:
        """Drafts per slot that ranked steps of ``depth`` drafts verify: the depths between none and all."""
        deepest = depth == self._config.num_speculative_tokens and self._config.adaptive_verification
        return adaptive_depths(depth)[1:-1] if deepest else ()

    def _ranked_keys(self, key: StepKey) -> list[StepKey]:
        """The ranked steps beside a step of the most drafts; a step of one slot has nothing to choose."""
        alone = key.slots == 1 or key.mode.structured
        return [] if alone else [replace(key, kept=kept) for kept in self.ranked(key.depth)]

    def slots(self, count: int) -> int:
        """Slots of the smallest step that reaches ``count`` slots."""
        return next(b for b in self._slots if b >= count)

    def chunks(self, tokens: int) -> Iterator[int]:
        """Chunk sizes of a prompt: full chunks, then the smallest bucket that holds the rest.

        Where padding takes time, as rows do, the rest comes in chunks of the next smaller bucket if these
        have fewer rows in all.
        """
        sizes = self.chunk_sizes
        while tokens > 0:
            size = next((b for b in sizes if b >= tokens), self._config.prefill_chunk)
            smaller = max((b for b in sizes if SIZES.tile <= b < size), default=size)
            if self._cuts and -(-tokens // smaller) * smaller < size:
                size = smaller
            yield size
            tokens -= size

    def _next_chunk(self, request: Request) -> int:
        return next(self.chunks(len(request.residence.tokens) - request.residence.prefilled))

    def _together(self, tokens: int, waiting: int | None = None) -> int:
        """Most prompts per data shard that are prefilled at once, by ``tokens`` tokens each.

        waiting: number of waiting prompts; None: enough for any chunk.
        """
        fitting = min(self._config.prefill_chunk // tokens, self._config.max_num_seqs // self._shards)
        sizes = [n for n in buckets(SIZES.prompts, 1, 2) if n <= fitting]
        return next((n for n in sizes if waiting is not None and n >= waiting), max(sizes, default=1))

    def mode(self, requests: Iterable[Request]) -> SamplingMode:
        """Static sampling choices that serve every one of these requests."""
        requests = list(requests)
        logprobs = _width(r.params.logprobs for r in requests)
        structured = any(r.constraints for r in requests)
        if all(r.params.is_plain_greedy for r in requests):
            return SamplingMode(logprobs=logprobs, structured=structured)
        return SamplingMode(self._config.drafting, self._config.verifier, logprobs, structured)

    # Programs to compile

    def prepare(self, requests: list[Request], every_size: bool = False) -> list[Key]:
        """The programs to compile so that these requests can be served together.

        A step must reach the highest slot that one of them has. every_size: compile smaller slot buckets,
        too, for the time when few requests run.
        """
        if not requests:
            return []
        widths, fixed = self._widths_of(requests), all(r.fixed_depth for r in requests)
        windows = self._windows(requests, widths, every_size)
        prompts = self._with_prompts(requests, widths, windows)
        ranked = [] if fixed else [k for key in windows for k in self._ranked_keys(key)]
        return list(dict.fromkeys([*self._page_keys, *windows, *prompts, *ranked]))

    def _windows(self, requests: list[Request], widths: Sequence[int], every_size: bool) -> list[StepKey]:
        """Steps of windows alone, the largest of which have a slot for each request."""
        # The chunk gives the first token, except under a grammar: a request that ends there needs no window.
        if not any(r.max_tokens > 1 or r.constraints for r in requests):
            return []
        slots, mode, deepest = self._slots_of(requests), self.mode(requests), max(r.depth for r in requests)
        sizes = [b for b in self._step_slots if b == slots or (every_size and b < slots)]
        depths = [deepest] if all(r.fixed_depth for r in requests) else self._depths(deepest)
        free = mode.structured and not all(r.constraints for r in requests)
        modes = [mode, replace(mode, structured=False)] if free else [mode]
        return [StepKey(b, d, p, m) for p, d, m, b in product(widths, sorted(depths)[::-1], modes, sizes)]

    def _with_prompts(
        self, requests: list[Request], widths: Sequence[int], windows: list[StepKey]
    ) -> list[StepKey]:
        """Steps that take prompts along, beside windows or alone.

        One request has nothing to run beside its prompt, and no structured step takes a prompt then. Beside
        windows the depth is none or the most, or the most alone where its program serves every depth.
        """
        beside = list[StepKey]()
        if windows and len(requests) > 1:
            slots, depths = max(k.slots for k in windows), sorted({k.depth for k in windows})
            ends = depths[-1:] if self._any_depth else (depths[0], depths[-1])
            beside += [k for k in windows if k.slots == slots and k.depth in ends]
        if all(k.mode.structured for k in beside):
            mode = SamplingMode(logprobs=_width(r.params.logprobs for r in requests))
            beside += [StepKey(0, 0, p, mode) for p in widths]
        scores, shapes = _width(r.params.prompt_logprobs for r in requests), self._shapes_for(requests)
        return [
            replace(k, tokens=t, prompts=n, prompt_logprobs=scores) for k, (t, n) in product(beside, shapes)
        ]

    def _slots_of(self, requests: list[Request]) -> int:
        """Slots of the step that reaches them all, as they run now and as they may."""
        if self._shards > 1:
            return self.slots(self._config.max_num_seqs)
        highest = max(r.residence.slot + 1 for r in requests)
        return self.slots(max(highest, min(len(requests), self._config.max_num_seqs)))

    def _widths_of(self, requests: list[Request]) -> Sequence[int]:
        """Widths of page tables up to the first that holds each of them."""
        return _up_to(self._page_sizes(), max(self._config.pages_for(r.capacity) for r in requests))

    def _shapes_for(self, requests: list[Request]) -> list[tuple[int, int]]:
        """Tokens and prompts per shard of the chunks that these requests' prompts come in."""
        pages = self._config.pages_per_shard(self._shards)
        alike = Counter(size for r in requests for size in self._sizes_of(r))
        if sum(self._config.pages_for(r.capacity) for r in requests) > pages:
            # Some may be preempted, and prefilled again with their output.
            alike[max(next(self.chunks(r.capacity)) for r in requests)] += 1
        shapes = []
        for size, count in alike.items():
            most = self._together(size, count)
            shapes += [(size, n) for n in sorted({1, most})]
        return shapes

    def _sizes_of(self, request: Request) -> set[int]:
        """Lengths of the chunks of a prompt; where they are cut to save rows, its end has none of its own."""
        sizes = {*self.chunks(len(request.prompt))}
        return {s for s in sizes if s >= min(SIZES.tile, max(sizes))} if self._cuts else sizes

    def _depths(self, most: int) -> Sequence[int]:
        """The depths that adaptive steps need executables for."""
        chain = most if self._steps is None else min(most, self._steps)
        return sorted({0, chain, most}) if self._any_depth else adaptive_depths(most, self._steps)

    def _page_sizes(self) -> Sequence[int]:
        """Widths of page tables: one, where a narrower table saves nothing."""
        sizes, size = [self._config.columns], self._config.page_size
        if self._traits.any_width:
            return sizes
        while sizes[-1] > 1 and (narrower := -(-sizes[-1] // SIZES.pages)) * size >= SIZES.rows:
            sizes.append(narrower)
        return sizes[::-1]

    def covering(self, keys: Iterable[Key], structured: bool) -> list[Key]:
        """The cheapest of a server's programs that covers each key, or the key itself."""
        every = [key for part in self.server(structured) for key in part]

        def covers(key: Key) -> Key:
            found = cheapest(every, key) if isinstance(key, StepKey) else None
            return key if found is None else found.program

        return [*dict.fromkeys(map(covers, keys))]

    def server(self, structured: bool) -> tuple[list[Key], list[Key]]:
        """Programs of a server: a few that serve any request, and cheaper programs, the likely first.

        Where one program serves every depth, ``_few`` are enough. Elsewhere there is a program where it
        computes much less than the next larger one, as every program costs memory (docs/programs.md).
        Sampling programs serve greedy rows, too. Long histories, whose steps are dominated by attention, get
        the fewest and the most slots alone. Structured steps wait for the host in any case. Beside windows
        the shortest chunk has no program, as the windows cost the same, and the depth is none or the most, as
        the chunk costs more than drafts.
        """
        if self._any_depth:
            return self._few(structured) if self._cuts else self._for_launches(structured)
        config = self._config
        deepest = config.num_speculative_tokens
        depths = adaptive_depths(deepest, self._steps) if config.adaptive_depth else (deepest,)
        sampled = SamplingMode(config.drafting, config.verifier)
        scored = replace(sampled, logprobs=MAX_LOGPROBS)
        slots, pages, sizes = self._step_slots, self._page_sizes(), self.chunk_sizes
        widest = StepKey(slots[-1], deepest, pages[-1], scored)
        first = [_scoring(StepKey(0, 0, pages[-1], SamplingMode(logprobs=MAX_LOGPROBS)), sizes[-1])]
        for mode in (scored, replace(scored, structured=True)) if structured else (scored,):
            key = replace(widest, mode=mode)
            first += [key, _scoring(key, sizes[-1])]
        rest = [key for p in pages for key in self._cheaper(p, depths, p == pages[0])]
        if structured:
            rest.append(StepKey(slots[0], deepest, pages[0], replace(sampled, structured=True)))
        return [*self._page_keys, *first], [k for k in dict.fromkeys(rest) if k not in first]

    def _cheaper(self, pages: int, depths: Sequence[int], narrow: bool) -> Iterator[StepKey]:
        """Steps over page tables of this width, for sampled tokens. narrow: whether none is narrower."""
        config, slots, sizes = self._config, self._step_slots, self.chunk_sizes
        sampled = SamplingMode(config.drafting, config.verifier)
        for size in sizes if narrow else sizes[-1:]:
            yield StepKey(0, 0, pages, SamplingMode(), size, 1)
        for b in slots if narrow else dict.fromkeys((slots[0], slots[-1])):
            yield from (StepKey(b, d, pages, sampled) for d in reversed(depths))
            yield from self._ranked_keys(StepKey(b, depths[-1], pages, sampled))
        ends = dict.fromkeys((depths[-1], depths[0]))
        for size in (sizes[1:] or sizes) if narrow else sizes[-1:]:
            for n, d in product(dict.fromkeys((1, self._together(size))), ends):
                yield StepKey(slots[-1], d, pages, sampled, size, n)

    def _few(self, structured: bool) -> tuple[list[Key], list[Key]]:
        """The programs of a server on a CPU: there each takes memory and seconds of compilation.

        Steps are as wide as the longest history, as attention ends at the last row that a token sees. A
        structured step, which is two programs, serves requests for log-probabilities, too. A step of all
        slots without drafts has a program, as its windows have one token instead of K + 1; one slot's deepest
        step makes no drafts in little more time. Prompts alone have two programs: one of the longest chunk,
        which gives log-probabilities, and a smaller one for short prompts. Where there are trees, chains have
        programs of their own.
        """
        config, sizes = self._config, self.chunk_sizes
        deepest, pages = config.num_speculative_tokens, config.columns
        one, every = self._step_slots[0], config.max_num_seqs
        sampled = SamplingMode(config.drafting, config.verifier)
        scored = replace(sampled, logprobs=MAX_LOGPROBS, structured=structured)
        plain = StepKey(every, deepest, pages, sampled)
        prompts = _scoring(StepKey(0, 0, pages, SamplingMode(logprobs=MAX_LOGPROBS)), sizes[-1])
        short = StepKey(0, 0, pages, SamplingMode(), sizes[-2:][0], 1)
        beside = replace(plain, tokens=sizes[-1], prompts=1)
        depths = self._depths(deepest)[:-1] if config.adaptive_depth else ()
        fewer = [replace(plain, depth=depth) for depth in depths]
        fewer += [replace(key, slots=one) for key in fewer if key.depth]
        first = [prompts, replace(plain, mode=scored)]
        alone = [replace(plain, slots=one), short, beside, plain]
        rest = dict.fromkeys([*alone, *fewer, *self._ranked_keys(plain)])
        return [*self._page_keys, *first], list(rest)

    def _for_launches(self, structured: bool) -> tuple[list[Key], list[Key]]:
        """The programs of a server on a GPU: there each takes a minute of compilation.

        The first serve everything: prompts alone with scores, steps that sample, steps with scores or a
        grammar, which is two programs. Rows cost little beside weights and launches, so that steps have few
        numbers of slots: one, all, and an eighth of many. A window of one token reads a fraction of the
        experts that a window of K + 1 does, so that steps without drafts have programs for one slot, too.
        A prompt that is shorter than a quarter of the longest chunk has a chunk of that size, alone and
        beside windows.
        """
        config, sizes = self._config, self.chunk_sizes
        widths = self._page_sizes()
        one, every, middle = self._step_slots[0], config.max_num_seqs, config.max_num_seqs // SIZES.middle
        sampled = SamplingMode(config.drafting, config.verifier)
        scored = replace(sampled, logprobs=MAX_LOGPROBS, structured=structured)
        plain = StepKey(every, config.num_speculative_tokens, widths[-1], sampled)
        alone, beside = (
            StepKey(0, 0, widths[-1], SamplingMode(), sizes[-1], 1),
            replace(plain, tokens=sizes[-1], prompts=1),
        )
        first = [_scoring(replace(alone, mode=SamplingMode(logprobs=MAX_LOGPROBS)), sizes[-1])]
        first += [plain, replace(plain, mode=scored)]
        depths = self._depths(plain.depth)[:-1] if config.adaptive_depth else ()
        fewer = [replace(plain, depth=depth) for depth in depths]
        single = [replace(key, slots=one) for key in (plain, *fewer)]
        rest = [beside, alone, *single, *fewer]
        rest += [replace(key, tokens=sizes[-2:][0]) for key in (alone, beside)]
        if middle >= SIZES.middle and middle in self._step_slots:
            rest.append(replace(plain, slots=middle))
        rest += self._ranked_keys(plain)
        rest += [replace(key, pages=p) for p in widths[:-1] for key in (plain, single[0], alone, beside)]
        return [*self._page_keys, *first], [k for k in dict.fromkeys(rest) if k not in first]


def _scoring(key: StepKey, tokens: int) -> StepKey:
    """The key with a chunk of one prompt, and log-probabilities of its tokens."""
    return replace(key, tokens=tokens, prompts=1, prompt_logprobs=MAX_LOGPROBS)


def _up_to(sizes: Sequence[int], needed: int) -> Sequence[int]:
    """Sizes up to the first size that reaches ``needed``."""
    return [b for i, b in enumerate(sizes) if i == 0 or sizes[i - 1] < needed]


def _width(wanted: Iterable[int | None]) -> int | None:
    most = max((w for w in wanted if w is not None), default=None)
    return None if most is None else next(w for w in SIZES.logprobs if w >= most)
