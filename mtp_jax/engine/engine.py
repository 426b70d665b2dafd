"""The engine: admits requests to slots, launches prefill chunks and steps, reads results one launch late.

    submit -> waiting -> (admit: slot + pages) -> prefill, chunk by chunk -> running -> finished
                 ^------------------- preempted, for want of pages ---------------'

The host never needs a step's outcome to launch the next one: lengths, stops and drafts live on the device.
"""

import itertools
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mtp_jax.config import ModelConfig
from mtp_jax.decode.compiled import DraftKey, Executables, Key, StepKey
from mtp_jax.decode.prefill import Chunk
from mtp_jax.decode.sampling import SamplingState
from mtp_jax.decode.state import Slots, StateShape, abstract_state, empty_state, mask_row
from mtp_jax.decode.step import ACCEPTED, COUNT, DRAFTED, FINISH, Finish, StepResult
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.depth import DepthController, adaptive_depths
from mtp_jax.engine.plan import keys_for, prefill_key, step_key, warm_up_keys
from mtp_jax.engine.request import Logprob, Request, SamplingParams, Status, TokenLogprobs
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.stats import Counters, EngineStats
from mtp_jax.engine.structured import allowed
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.grammar import Grammars, Matcher
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import check_divisible, data_size
from mtp_jax.model.trunk import Backend

_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.NAN: "error"}


@dataclass
class _Launch:
    """A launched program whose result is still on its way.

    Attributes:
        rows: which row of the result belongs to which request.
        result: tokens and counts.
        width: token columns of the result.
        at: when it was launched.
        step: the executable, if it is a step.
        prompt: log-probabilities of prompt tokens, from a prefill.
        chunk: what a prefill took.
    """

    rows: list[tuple[int, Request]]
    result: StepResult
    width: int
    step: StepKey | None = None
    prompt: Any = None
    chunk: Chunk | None = None
    at: float = field(default_factory=time.perf_counter)


