"""The engine: admits requests to slots, launches prefill chunks and steps, reads results one launch late.

    submit -> waiting -> (admit: slot + pages) -> prefill, chunk by chunk -> running -> finished
                 ^------------------- preempted, for want of pages ---------------'

The host never needs a step's outcome to launch the next one: lengths, stops and drafts live on the device.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mtp_jax.decode.compiled import Executables
from mtp_jax.decode.drafter.build import build
from mtp_jax.decode.keys import ACCEPTED, COUNT, DRAFTED, FINISH, Finish, Key, PrefillKey, StepKey
from mtp_jax.decode.prefill import Chunk, PrefillResult
from mtp_jax.decode.result import StepResult
from mtp_jax.decode.state import State, StateShape, abstract_state, empty_state
from mtp_jax.engine.buckets import (
    TOGETHER,
    keys_for,
    prefill_key,
    prefill_together,
    prompt_bucket,
    slot_bucket,
    step_key,
    step_keys,
    warm_up_keys,
)
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.depth import DepthController, adaptive_depths
from mtp_jax.engine.inputs import next_chunk, page_row, slot_row
from mtp_jax.engine.request import Request, Speculation, Status
from mtp_jax.engine.results import Launch, read_logprobs, read_prompt_logprobs
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.stats import Counters, EngineStats
from mtp_jax.engine.structured import allowed
from mtp_jax.engine.validate import InputProcessor
from mtp_jax.errors import ConfigError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.kernels import all_by
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import check_divisible, data_size
from mtp_jax.model.trunk import Backend
from mtp_jax.text.grammar import Grammars

_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.NAN: "error"}


class Engine:
    """Runs requests over slots. Not thread-safe: one thread owns it.

    Attributes:
        launches: prefills and steps launched so far.
    """

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
        if config.kv_cache_dtype == "fp8" and cfg.kv_lora_rank % 2:
            raise ConfigError(
                f"kv_cache_dtype = 'fp8' stores latents in pairs, but kv_lora_rank = {cfg.kv_lora_rank} "
                "is odd; use 'auto'"
            )
        self.cfg, self.config, self.params, self.grammars = cfg, config, params, grammars
        self.scheduler = Scheduler(config, self.shards)
        self.pages = self.scheduler.pools[0].pages
        shape = StateShape(config.max_num_seqs, self.pages, config.page_size, config.columns)
        self.drafter = build(cfg)
        fp8 = config.kv_cache_dtype == "fp8"
        abstract = abstract_state(cfg, self.drafter, shape, config.dtype, mesh, fp8)
        on = Backend("absorbed", "sparse", mesh, all_by(config.kernels))
        self.executables = Executables(cfg, self.drafter, params, abstract, on)
        self.state = empty_state(abstract)
        self._deferred = 0  # steps whose work for the drafter is to be done
        self.depth = DepthController(config.num_speculative_tokens)
        self.counters = Counters()
        self.make_request = InputProcessor(cfg, config, self.pages, grammars).make_request
        self._rehearsed: set[Key] = set()
        self._seeds = np.random.default_rng(config.seed)
        self._inflight: deque[Launch] = deque()
        self.launches = 0
        self._last_read = 0.0
        # Seconds of the last two runs.
        self._took: defaultdict[Key, deque[float]] = defaultdict(lambda: deque((0.0, 0.0), maxlen=2))
        # Whether slots or pages changed hands since the device was told.
        self._stale = False

    def submit(self, request: Request) -> None:
        """Queue a request that ``make_request`` built. One without a seed gets one of the engine's."""
        request.seed = int(self._seeds.integers(2**32)) if request.seed is None else request.seed
        if not self.busy:
            self._inflight.clear()  # launched before the last request was aborted
        self.scheduler.enqueue(request)

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request now, wherever it is; its slot and pages are free again."""
        if not request.finished:
            self._stale |= request.status is not Status.WAITING
            self._finish(request, reason)

    def stop(self, request: Request, tokens: int) -> None:
        """End a request at a stop string, which the text of its first ``tokens`` ends with."""
        request.cut(tokens)
        self.abort(request, "stop")
        if request.finish_reason != "stop":  # its last token completed the string
            self.counters.ended_anew(request.finish_reason, "stop")
            request.finish_reason = "stop"

    @property
    def busy(self) -> bool:
        """Whether a request is left to serve."""
        return self.scheduler.busy

    @property
    def reads_next(self) -> bool:
        """Whether the next step launches nothing: it hands on what a prefill gave, with a step behind it."""
        return len(self._inflight) > 1 and self._inflight[0].chunk is not None

    def work_ahead(self) -> float:
        """Seconds until the device has done what was launched, by the quicker of each program's last two."""
        if not self._inflight:
            return 0.0
        expected = sum(min(self._took[launch.key]) for launch in self._inflight)
        return expected + max(self._inflight[0].at, self._last_read) - time.perf_counter()

    def prepare(
        self,
        requests: Iterable[Request],
        done: Callable[[int, int], None] | None = None,
        every_size: bool = False,
    ) -> None:
        """Compile what is missing to serve these requests, beside those that are being served.

        every_size: smaller steps, too, for when few of them are left: more to compile, less to compute.
        """
        together = [*self.scheduler.live(), *requests]
        slots = max((r.slot + 1 for r in together), default=0)
        config, sizes = self.config, {"slots": slots, "pages": self.pages, "every_size": every_size}
        keys = keys_for(config, together, self.shards, **sizes)
        self.executables.compile(keys, done)
        self.rehearse(keys)

    def rehearse(self, keys: Iterable[Key]) -> None:
        """Run compiled programs over empty slots: the first run of each takes many times longer.

        Each step that adaptive depth chooses from then runs for the length of a probe, and is measured.
        Nothing happens while requests are served.
        """
        new = [] if self.busy else [k for k in dict.fromkeys(keys) if k not in self._rehearsed]
        self._rehearsed.update(new)
        for key in new:
            if isinstance(key, PrefillKey):
                jax.block_until_ready(self._run_prefill(key, [None] * key.prompts * self.shards, 0)[1])
        steps = [k for k in new if isinstance(k, StepKey)]
        for key in steps:
            jax.block_until_ready(self._run_step(key, []))
        for key in steps if self.config.adaptive_depth else ():
            for _ in range(self.depth.policy.block):
                began = time.perf_counter()
                jax.block_until_ready(self._run_step(key, []))
                self.depth.learn(key, time.perf_counter() - began, [], [])

    def warm_up_keys(self) -> tuple[list[Key], list[Key]]:
        """Executables for serving: those that can serve anything, and cheaper ones for smaller work."""
        return warm_up_keys(self.config, self.shards, structured=self.grammars is not None)

    def flush_prefix_cache(self) -> None:
        """Forget the pages of past requests."""
        for pool in self.scheduler.pools:
            pool.forget()

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done."""
        return EngineStats.of(self.counters, self.scheduler, len(self.executables), self.depth.speedup)

    def step(self) -> list[Request]:
        """Launch what can be launched, then read what was launched before. Returns requests that advanced.

        First tokens are read, and handed on, while the step launched behind their prefill runs.
        """
        late = self._end_late()
        advanced = self._read(1) if self.reads_next else self._launch()
        if not self.busy:
            self._inflight.clear()
        return late + advanced

    def _launch(self) -> list[Request]:
        self._refresh()
        for request in self.scheduler.admit():
            self._admit(request)
        for source, target in self.scheduler.pack(partial(slot_bucket, self.config)):
            self.state = self.executables.move(self.flushed(), source, target)
        before = len(self._inflight)
        self._launch_prefill()
        advanced = []
        if any(r.matcher for r in self.scheduler.running()):
            # What a grammar allows depends on the newest tokens: nothing may be in flight.
            advanced, before = self._read(len(self._inflight)), 0
        self._launch_step()
        if len(self._inflight) == before:  # nothing was launched: what ends next may make room
            before = min(before, 1)
        return advanced + self._read(before)

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
            table = np.concatenate([self._page_row(r) for r in slots])
            self.state = self.executables.update(self.flushed(), keep, table)
            self._stale = False

    def _page_row(self, request: Request | None) -> Any:
        return page_row(request.pages if request else [], self.config.columns, self.pages)

    def _admit(self, request: Request) -> None:
        if request.admitted_at is None:
            request.admitted_at = time.perf_counter()
            request.cached_tokens = request.prefilled
            self.counters.prompt_tokens += len(request.prompt)
            if self.scheduler.looks_up(request):
                self.counters.prefix_queries += len(request.prompt)
                self.counters.prefix_hits += request.prefilled
        # The page it goes on from. Without one the spare page: nothing reads what a drafter takes from there.
        last = request.prefilled // self.config.page_size - 1
        page = request.pages[last] if last >= 0 else self.pages
        page += self.scheduler.shard_of(request.slot) * (self.pages + 1)
        arrays = slot_row(request, self.cfg, self._page_row(request))
        self.state = self.executables.admit(self.flushed(), request.slot, arrays, page)

    # Launching

    def _launch_prefill(self) -> None:
        """Chunks of waiting prompts, as far as the budget of tokens goes."""
        if self.scheduler.hold_prefill(TOGETHER):
            return
        budget = self.config.prefill_chunk * self.scheduler.prefill_chunks()
        while any(waiting := self.scheduler.prefilling()):
            need, chosen = self._next_prefill(waiting)
            budget -= need.tokens * need.prompts
            if budget < 0:
                return
            rows = [(row, r) for row, r in enumerate(chosen) if r]
            key, began = self.executables.cover(need), time.perf_counter()
            chunk, result = self._run_prefill(key, chosen, need.tokens)
            self._track(Launch(rows, result.first, 1, began, key, prompt=result.prompt, chunk=chunk))
            for row, r in rows:
                r.begun = True
                if chunk.final[row]:
                    r.status, r.rows_bound = Status.RUNNING, r.prefilled + 1
                    r.unread += r.follows < 0

    def _next_prefill(self, waiting: list[list[Request]]) -> tuple[PrefillKey, list[Request | None]]:
        """What to launch next, and whose prompt is in which row: as many per shard as a program takes."""
        together = prefill_together(self.config, waiting)
        prompts = prompt_bucket(max(map(len, together)))
        while True:
            together = [w[:prompts] for w in together]
            need = prefill_key(self.config, list(chain(*together)), prompts)
            if prompts == 1 or self.executables.find(need):
                return need, [r for w in together for r in (*w, *[None] * (prompts - len(w)))]
            prompts //= 2

    def _run_prefill(
        self, key: PrefillKey, chosen: Sequence[Request | None], tokens: int
    ) -> tuple[Chunk, PrefillResult]:
        rows = [(row, r) for row, r in enumerate(chosen) if r]
        first = allowed(self.grammars, rows, (len(chosen), 1), self.cfg.vocab_size)[:, 0]
        chunk = next_chunk(chosen, tokens, key.tokens, self.config.max_num_seqs, first)
        self.state, result = self.executables.prefill(key, self.params, self.flushed(), chunk)
        return chunk, result

    def _launch_step(self) -> None:
        running = self.scheduler.running()
        if not running:
            return
        key, depth = self._choose(running), -1
        while depth < key.depth:
            depth = key.depth
            if self.scheduler.grow(running, depth):
                self._stale = True
                self._refresh()
                running = self.scheduler.running()
                if not running:
                    return
                # With fewer requests the cheapest program may be a deeper one, whose drafts need pages, too.
                key = self._cover(running, step_key(self.config, running, depth))
        began = time.perf_counter()
        result = self._run_step(key, running)
        width = key.depth + 1
        for r in running:
            r.rows_bound += width
            r.unread += 1
        self._track(Launch([(r.slot, r) for r in running], result, width, began, key))

    def _run_step(self, key: StepKey, running: list[Request]) -> StepResult:
        """Structured steps are two launches: in between the host reads the drafts to say what may follow."""
        most = self.drafter.deferral
        state = self.flushed() if key.depth or self._deferred == most else self.state
        self._deferred += not key.depth and most > 0
        if not key.mode.structured:
            self.state, result = self.executables.step(key, self.params, state)
            return result
        rows, shape, vocab = [(r.slot, r) for r in running], (key.slots, key.depth + 1), self.cfg.vocab_size
        masks = allowed(self.grammars, rows, shape, vocab)
        self.state, drafts = self.executables.draft_phase(key, self.params, state, masks)
        masks = allowed(self.grammars, rows, shape, vocab, np.asarray(drafts.tokens))
        self.state, result = self.executables.verify_phase(key, self.params, self.state, drafts, masks)
        return result

    def flushed(self) -> State:
        """The state, once the drafter has done what steps without drafts deferred."""
        if self._deferred:
            self.state, self._deferred = self.executables.flush(self.params, self.state), 0
        return self.state

    def _choose(self, running: list[Request]) -> StepKey:
        """The executable for a step over these requests: the deepest, or adaptively the fastest."""
        fixed = max((r.depth for r in running if r.fixed_depth), default=0)
        deepest = max(fixed, *(r.useful_depth for r in running))
        depths = {d for d in adaptive_depths(deepest) if d >= fixed}
        keys = [self._cover(running, need) for need in step_keys(self.config, running, depths)]
        return self.depth.choose(keys, [r.depth for r in running])

    def _cover(self, running: list[Request], need: StepKey) -> StepKey:
        """The cheapest executable for it, with pages for all rows that it writes: a deeper one has more."""
        key = self.executables.cover(need)
        if key.depth == need.depth:
            return key
        return self._cover(running, step_key(self.config, running, key.depth))

    def _track(self, launch: Launch) -> None:
        self.launches += 1
        for _, request in launch.rows:
            request.inflight += 1
        for array in jax.tree.leaves((launch.result, launch.prompt)):
            array.copy_to_host_async()
        self._inflight.append(launch)

    # Reading

    def _read(self, count: int) -> list[Request]:
        """Read the oldest launches; returns the requests that they advanced."""
        return [r for _ in range(count) for r in self._collect(self._inflight.popleft())]

    def _collect(self, launch: Launch) -> list[Request]:
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
            if launch.chunk and prompt is not None and request.params.prompt_logprobs is not None:
                read_prompt_logprobs(request, prompt, row, launch.chunk)
            tokens, extra = packed[row, : launch.width].tolist(), packed[row, launch.width :].tolist()
            count, finish = extra[COUNT], Finish(extra[FINISH])
            if launch.step:
                request.rows_bound -= launch.width - count
                request.speculation += Speculation([extra[ACCEPTED]], [extra[DRAFTED]])
            if count or finish is not Finish.RUNNING:
                request.unread -= 1
                seconds = request.emit(tokens[:count], extra[ACCEPTED])
                self.counters.generation_tokens += count
                if seconds is not None:
                    self.counters.inter_token.add(seconds / count, count)
                advanced.append(request)
                if request.matcher and finish is Finish.RUNNING:
                    request.matcher.advance(tokens[:count])
            if finish is Finish.NAN:
                self._stale = True  # a chunk behind this one may have been sound, and have set the slot going
                self.scheduler.broken(request)
            else:
                self.scheduler.committed(request, launch.complete_rows(row, request))
            if top is not None and request.params.logprobs is not None:
                width = request.params.logprobs
                request.logprobs += [read_logprobs(top, row, i, tokens[i], width) for i in range(count)]
            if finish is not Finish.RUNNING:
                self._finish(request, _REASONS[finish])
        return advanced

    def _measure(self, launch: Launch, packed: Any) -> None:
        """Count a launch that has just been read: its time began when the one before it ended."""
        now, c = time.perf_counter(), self.counters
        seconds = now - max(launch.at, self._last_read)
        self._last_read = now
        extra = packed[[row for row, _ in launch.rows], launch.width :]
        self._took[launch.key].append(seconds)
        key = launch.step
        if key is None:
            c.prefill_seconds += seconds
            return
        drafted, accepted = extra[:, DRAFTED].tolist(), extra[:, ACCEPTED].tolist()
        for d, a in zip(drafted, accepted, strict=True):
            c.verified(d, a)
        c.stepped(key.depth, seconds)
        rows = list(zip(drafted, accepted, extra[:, COUNT].tolist(), strict=True))
        self.depth.learn(key, seconds, [r.depth for _, r in launch.rows], rows)
