"""The engine: admits requests to slots, launches prefill chunks and steps, reads results one launch late.

    submit -> waiting -> (admit: slot + pages) -> prefill, chunk by chunk -> running -> finished

The host never needs a step's outcome to launch the next one: lengths, stops and drafts live on the device.
"""

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mtp_jax.config import ModelConfig
from mtp_jax.decode.compiled import DraftKey, Executables
from mtp_jax.decode.prefill import Chunk
from mtp_jax.decode.sampling import SamplingState
from mtp_jax.decode.state import Slots, StateShape, abstract_state, empty_state, mask_row
from mtp_jax.decode.step import ACCEPTED, COUNT, DRAFTED, FINISH, Finish, StepResult
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.plan import keys_for, prefill_key, step_key
from mtp_jax.engine.request import Logprob, Request, SamplingParams, Status, TokenLogprobs
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.errors import ConfigError, RequestError
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
        prompt: log-probabilities of prompt tokens, from a prefill.
        chunk: tokens each row of a prefill took; empty for a step.
    """

    rows: list[tuple[int, Request]]
    result: StepResult
    width: int
    prompt: Any = None
    chunk: tuple[int, ...] = field(default=())


class Engine:
    """Runs requests over slots. Not thread-safe: one thread owns it."""

    def __init__(
        self, cfg: ModelConfig, params: Params, config: EngineConfig, mesh: Mesh | None = None
    ) -> None:
        """Allocates the cache; compiles nothing yet (``prepare``). Raises ConfigError."""
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
        self.cfg, self.config, self.params = cfg, config, params
        self.scheduler = Scheduler(config, self.shards)
        pages = self.scheduler.allocator.pages
        shape = StateShape(config.max_num_seqs, pages, config.page_size, config.columns)
        abstract = abstract_state(cfg, shape, config.dtype, mesh)
        decode, prefill = Backend("absorbed", "sparse", mesh), Backend("naive", "sparse", mesh)
        self.executables = Executables(cfg, params, abstract, decode, prefill)
        self.state = empty_state(abstract)
        self._inflight: deque[_Launch] = deque()
        self._aborted: list[int] = []
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(config.seed)

    def submit(self, request: Request) -> None:
        """Queue a request that ``make_request`` built."""
        self.scheduler.waiting.append(request)

    def make_request(
        self, prompt: Iterable[int], params: SamplingParams, seed: int | None = None, spare: int = 0
    ) -> Request:
        """A request for a prompt of token ids. Raises RequestError.

        seed: overrides ``params.seed``. spare: further tokens its pages must hold.
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
        needed, pages = config.pages_for(capacity), self.scheduler.allocator.pages
        if needed > pages:
            raise RequestError(
                f"the request needs {needed} cache pages, the engine has {pages}; lower max_tokens or raise "
                "num_pages"
            )
        return Request(next(self._ids), ids, params, seed, max_tokens, depth, capacity)

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request now, wherever it is; its slot and pages are free again."""
        if not request.finished:
            if request.status is not Status.WAITING:
                self._aborted.append(request.slot)
            self.scheduler.finish(request, reason)

    @property
    def busy(self) -> bool:
        """Whether a request is left to serve."""
        return self.scheduler.busy

    def prepare(self, requests: Iterable[Request], done: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing to serve these requests, beside those that are being served."""
        together = [*self.scheduler.live(), *requests]
        slots = max((r.slot + 1 for r in together), default=0)
        self.executables.compile(keys_for(self.config, together, self.shards, slots), done)

    def step(self) -> list[Request]:
        """Launch what can be launched, then read what was launched before. Returns requests that advanced."""
        if self._aborted:
            keep = np.ones(self.config.max_num_seqs, bool)
            keep[self._aborted] = False
            self.state = self.executables.release(self.state, keep)
            self._aborted.clear()
        for request in self.scheduler.admit():
            self.state = self.executables.admit(self.state, request.slot, self._row(request))
        unread = len(self._inflight)
        self._launch_prefill()
        self._launch_step()
        if len(self._inflight) == unread:
            unread = min(unread, 1)
        advanced = [r for _ in range(unread) for r in self._collect(self._inflight.popleft())]
        if not self.busy:
            self._inflight.clear()
        return advanced

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

    # Launching

    def _row(self, request: Request) -> Slots:
        """The request's row of every per-slot array."""
        p, vocab = request.params, self.cfg.vocab_size
        table: Any = np.full((1, self.config.columns), self.scheduler.allocator.pages, np.int32)
        table[0, : len(request.pages)] = request.pages
        bias: Any = np.zeros((1, vocab), np.float32)
        bias[0, list(p.logit_bias)] = list(p.logit_bias.values())
        stops = {*p.stop_token_ids, *(() if p.ignore_eos else self.cfg.eos_token_ids)}

        def one(value: Any, dtype: Any = np.int32) -> Any:
            return np.full(1, value, dtype)

        carry: Any = self.state.slots.carry
        no_carry: Any = np.zeros((1, *carry.shape[1:]), carry.dtype)
        no_counts: Any = np.zeros((1, vocab), np.int32)
        return Slots(
            length=one(0),
            newest=one(0),
            active=one(False, bool),
            remaining=one(request.max_tokens),
            generated=one(0),
            depth=one(request.depth),
            page_table=table,
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
                stop_mask=mask_row([t for t in stops if t < vocab], vocab),
                prompt_mask=mask_row(request.prompt, vocab),
                counts=no_counts,
            ),
        )

    def _launch_prefill(self) -> None:
        """One chunk per data shard."""
        chosen = self.scheduler.prefilling()
        requests = [r for r in chosen if r]
        if not requests:
            return
        need = prefill_key(self.config, requests)
        key = self.executables.cover(need)
        chunk = self._chunk(chosen, need.tokens, key.tokens)
        self.state, result = self.executables.prefill(key, self.params, self.state, chunk)
        rows = [(shard, r) for shard, r in enumerate(chosen) if r]
        taken = tuple(int(c) for c in chunk.count)
        self._track(_Launch(rows, result.first, 1, result.prompt, taken))
        for r, final in zip(chosen, chunk.final, strict=True):
            if r and final:
                r.status, r.rows_bound, r.unread = Status.RUNNING, r.prefilled + 1, r.unread + 1

    def _chunk(self, chosen: list[Request | None], limit: int, width: int) -> Chunk:
        """The next ``limit`` tokens of each prompt, padded to ``width``."""
        shape = (len(chosen), width)
        tokens, targets = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        slot = np.full(len(chosen), self.config.max_num_seqs, np.int32)
        start, count = np.zeros(len(chosen), np.int32), np.zeros(len(chosen), np.int32)
        final = np.zeros(len(chosen), bool)
        for g, r in enumerate(chosen):
            if r is None:
                continue
            begin, end = r.prefilled, min(r.prefilled + limit, len(r.prompt))
            slot[g], start[g], count[g], final[g] = r.slot, begin, end - begin, end == len(r.prompt)
            tokens[g, : end - begin] = r.prompt[begin:end]
            following = r.prompt[begin + 1 : end + 1]
            targets[g, : len(following)] = following
            r.prefilled = end
        arrays: tuple[Any, ...] = (slot, start, count, final, tokens, targets)
        return Chunk(*arrays)

    def _launch_step(self) -> None:
        running = self.scheduler.running()
        if not running:
            return
        key = self.executables.cover(step_key(self.config, running))
        self.state, result = self.executables.step(key, self.params, self.state)
        width = key.depth + 1
        for r in running:
            r.rows_bound += width
            r.unread += 1
        self._track(_Launch([(r.slot, r) for r in running], result, width))

    def _track(self, launch: _Launch) -> None:
        for array in jax.tree.leaves((launch.result, launch.prompt)):
            array.copy_to_host_async()
        self._inflight.append(launch)

    # Reading

    def _collect(self, launch: _Launch) -> list[Request]:
        packed, top, prompt = jax.tree.map(
            np.asarray, (launch.result.packed, launch.result.logprobs, launch.prompt)
        )
        advanced = []
        for row, request in launch.rows:
            if request.finished:
                continue
            if prompt is not None and request.params.prompt_logprobs is not None:
                _read_prompt_logprobs(request, prompt, row, launch.chunk[row])
            tokens, extra = packed[row, : launch.width].tolist(), packed[row, launch.width :].tolist()
            count, finish = extra[COUNT], Finish(extra[FINISH])
            if not launch.chunk:
                request.rows_bound -= launch.width - count
                request.speculation.accepted_per_step.append(extra[ACCEPTED])
                request.speculation.drafted_per_step.append(extra[DRAFTED])
            if count or finish is not Finish.RUNNING:
                request.unread -= 1
                request.emit(tokens[:count])
                advanced.append(request)
            if top is not None and request.params.logprobs is not None:
                width = request.params.logprobs
                request.logprobs += [_logprobs(top, row, i, tokens[i], width) for i in range(count)]
            if finish is not Finish.RUNNING:
                self.scheduler.finish(request, _REASONS[finish])
        return advanced


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


def _read_prompt_logprobs(request: Request, top: Any, row: int, count: int) -> None:
    """Position i of a chunk scores the prompt's next token; the first token of a prompt has no score."""
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    for i in range(count):
        position = len(request.prompt_logprobs)
        if position < len(request.prompt):
            width = request.params.prompt_logprobs or 0
            request.prompt_logprobs.append(_logprobs(top, row, i, request.prompt[position], width))