class Engine:
    """Runs requests over slots. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        config: EngineConfig,
        mesh: Mesh | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Allocates the cache; compiles nothing yet (``prepare``). Raises ConfigError.

        grammars: for structured output; None refuses it.
        """
        check_divisible(cfg, mesh)
        self.shards = data_size(mesh)
        if config.max_num_seqs % self.shards:
            raise ConfigError(
                f"max_num_seqs = {config.max_num_seqs} does not divide over a data axis of {self.shards}"
            )
        if config.num_speculative_tokens and not cfg.num_nextn_predict_layers:
            raise ConfigError(
                f"num_speculative_tokens = {config.num_speculative_tokens}, but the checkpoint has no NextN "
                "layer; give draft_model=, or num_speculative_tokens=0"
            )
        self.cfg, self.config, self.params, self.grammars = cfg, config, params, grammars
        self.scheduler = Scheduler(config, self.shards)
        self.pages = self.scheduler.pools[0].pages
        shape = StateShape(config.max_num_seqs, self.pages, config.page_size, config.columns)
        abstract = abstract_state(cfg, shape, config.dtype, mesh)
        decode, prefill = Backend("absorbed", "sparse", mesh), Backend("naive", "sparse", mesh)
        self.executables = Executables(cfg, params, abstract, decode, prefill)
        self.state = empty_state(abstract)
        self.depth = DepthController(config.num_speculative_tokens)
        self.counters = Counters()
        self._inflight: deque[_Launch] = deque()
        self._last_read = 0.0
        # Whether slots or pages changed hands since the device was told.
        self._stale = False
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(config.seed)

    def submit(self, request: Request) -> None:
        """Queue a request that ``make_request`` built."""
        self.scheduler.enqueue(request)

    def make_request(
        self,
        prompt: Iterable[int],
        params: SamplingParams,
        seed: int | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        spare: int = 0,
    ) -> Request:
        """A request for a prompt of token ids. Any thread may call it. Raises RequestError.

        seed: overrides ``params.seed``. priority: lower numbers are served first. timeout: seconds from now
        after which it is ended with what it has. cache_salt: only requests of the same salt share cached
        pages. spare: further tokens its pages hold from the start.
        """
        try:
            ids, config = tuple(operator.index(t) for t in prompt), self.config
        except TypeError as e:
            raise RequestError(f"a prompt is a list of integers: {e}") from e
        _check_ids("the prompt", ids, self.cfg.vocab_size)
        _check_ids("logit_bias", params.logit_bias, self.cfg.vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, self.cfg.vocab_size)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        room = config.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; max_model_len = {config.max_model_len} leaves no room "
                "for an answer"
            )
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout = {timeout!r}; expected seconds above 0")
        depth = config.num_speculative_tokens
        if params.num_speculative_tokens is not None:
            if params.num_speculative_tokens > depth:
                raise RequestError(
                    f"num_speculative_tokens = {params.num_speculative_tokens}; the engine's is {depth}"
                )
            depth = params.num_speculative_tokens
        if seed is None:
            seed = params.seed if params.seed is not None else int(self._seeds.integers(2**32))
        max_tokens = min(params.max_tokens or room, room)
        capacity = len(ids) + max_tokens + spare
        needed = config.pages_for(capacity)
        if needed > self.pages:
            raise RequestError(
                f"the request needs {needed} cache pages, the engine has {self.pages}; lower max_tokens or "
                "raise num_pages"
            )
        # Which random numbers a sampled token meets depends on where steps begin, so a seed fixes the depth.
        seeded = params.seed is not None and params.temperature > 0
        return Request(
            next(self._ids),
            ids,
            params,
            seed,
            max_tokens,
            depth,
            capacity,
            spare=spare,
            matcher=self._matcher(params),
            fixed_depth=not config.adaptive_depth or seeded or params.num_speculative_tokens is not None,
            priority=priority,
            deadline=None if timeout is None else time.perf_counter() + timeout,
            salt=cache_salt,
        )

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request now, wherever it is; its slot and pages are free again."""
        if not request.finished:
            self._stale |= request.status is not Status.WAITING
            self._finish(request, reason)

    @property
    def busy(self) -> bool:
        """Whether a request is left to serve."""
        return self.scheduler.busy

    def prepare(self, requests: Iterable[Request], done: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing to serve these requests, beside those that are being served."""
        together = [*self.scheduler.live(), *requests]
        slots = max((r.slot + 1 for r in together), default=0)
        keys = keys_for(self.config, together, self.shards, slots=slots, pages=self.pages)
        self.executables.compile(keys, done)

    def warm_up_keys(self) -> tuple[list[Key], list[Key]]:
        """Executables for serving: those that can serve anything, and cheaper ones for smaller work."""
        return warm_up_keys(self.config, structured=self.grammars is not None)

    def flush_prefix_cache(self) -> None:
        """Forget the pages of past requests."""
        for pool in self.scheduler.pools:
            pool.forget()

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done."""
        c, pools = self.counters, self.scheduler.pools
        available, cached = sum(p.available for p in pools), sum(p.cached for p in pools)
        return EngineStats(
            running=sum(r is not None for r in self.scheduler.slots),
            waiting=len(self.scheduler.waiting),
            pages_total=self.pages * self.shards,
            pages_used=self.pages * self.shards - available,
            pages_cached=cached,
            prompt_tokens=c.prompt_tokens,
            generation_tokens=c.generation_tokens,
            prefix_queries=c.prefix_queries,
            prefix_hits=c.prefix_hits,
            preemptions=self.scheduler.preemptions,
            drafts=c.drafts,
            draft_tokens=c.draft_tokens,
            accepted_tokens=sum(c.accepted_at),
            accepted_per_position=tuple(c.accepted_at),
            depth_steps=dict(c.depth_steps),
            step_seconds=dict(c.depth_seconds),
            prefill_seconds=c.prefill_seconds,
            finished=dict(c.finished),
            executables=len(self.executables),
            realised_speedup=c.plain_seconds / c.compared_seconds if c.compared_seconds else None,
        )

    def step(self) -> list[Request]:
        """Launch what can be launched, then read what was launched before. Returns requests that advanced."""
        late = self._end_late()
        self._refresh()
        for request in self.scheduler.admit():
            self._admit(request)
        unread = len(self._inflight)
        self._launch_prefill()
        advanced = []
        if any(r.matcher for r in self.scheduler.running()):
            # What a grammar allows depends on the newest tokens: nothing may be in flight.
            advanced, unread = self._read(len(self._inflight)), 0
        self._launch_step()
        if len(self._inflight) == unread:
            unread = min(unread, 1)
        advanced += self._read(unread)
        if not self.busy:
            self._inflight.clear()
        return late + advanced

    def draft(self, prompt: Iterable[int], depth: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The token that greedily follows a prompt, and the drafts after it: (token, ids [K], logits [K, V]).

        The engine must be idle. Raises RequestError.
        """
        if self.scheduler.busy:
            raise RequestError("the engine is serving requests; draft needs it idle")
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        request = self.make_request(prompt, one, spare=depth)
        if len(request.prompt) + depth >= self.config.max_model_len:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {depth} drafts do not fit in max_model_len = "
                f"{self.config.max_model_len}"
            )
        key = DraftKey(depth, self.config.columns)
        self.prepare([request])
        self.executables.compile([key])
        self.submit(request)
        while self.busy:
            self.step()
        tokens, logits = self.executables.draft(key, self.params, self.state)
        return request.output[0], np.asarray(tokens[0]), np.asarray(logits[0])

    # Slots and pages

    def _end_late(self) -> list[Request]:
        """End the requests whose deadline has passed."""
        now = time.perf_counter()
        late = [r for r in self.scheduler.live() if r.deadline is not None and now > r.deadline]
        for request in late:
            self.abort(request, "timeout")
        return late

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        self.counters.finished[reason] += 1

    def _refresh(self) -> None:
        """Tell the device which slots and pages changed hands."""
        if self._stale:
            slots = self.scheduler.slots
            keep = np.array([r is not None for r in slots])
            table = np.concatenate([self._table(r.pages if r else []) for r in slots])
            self.state = self.executables.update(self.state, keep, table)
            self._stale = False

    def _table(self, pages: list[int]) -> Any:
        """A row of the page table, with the spare page where there is none."""
        table = np.full((1, self.config.columns), self.pages, np.int32)
        table[0, : len(pages)] = pages
        return table

    def _admit(self, request: Request) -> None:
        if request.admitted_at is None:
            request.admitted_at = time.perf_counter()
            request.cached_tokens = request.prefilled
            self.counters.prompt_tokens += len(request.prompt)
            if self.scheduler.looks_up(request):
                self.counters.prefix_queries += len(request.prompt)
                self.counters.prefix_hits += request.prefilled
        # The tail it goes on from. Without one the spare page's: nothing merges it, row 0 does not exist.
        last = request.prefilled // self.config.page_size - 1
        page = request.pages[last] if last >= 0 else self.pages
        tail = self.scheduler.shard_of(request.slot) * (self.pages + 1) + page
        self.state = self.executables.admit(self.state, request.slot, self._row(request), tail)

    def _row(self, request: Request) -> Slots:
        """The request's row of every per-slot array."""
        p, vocab = request.params, self.cfg.vocab_size
        bias: Any = np.zeros((1, vocab), np.float32)
        bias[0, list(p.logit_bias)] = list(p.logit_bias.values())

        def one(value: Any, dtype: Any = np.int32) -> Any:
            return np.full(1, value, dtype)

        carry: Any = self.state.slots.carry
        no_carry: Any = np.zeros((1, *carry.shape[1:]), carry.dtype)
        counts: Any = np.bincount(request.output, minlength=vocab)[None].astype(np.int32)
        return Slots(
            length=one(0),
            newest=one(0),
            active=one(False, bool),
            remaining=one(request.max_tokens - len(request.output)),
            generated=one(len(request.output)),
            depth=one(request.depth),
            page_table=self._table(request.pages),
            carry=no_carry,
            sampling=SamplingState(
                temperature=one(p.temperature, np.float32),
                top_k=one(max(p.top_k, 0)),
                top_p=one(p.top_p, np.float32),
                min_p=one(p.min_p, np.float32),
                presence=one(p.presence_penalty, np.float32),
                frequency=one(p.frequency_penalty, np.float32),
                repetition=one(p.repetition_penalty, np.float32),
                min_tokens=one(p.min_tokens),
                seed=one(request.seed, np.uint32),
                logit_bias=bias,
                stop_mask=mask_row(self._stops(p), vocab),
                prompt_mask=mask_row(request.prompt, vocab),
                counts=counts,
            ),
        )

    def _stops(self, p: SamplingParams) -> list[int]:
        """The tokens that end an output."""
        stops = {*p.stop_token_ids, *(() if p.ignore_eos else self.cfg.eos_token_ids)}
        return [t for t in stops if t < self.cfg.vocab_size]

    def _matcher(self, p: SamplingParams) -> Matcher | None:
        if p.structured is None:
            return None
        if self.grammars is None:
            raise RequestError(
                "structured output needs a tokenizer.json that fits the model and names its end-of-sequence "
                "token; this model has none"
            )
        return self.grammars.matcher(p.structured, self._stops(p))

    # Launching

    def _launch_prefill(self) -> None:
        """Chunks of waiting prompts, one per data shard at a time, as far as the budget of tokens goes."""
        budget = self.config.prefill_chunk
        while True:
            chosen = self.scheduler.prefilling()
            requests = [r for r in chosen if r]
            if not requests:
                return
            need = prefill_key(self.config, requests)
            if need.tokens > budget:
                return
            budget -= need.tokens
            key = self.executables.cover(need)
            chunk = self._chunk(chosen, need.tokens, key.tokens)
            self.state, result = self.executables.prefill(key, self.params, self.state, chunk)
            rows = [(shard, r) for shard, r in enumerate(chosen) if r]
            self._track(_Launch(rows, result.first, 1, prompt=result.prompt, chunk=chunk))
            for r, final in zip(chosen, chunk.final, strict=True):
                if r and final:
                    r.status, r.rows_bound = Status.RUNNING, r.prefilled + 1
                    r.unread += r.follows < 0

    def _chunk(self, chosen: list[Request | None], limit: int, width: int) -> Chunk:
        """The next ``limit`` tokens of each prompt, padded to ``width``."""
        shape = (len(chosen), width)
        tokens, targets = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        slot = np.full(len(chosen), self.config.max_num_seqs, np.int32)
        start, count = np.zeros(len(chosen), np.int32), np.zeros(len(chosen), np.int32)
        final, follows = np.zeros(len(chosen), bool), np.full(len(chosen), -1, np.int32)
        for g, r in enumerate(chosen):
            if r is None:
                continue
            begin, end = r.prefilled, min(r.prefilled + limit, len(r.tokens))
            slot[g], start[g], count[g], final[g] = r.slot, begin, end - begin, end == len(r.tokens)
            tokens[g, : end - begin] = r.tokens[begin:end]
            following = r.tokens[begin + 1 : end + 1]
            targets[g, : len(following)] = following
            follows[g] = r.follows
            r.prefilled = end
        rows = [(g, r) for g, r in enumerate(chosen) if r]
        first = allowed(self.grammars, rows, (len(chosen), 1), self.cfg.vocab_size)[:, 0]
        arrays: tuple[Any, ...] = (slot, start, count, final, tokens, targets, follows, first)
        return Chunk(*arrays)

    def _launch_step(self) -> None:
        running = self.scheduler.running()
        if not running:
            return
        depth = self._choose(running).depth
        if self.scheduler.grow(running, depth):
            self._stale = True
            self._refresh()
            running = self.scheduler.running()
            if not running:
                return
        key = self.executables.cover(step_key(self.config, running, depth))
        result = self._run_phases(key, running) if key.mode.structured else self._run_step(key)
        width = key.depth + 1
        for r in running:
            r.rows_bound += width
            r.unread += 1
        self._track(_Launch([(r.slot, r) for r in running], result, width, step=key))

    def _run_step(self, key: StepKey) -> StepResult:
        self.state, result = self.executables.step(key, self.params, self.state)
        return result

    def _run_phases(self, key: StepKey, running: list[Request]) -> StepResult:
        """A step in two launches, between which the host reads the drafts to say what may follow each."""
        rows, shape, vocab = [(r.slot, r) for r in running], (key.slots, key.depth + 1), self.cfg.vocab_size
        masks = allowed(self.grammars, rows, shape, vocab)
        self.state, drafts = self.executables.draft_phase(key, self.params, self.state, masks)
        masks = allowed(self.grammars, rows, shape, vocab, np.asarray(drafts.tokens))
        self.state, result = self.executables.verify_phase(key, self.params, self.state, drafts, masks)
        return result

    def _choose(self, running: list[Request]) -> StepKey:
        """The executable for a step over these requests: the deepest, or adaptively the fastest."""
        deepest = max(r.depth for r in running)
        fixed = max((r.depth for r in running if r.fixed_depth), default=0)
        depths = {d for d in adaptive_depths(deepest) if d >= fixed}
        keys = [self.executables.cover(step_key(self.config, running, d)) for d in depths]
        return self.depth.choose(keys, [r.depth for r in running])

    def _track(self, launch: _Launch) -> None:
        for _, request in launch.rows:
            request.inflight += 1
        for array in jax.tree.leaves((launch.result, launch.prompt)):
            array.copy_to_host_async()
        self._inflight.append(launch)

    # Reading

    def _read(self, count: int) -> list[Request]:
        """Read the oldest launches; returns the requests that they advanced."""
        return [r for _ in range(count) for r in self._collect(self._inflight.popleft())]

    def _collect(self, launch: _Launch) -> list[Request]:
        packed, top, prompt = jax.tree.map(
            np.asarray, (launch.result.packed, launch.result.logprobs, launch.prompt)
        )
        self._measure(launch, packed)
        advanced = []
        for row, request in launch.rows:
            request.inflight -= 1
            if request.finished:
                continue
            if request.matcher and request.matcher.failed:
                self.abort(request, "error")  # its masks meant nothing
                advanced.append(request)
                continue
            chunk = launch.chunk
            if chunk and prompt is not None and request.params.prompt_logprobs is not None:
                _read_prompt_logprobs(request, prompt, row, int(chunk.start[row]), int(chunk.count[row]))
            tokens, extra = packed[row, : launch.width].tolist(), packed[row, launch.width :].tolist()
            count, finish = extra[COUNT], Finish(extra[FINISH])
            if launch.step:
                request.rows_bound -= launch.width - count
                request.speculation.accepted_per_step.append(extra[ACCEPTED])
                request.speculation.drafted_per_step.append(extra[DRAFTED])
            if count or finish is not Finish.RUNNING:
                request.unread -= 1
                request.emit(tokens[:count])
                advanced.append(request)
                if request.matcher and finish is Finish.RUNNING:
                    request.matcher.advance(tokens[:count])
            if finish is Finish.NAN:
                self.scheduler.broken(request)
            else:
                self.scheduler.committed(request, _complete_rows(request, chunk, row))
            if top is not None and request.params.logprobs is not None:
                width = request.params.logprobs
                request.logprobs += [_logprobs(top, row, i, tokens[i], width) for i in range(count)]
            if finish is not Finish.RUNNING:
                self._finish(request, _REASONS[finish])
        return advanced

    def _measure(self, launch: _Launch, packed: Any) -> None:
        """Count a launch that has just been read: its time began when the one before it ended."""
        now, c = time.perf_counter(), self.counters
        seconds = now - max(launch.at, self._last_read)
        self._last_read = now
        extra = packed[[row for row, _ in launch.rows], launch.width :]
        emitted = int(extra[:, COUNT].sum())
        c.generation_tokens += emitted
        key = launch.step
        if key is None:
            c.prefill_seconds += seconds
            return
        drafted, accepted = extra[:, DRAFTED].tolist(), extra[:, ACCEPTED].tolist()
        for d, a in zip(drafted, accepted, strict=True):
            c.verified(d, a)
        c.depth_steps[key.depth] += 1
        c.depth_seconds[key.depth] += seconds
        self.depth.costs.add(key, seconds)
        self.depth.acceptance.add(drafted, accepted)
        plain = replace(key, depth=0)
        if emitted and self.depth.costs.known(plain):
            c.compared_seconds += seconds
            c.plain_seconds += self.depth.costs.seconds(plain) * emitted / len(launch.rows)


