"""The engine: admits requests to slots, launches steps, reads results one launch late.

    submit -> waiting -> (admit: slot + pages) -> prefill, chunk by chunk -> running -> finished
                 ^------------------- preempted, for want of pages ---------------'

The host never needs a step's outcome to launch the next one: lengths, stops and drafts live on the device.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Unpack

import numpy as np

from mtp_jax.decode import launches
from mtp_jax.decode.arrays import Chunk, MaskMaker, Result
from mtp_jax.decode.keys import (
    ACCEPTED,
    COUNT,
    DRAFTED,
    FINISH,
    SOURCE,
    Finish,
    Key,
    Origin,
    PageKey,
    StepKey,
)
from mtp_jax.decode.launches import Pending, Runner
from mtp_jax.engine.balance import Balancer
from mtp_jax.engine.buckets import Buckets, ChunkPrompts
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.depth import DepthController
from mtp_jax.engine.depth_policy import adaptive_depths
from mtp_jax.engine.inputs import next_chunk, page_row, slot_row
from mtp_jax.engine.request import Request, Terms
from mtp_jax.engine.results import (
    REASONS,
    Launched,
    end_reason,
    logprobs,
    prompt_logprobs,
    routed_experts,
    stop_token,
)
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.speculation import Speculation
from mtp_jax.engine.stats import Counters, EngineStats
from mtp_jax.engine.structured import allowed
from mtp_jax.engine.survival import Offered
from mtp_jax.engine.texts import TextStore
from mtp_jax.engine.timings import Timings
from mtp_jax.engine.turns import AdmitWaiting, LaunchStep, ReadOldest, Turns
from mtp_jax.engine.validate import InputProcessor
from mtp_jax.model.config import ModelConfig
from mtp_jax.store.tier import host_tier
from mtp_jax.text.grammar import Grammars


class Engine:
    """Runs requests over slots. Not thread-safe: one thread owns it.

    Attributes:
        tier: the host tier, which takes pages that the prefix cache evicts; None: there is no host tier.
        texts: outputs of past requests, in which suffix matches may lie.
        launches: steps launched so far.
        weight_version: the name of the runner's parameters; a request keeps the name it ran with.
        asleep: whether the runner lacks parameters or state, so that no launch is allowed.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        config: EngineConfig,
        runner: Runner,
        grammars: Grammars | None = None,
        weight_version: str = "0",
        built: bool = False,
    ) -> None:
        """Compiles nothing yet (``prepare``).

        runner: a runner with the slots and pages of ``config``. grammars: the compiler for structured output;
        None refuses structured output. weight_version: names the parameters that the runner has. built:
        whether a server's programs are compiled already, so that requests are served by these.
        """
        self.cfg, self.config, self.runner = cfg, config, runner
        self.grammars = None if config.law else grammars  # a forced verdict asks none
        self.shards, self.pages = runner.shards, config.pages_per_shard(runner.shards)
        self.tier = host_tier(runner, config.host_cache_bytes, config.files)
        layout = runner.layout
        self.balancer = Balancer(layout, runner, config.expert_rebalance) if layout else None
        self.scheduler = Scheduler(config, self.shards, self.tier, self._leaves)
        self.depth = DepthController(config.num_speculative_tokens, trees=config.trees)
        self.timings, self.counters = Timings(runner.clock), Counters()
        self.texts = TextStore(config.suffix_store)
        self.buckets = Buckets(config, self.shards, runner.traits)
        self.turns = Turns(self.buckets, self.scheduler, runner, self.depth)
        self._inputs = InputProcessor(cfg, config, self.pages, self.grammars, runner.clock)
        self.launches, self.weight_version, self.asleep = 0, weight_version, False
        self._built = built
        self._warm: set[Key] = set()
        self._seeds = np.random.default_rng(config.seed)
        self._inflight: deque[Launched] = deque()

    def make_requests(
        self, prompt: Iterable[int], params: SamplingParams, **terms: Unpack[Terms]
    ) -> list[Request]:
        """Requests for the ``params.n`` completions of a prompt of token ids. Any thread may call it.

        Raises RequestError, and Overloaded while too many grammars are being compiled.
        """
        return self._inputs.requests(params.n, prompt, params, terms)

    def make_request(self, prompt: Iterable[int], params: SamplingParams, **terms: Unpack[Terms]) -> Request:
        """A request for one completion, at any ``params.n``."""
        return self._inputs.requests(1, prompt, params, terms)[0]

    def submit(self, request: Request) -> None:
        """Queue a request that ``make_request`` built. The engine draws a seed for a request without one."""
        own = request.progress
        own.seed = int(self._seeds.integers(2**32)) if request.seed is None else request.seed
        own.arrived = self.runner.clock() if request.arrived is None else request.arrived
        if not self.busy:
            # Launched before the last request was aborted; the device has long been idle.
            self._inflight.clear()
            self.timings.last_read = self.runner.clock()
        self.scheduler.enqueue(request)

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request now, wherever it is; its slot and pages are free again."""
        if not request.finished:
            self._finish(request, reason, known=False)

    def stop(self, request: Request, tokens: int, string: str) -> None:
        """End a request at a stop string, with which the text of its first ``tokens`` tokens ends."""
        own = request.progress
        own.cut(tokens)
        own.stop_reason = string
        self.abort(request, "stop")
        if own.finish_reason != "stop":  # the request's last token completed the stop string
            self.counters.ended_anew(own.finish_reason, "stop")
            own.finish_reason = "stop"

    @property
    def busy(self) -> bool:
        """Whether a request is left to serve; requests that ``hold`` keeps back are not."""
        return self.scheduler.busy

    def prepare(
        self,
        requests: Iterable[Request],
        done: Callable[[int, int], None] | None = None,
        every_size: bool = False,
    ) -> None:
        """Compile the missing programs for these requests, beside requests that are being served.

        every_size: compile smaller steps, too, for the time when few requests are left.
        """
        keys = self.buckets.prepare([*self.scheduler.live(), *requests], every_size)
        if self._built:
            keys = self.buckets.covering(keys, structured=self.grammars is not None)
        self.runner.compile(keys, done)
        self.warm_up(keys)

    def warm_up(self, keys: Iterable[Key]) -> None:
        """Run compiled programs over empty slots: the first run of each takes many times longer.

        Each step that adaptive depth chooses from then runs for two probes, and is measured.
        Nothing happens while requests are served, or the engine is asleep.
        """
        new = [k for k in dict.fromkeys(keys) if k not in self._warm]
        new = [] if self.busy or self.asleep else new
        self._warm.update(new)
        for key in new:
            if isinstance(key, StepKey):
                self._arrive(self._run(key, self._chunk(key), []))
            elif isinstance(key, PageKey):
                pages = tuple(range(min(key.pages, self.pages)))
                held = self.runner.do(launches.ReadPages(0, pages)).read()
                self.runner.do(launches.WritePages(0, pages, held))
        chosen = self.config.adaptive_depth and self.config.num_speculative_tokens > 0
        steps = [k for k in new if isinstance(k, StepKey) and k.slots] if chosen else []
        for key in self.depth.warm_up([k.at(d) for k in steps for d in self._depths(k)]):
            seconds = self._arrive(self._run(key, self._chunk(key), []))[1]
            self.depth.learn(key, seconds + self._deferring(key), [], [])

    def _depths(self, key: StepKey) -> Sequence[int]:
        """The depths at which this executable will run."""
        chain = self.depth.steps is None or key.depth <= self.depth.steps
        many = key.depth and key.kept is None and self.runner.traits.any_depth and chain
        return adaptive_depths(key.depth)[1:] if many else [key.depth]

    def warm_up_keys(self) -> tuple[list[Key], list[Key]]:
        """Keys for serving: programs that serve any request, and cheaper programs for smaller work."""
        return self.buckets.server(structured=self.grammars is not None)

    def flush_prefix_cache(self) -> None:
        """Forget the pages of past requests."""
        for pool in self.scheduler.pools:
            pool.forget()
        if self.tier:
            self.tier.forget()

    def new_weights(self, version: str) -> None:
        """Record that the runner has new parameters; pages and scores of prompts by the old are forgotten."""
        self.flush_prefix_cache()
        for own in (r.progress for r in self.scheduler.live() if not r.progress.output):
            own.prompt_logprobs.clear()
        self.name_weights(version)

    def name_weights(self, version: str) -> None:
        """Name the parameters, for requests that get a slot from now on."""
        self.weight_version = version

    def sleep(self) -> None:
        """Forbid launches: the runner is about to lack parameters or state."""
        self.asleep = True

    def wake(self) -> None:
        """Allow launches again: the runner has its parameters and state."""
        self.asleep = False

    def hold(self) -> None:
        """Keep requests that have not begun in the queue, even past their deadlines, until ``resume``."""
        self.scheduler.held = True

    def resume(self) -> None:
        """Serve the requests that ``hold`` kept back."""
        self.scheduler.held = False

    def pause(self) -> list[Request]:
        """Launch nothing until ``Scheduler.unpause``. Returns requests that the last launches advanced."""
        advanced = self._read(len(self._inflight))
        self.scheduler.pause()
        self._refresh()
        return advanced

    def stats(self) -> EngineStats:
        """A snapshot of the engine."""
        executables = len(self.runner.keys)
        experts = self.balancer.stats() if self.balancer else None
        return EngineStats.of(
            self.counters, self.scheduler, self.tier, executables, self.depth.speedup, experts
        )

    def step(self) -> list[Request]:
        """Do one turn, as ``Turns.next`` decides: launches, then reads. Returns requests that advanced."""
        advanced = self._end_late()
        for action in self.turns.next(self._inflight):
            if isinstance(action, ReadOldest):
                advanced += self._read(action.count)
            elif isinstance(action, AdmitWaiting):
                self._admit_waiting()
            else:
                self._launch(action)
        if not self.busy:
            self._inflight.clear()
        return advanced

    # Slots and pages

    def _end_late(self) -> list[Request]:
        """End the requests whose deadline has passed."""
        now = self.runner.clock()
        live = (r for r in self.scheduler.live() if not self.scheduler.holds(r))
        late = [r for r in live if r.deadline is not None and now > r.deadline]
        for request in late:
            self.abort(request, "timeout")
        return late

    def _finish(self, request: Request, reason: str, known: bool = True) -> None:
        """End a request. known: whether the device has ended it itself."""
        self.scheduler.release(request, known)
        request.progress.end(reason, self.runner.clock())
        self.counters.finished[reason] += 1
        self.texts.add(request)

    def _leaves(self, request: Request) -> None:
        """Take note of a request's experts before it gives its pages back."""
        request.progress.routed_experts = routed_experts(request, self.scheduler, self.runner)

    def _admit_waiting(self) -> None:
        self._refresh()
        for request in self.scheduler.admit():
            self._admit(request)
        for source, target in self.scheduler.pack(self.buckets.slots):
            self.runner.do(launches.Move(source, target))

    def _refresh(self) -> None:
        """Tell the device which slots and pages changed hands, unless it has no memory now."""
        if not self.asleep and self.scheduler.changed():
            slots = self.scheduler.slots
            keep = np.array([r is not None for r in slots])
            table = np.concatenate([self._page_row(r) for r in slots])
            self.runner.do(launches.Update(keep, table))

    def _page_row(self, request: Request | None) -> np.ndarray:
        return page_row(request.residence.pages if request else [], self.config.columns, self.pages)

    def _admit(self, request: Request) -> None:
        own, found = request.progress, request.residence
        own.weight_version = self.weight_version
        if own.admitted_at is None:
            own.admitted_at = self.runner.clock()
            own.cached_tokens = found.prefilled
            self.counters.prompt_tokens += len(request.prompt)
            if self.scheduler.looks_up(request):
                self.counters.looked_up(len(request.prompt), found.prefilled, found.restored, found.fetched)
        cached = found.prefilled // self.config.page_size
        row = slot_row(request, self.cfg.vocab_size, self._page_row(request), self.texts.row(request))
        self.runner.do(launches.Admit(found.slot, row, found.pages[cached - 1] if cached else None))

    # Launching

    def _launch(self, action: LaunchStep) -> None:
        self._refresh()
        key, prompts = action.key, action.prompts
        chunk = self._chunk(key, prompts)
        launch = Launched(
            [(r.residence.slot, r) for r in action.requests],
            [(g, r) for g, r in enumerate(prompts.rows(key.prompts)) if r] if prompts else [],
            self._run(key, chunk, action.requests),
            key,
            chunk,
        )
        for own in (r.progress for r in action.requests):
            own.rows_bound += launch.width
            own.unread += 1
        for g, r in launch.prompts:
            if chunk and chunk.final[g]:
                r.progress.rows_bound = len(r.residence.tokens) + 1
                r.progress.unread += r.residence.follows < 0
        if prompts:
            self.scheduler.prefilled(prompts, prompts.tokens)
        self._track(launch)

    def _chunk(self, key: StepKey, prompts: ChunkPrompts | None = None) -> Chunk | None:
        """The chunk that a program takes along: the next tokens of some prompts, or idle rows."""
        if not key.tokens:
            return None
        tokens, chosen = 0, [None] * key.prompts * self.shards
        if prompts:
            tokens, chosen = prompts.tokens, prompts.rows(key.prompts)
        rows = [(row, r) for row, r in enumerate(chosen) if r]
        first = allowed(self.grammars, rows, (len(chosen), 1), self.cfg.vocab_size)[:, 0]
        return next_chunk(chosen, tokens, key.tokens, self.config.max_num_seqs, first)

    def _run(self, key: StepKey, chunk: Chunk | None, running: Sequence[Request]) -> Pending[Result]:
        masks = self._masks(key, running) if key.mode.structured else None
        estimate = None if key.kept is None else self.depth.estimate
        return self.runner.do(launches.StepLaunch(key, chunk, estimate), masks)

    def _masks(self, key: StepKey, running: Sequence[Request]) -> MaskMaker:
        rows, shape = [(r.residence.slot, r) for r in running], (key.slots, key.room + 1)
        return partial(allowed, self.grammars, rows, shape, self.cfg.vocab_size)

    def _track(self, launch: Launched) -> None:
        self.launches += 1
        for _, request in launch.everyone:
            request.progress.inflight += 1
        self._inflight.append(launch)
        if self.balancer:
            self.balancer.launched()

    # Reading

    def _read(self, count: int) -> list[Request]:
        """Read the oldest launches; returns the requests that they advanced."""
        return [r for _ in range(count) for r in self._collect(self._inflight.popleft())]

    def _collect(self, launch: Launched) -> list[Request]:
        result, seconds = self._arrive(launch.pending)
        self._measure(launch, seconds, result)
        return [request for row, request in launch.everyone if self._take(launch, result, row, request)]

    def _take(self, launch: Launched, result: Result, row: int, request: Request) -> bool:
        """Take a request's row of a result. Returns whether that has advanced the request, or ended it."""
        own = request.progress
        own.inflight -= 1
        if request.finished:
            return False
        if request.constraints and request.constraints.failed:
            self.abort(request, "error")  # its masks had no meaning
            return True
        own.prompt_logprobs += prompt_logprobs(launch, result, row, request)
        tokens, extra = (part.tolist() for part in np.split(result.packed[row], [launch.columns]))
        count, finish = extra[COUNT], Finish(extra[FINISH])
        if row < launch.key.slots:
            own.rows_bound -= launch.width - count
            own.speculation += Speculation([extra[ACCEPTED]], [extra[DRAFTED]], [Origin(extra[SOURCE])])
        if advanced := count > 0 or finish is not Finish.RUNNING:
            self._emit(request, tokens[:count], finish, extra[ACCEPTED])
        reason = end_reason(request, finish, tokens[:count], self.grammars, self.cfg.vocab_size)
        if reason == REASONS[Finish.NAN]:
            self.scheduler.broken(request)
        else:
            self.scheduler.committed(request, launch.complete_rows(row, request))
        own.logprobs += logprobs(result, row, tokens[:count], request.params.logprobs)
        if finish is not Finish.RUNNING:
            own.stop_reason = stop_token(request, self.cfg) if finish is Finish.STOP else None
            self._finish(request, reason)
        return advanced

    def _emit(self, request: Request, tokens: list[int], finish: Finish, accepted: int) -> None:
        request.progress.unread -= 1
        seconds = request.progress.emit(tokens, self.runner.clock(), accepted)
        self.counters.generation_tokens += len(tokens)
        if seconds is not None:
            self.counters.inter_token.add(seconds / len(tokens), len(tokens))
        if request.constraints and finish is Finish.RUNNING:
            request.constraints.advance(tokens)

    def _arrive(self, pending: Pending[Result]) -> tuple[Result, float]:
        """The result of a launch, and the seconds it took. A flush before it has its own time."""
        if pending.flush:
            pending.flush.wait()
            self.timings.flushed(self.timings.ended(pending.flush.at), pending.flush.steps)
        return pending.read(), self.timings.ended(pending.at)

    def _deferring(self, key: StepKey) -> float:
        """Seconds that a step adds to a later flush."""
        return 0.0 if key.room or key.tokens else self.timings.deferring

    def _measure(self, launch: Launched, seconds: float, result: Result) -> None:
        """Count a launch that has just been read."""
        c, key = self.counters, launch.key
        c.launch_tokens.add(launch.tokens(result), 1)
        if not launch.rows:
            c.prefill_seconds += seconds
            return
        slots = [row for row, _ in launch.rows]
        extra = result.packed[slots, launch.columns :]
        drafted, accepted = extra[:, DRAFTED].tolist(), extra[:, ACCEPTED].tolist()
        for d, a, source in zip(drafted, accepted, extra[:, SOURCE].tolist(), strict=True):
            c.verified(d, a, Origin(source))
        seconds += self._deferring(key)
        c.stepped(key.depth, seconds)
        depths, counts = [r.depth for _, r in launch.rows], extra[:, COUNT].tolist()
        # A row without a draft counts as if its drafts were refused: deeper steps gain nothing for it.
        offered = [min(d, key.depth) if n else 0 for d, n in zip(depths, counts, strict=True)]
        rows = list(zip(offered, accepted, counts, strict=True))
        offered, live = None, extra[:, COUNT] > 0
        if result.margins is not None and key.depth and key.slots:
            margins, verified = result.margins[slots, : key.depth][live], extra[live]
            offered = Offered(verified[:, SOURCE], margins, verified[:, DRAFTED], verified[:, ACCEPTED])
        self.depth.learn(key, seconds, depths, rows, offered)