def _complete_rows(request: Request, chunk: Chunk | None, row: int) -> int:
    """Cache rows that are complete once a launch is read, with the tail of the page they end.

    After a step these are all but the newest token's. The tail is written with the row that comes after it.
    """
    if chunk is None:
        return len(request.prompt) + len(request.output) - 1
    end = int(chunk.start[row] + chunk.count[row])
    return end if chunk.final[row] else end - 1


def _check_ids(what: str, ids: Iterable[int], vocab: int) -> None:
    wrong = next((t for t in ids if not 0 <= t < vocab), None)
    if wrong is not None:
        raise RequestError(f"{what} names token {wrong}; expected ids from 0 to {vocab - 1}")


def _logprobs(top: Any, row: int, i: int, token: int, width: int) -> TokenLogprobs:
    """The chosen token first, then the ``width`` most likely ones."""
    best = zip(top.ids[row, i, :width].tolist(), top.values[row, i, :width].tolist(), strict=True)
    chosen = Logprob(float(top.chosen[row, i]), int(top.rank[row, i]))
    others = {t: Logprob(v, rank) for rank, (t, v) in enumerate(best, start=1) if t != token}
    return {token: chosen} | others


def _read_prompt_logprobs(request: Request, top: Any, row: int, start: int, count: int) -> None:
    """Position i of a chunk scores the prompt's next token; the first token of a prompt has no score."""
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    for i in range(count):
        position = start + i + 1
        # A preempted request is scored from the start again.
        if position == len(request.prompt_logprobs) and position < len(request.prompt):
            width = request.params.prompt_logprobs or 0
            request.prompt_logprobs.append(_logprobs(top, row, i, request.prompt[position], width))
