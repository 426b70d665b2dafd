"""``AsyncLLM``: one engine for many coroutines. An engine thread steps; an event loop reads.

    submit: a reservation in the queue -> tokenised -> inbox -> engine thread: step, text -> Stream

The engine's thread alone touches the engine and every prompt's state; the values that it hands over, once per
step, are immutable.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import numpy as np

from mtp_jax.api.about import About
from mtp_jax.api.admission import Admission, LazyPrompt, QueueLimits, estimate
from mtp_jax.api.completions import Prompt, PromptState, RequestOptions, check
from mtp_jax.api.device_memory import Tag, WeightUpdate
from mtp_jax.api.helpers import start_helpers
from mtp_jax.api.hints import hinting
from mtp_jax.api.hooks import Hooks
from mtp_jax.api.introduction import introduction
from mtp_jax.api.llm import LLM
from mtp_jax.api.outputs import RequestOutput
from mtp_jax.api.pause import Pause
from mtp_jax.api.progress import Reporter, Silent
from mtp_jax.api.stream import Stream
from mtp_jax.api.submissions import Submissions
from mtp_jax.api.thread import EngineThread
from mtp_jax.api.warm_up import WarmUp
from mtp_jax.api.workers import Workers
from mtp_jax.checkpoint.update import WeightSource
from mtp_jax.engine.request import Terms
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.stats import EngineStats
from mtp_jax.errors import EngineStopped, RequestError

_SHORT_PROMPT = 1000
_T = TypeVar("_T")


@hinting(RequestError, "generate", "submit")
class AsyncLLM:
    """A model that serves many coroutines of one event loop.

    ``start`` it, ``generate`` or ``submit``, and ``close`` it; ``async with`` starts and closes it.

    Attributes:
        pause: begins and ends pauses of generation.
    """

    def __init__(
        self,
        llm: LLM,
        max_queued_requests: int = QueueLimits.max_queued_requests,
        max_queued_tokens: int = QueueLimits.max_queued_tokens,
    ) -> None:
        """Take over an LLM: nothing else may use it from now on.

        Args:
            llm: the model.
            max_queued_requests: most requests that may wait for a slot, each of a prompt's n counted.
            max_queued_tokens: most prompt tokens that may wait.
        """
        self.llm = llm
        self._submissions = Submissions(Admission(max_queued_requests, max_queued_tokens))
        # Half of the queue is left to prompts that are to be answered.
        self._counted = Admission(max(max_queued_requests // 2, 1), max(max_queued_tokens // 2, 1))
        self._workers = Workers()
        self._calls: set[Future[Any]] = set()
        self._draining = self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed = asyncio.Event()
        self._changing, self._falling_asleep = asyncio.Lock(), False  # weights or memory
        self._thread = EngineThread(
            llm.engine,
            admitted=self._submissions.admitted,
            updated=lambda updates: self._call(partial(self._submissions.deliver, updates)),
            failed=lambda error: self._call(partial(self._fail_all, error)),
        )
        if llm.group:
            llm.group.ending.told.append(self.fail)
        thread, quiet = self._thread, self._submissions.quiet
        self.warm_up = WarmUp(llm.engine, quiet, thread.warm_up, thread.forget_costs)
        self.pause = Pause(thread, self._submissions, self.on_engine, self._check_awake)
        self.hooks = Hooks(at_start=[partial(self.off_loop, llm.await_files)])
        self.about = About(
            llm.config,
            llm.engine.config,
            llm.tokenizer,
            llm.sampling_defaults,
            introduction(llm.folders[0]),
            simulated=llm.simulated,
            random_weights=llm.random_weights,
            structured=llm.engine.grammars is not None,
        )

    # Life

    async def start(self, reporter: Reporter | None = None) -> None:
        """Prepare executables that serve any request, then start; cheaper executables follow while idle."""
        self._loop = asyncio.get_running_loop()
        with (reporter or Silent()).phase("programs", "executable") as update:
            # Not in the event loop's own threads: its end, after Ctrl-C for one, would wait for the compiler.
            await self.off_loop(lambda: self.warm_up.first(update))
        if grammars := self.llm.engine.grammars:
            await self.off_loop(grammars.prepare)
        self._thread.start()
        for begin in self.hooks.at_start:
            await begin()
        self.warm_up.start()

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for submitted requests to end; abort them after ``timeout`` seconds.

        Returns whether every request ended by itself.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._submissions.idle.wait()
            return True
        except TimeoutError:
            self._submissions.abort()
            return False

    async def close(self) -> None:
        """Abort all requests and end the engine thread, without waiting for compilations in progress."""
        self._draining = True
        self._submissions.abort()
        self._closed = True
        self.warm_up.stop()
        for end in self.hooks.at_close:
            end()
        await asyncio.to_thread(self._thread.stop)
        self._fail_calls(EngineStopped("the engine has been closed"))
        self._workers.close()
        if self.llm.group:
            await asyncio.to_thread(self.llm.group.leave)

    def fail(self, error: EngineStopped) -> None:
        """Fail all present and later requests, from any thread, because the process is about to end."""
        self._thread.error = error
        if self._loop:
            self._call(partial(self._fail_all, error))

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # State

    @property
    def error(self) -> BaseException | None:
        """The error that made the engine fail; None while it works."""
        return self._thread.error

    async def failed(self) -> None:
        """Wait until the engine has failed and every stream has its error."""
        await self._failed.wait()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def warming(self) -> bool:
        """Whether executables are still to be compiled in the background."""
        return self.warm_up.running

    @property
    def admission(self) -> Admission:
        """The queue: its bounds, and the requests and tokens that wait."""
        return self._submissions.admission

    @property
    def live(self) -> int:
        """The number of prompts that have not ended."""
        return len(self._submissions)

    @property
    def step_age(self) -> float:
        """Seconds since the engine thread began the step it is in; 0.0 while nothing is to be done."""
        return self._thread.step_age

    @property
    def weight_version(self) -> str:
        """The name of the weights."""
        return self.llm.weight_version

    @property
    def released(self) -> tuple[Tag, ...]:
        """The parts of device memory that are released now."""
        return self.llm.released

    def stats(self) -> EngineStats:
        """A snapshot of the engine's contents and totals. Any thread may ask."""
        return self.llm.engine.stats()

    # Weights and memory

    async def update_weights(
        self,
        source: WeightSource,
        draft_model: str | Path | None = None,
        *,
        keep_draft: bool = False,
        weight_version: str | None = None,
        probe: Sequence[Prompt] | None = None,
        abort: bool = False,
    ) -> WeightUpdate:
        """Replace the model's weights, all or none, while it serves.

        The new weights are read and checked while requests are served. Then prompts that have begun finish
        with the old weights, and queued prompts wait for the new weights: no answer comes from both, but for
        requests that a pause keeps, which do not hold up the update, and go on with the new weights.

        Args:
            source, draft_model, keep_draft, weight_version, probe: as for ``LLM.update_weights``.
            abort: end the requests submitted before, rather than wait for them.

        Raises:
            CheckpointError, ConfigError, RequestError: nothing has changed.
            EngineStopped: the engine ended before.
        """
        self._check_running()
        llm = self.llm
        async with self._changing:
            new = await self.off_loop(partial(llm.read_weights, source, draft_model, keep_draft=keep_draft))
            if abort:
                self._submissions.abort()
            replace = partial(llm.replace_weights, new, weight_version, probe, prepare=False)
            return await self.on_engine(replace, between_prompts=True)

    async def name_weights(self, weight_version: str) -> None:
        """Name the weights, for requests that get a slot from now on; none ends. Raises EngineStopped."""
        await self.on_engine(partial(self.llm.engine.name_weights, weight_version))

    async def release_memory(
        self, tags: Sequence[Tag] | None = None, *, backup: bool = True, abort: bool = False
    ) -> None:
        """Give device memory back, as ``LLM.release_memory`` does, once every submitted request has ended, or
        waits for the end of a pause.

        New requests are refused until ``resume_memory``, or an update of the weights, has restored all of it.

        Args:
            tags, backup: as for ``LLM.release_memory``.
            abort: end the submitted requests, rather than wait for them.

        Raises:
            ConfigError: a tag that this model does not have.
            EngineStopped: the engine ended before.
        """
        self._check_running()
        async with self._changing:
            self._falling_asleep = True
            try:
                if abort:
                    self._submissions.abort()
                await self.pause.at_rest()
                await self.on_engine(partial(self.llm.release_memory, tags, backup=backup))
            finally:
                self._falling_asleep = False

    async def resume_memory(self, tags: Sequence[Tag] | None = None) -> None:
        """Restore the memory that was released. Raises ConfigError, RequestError, EngineStopped."""
        self._check_running()
        async with self._changing:
            await self.on_engine(partial(self.llm.resume_memory, tags))

    async def hidden_states(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> tuple[str, np.ndarray]:
        """Return (weight version, hidden states), as ``LLM.hidden_states`` does, while requests are served.

        Raises RequestError, EngineStopped.
        """
        self._check_running()
        async with self._changing:  # they are all of the same weights
            states = await self.off_loop(partial(self.llm.hidden_states, token_ids, positions, layers))
            return self.llm.weight_version, states

    # Requests

    async def generate(
        self,
        prompt: Prompt | LazyPrompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, yielding its output as it grows. Ending the iteration early aborts.

        ``output_kind`` of the parameters chooses whether an output holds the whole text so far (the default).
        Arguments and errors are those of ``submit``; errors come with the first output.
        """
        stream = await self.submit(prompt, sampling_params, **options)
        async with aclosing(stream):
            async for output in stream:
                yield output

    async def submit(
        self,
        prompt: Prompt | LazyPrompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Queue one prompt.

        Args:
            prompt: a string, token ids, or a ``LazyPrompt`` that makes one of them on a worker thread.
            sampling_params: how to choose tokens; None: ``llm.default_sampling_params``.
            options: fields of ``RequestOptions``.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: the queue is full, or too many grammars are being compiled.
            EngineStopped: the engine has ended.
        """
        self._check_running()
        self._check_awake()
        arrived = self.llm.engine.runner.clock()
        params = self.llm.default_sampling_params if sampling_params is None else sampling_params
        check("" if isinstance(prompt, LazyPrompt) else prompt, params)
        tokens, longest = estimate(prompt), self.about.engine.longest
        with self._submissions.enter(options.pop("request_id", None), params, tokens, longest) as stream:
            if params.structured is not None and isinstance(prompt, LazyPrompt):
                # Long prompts wait for each other, and no grammar for them.
                prompt = await self._workers.tokenise(tokens, prompt.make)
            make = partial(self._state, prompt, params, cast(Terms, {**options, "arrived": arrived}))
            if params.structured is not None:
                state = await self._workers.run("grammar", make)
            elif isinstance(prompt, LazyPrompt) or len(prompt) * params.n > _SHORT_PROMPT:
                state = await self._workers.tokenise(tokens, make)
            else:
                state = make()
            for prepare in self.hooks.before_submit:
                await prepare(state.completions[0].request)
            self._check_running()
            self._check_awake()
            self._submissions.made(stream, state)
            self._thread.submit(state)
            stream.begin(partial(self._thread.abort, state))
        return stream

    async def flush_prefix_cache(self) -> None:
        """Forget the pages and the outputs of past requests. Raises EngineStopped."""
        engine = self.llm.engine
        await self.on_engine(lambda: (engine.flush_prefix_cache(), engine.texts.forget()))

    async def start_helpers(self) -> None:
        """Start the processes that try grammars and render chat templates, before a request waits."""
        await self.off_loop(partial(start_helpers, self.llm.engine.grammars, self.about.tokenizer))

    def abort(self, request_id: str | None) -> None:
        """End the request of this name, if there is one; its stream gets a last output.

        None: all requests. The name of a batch ends its requests, ``request_id``_0, _1 and so on.
        """
        self._submissions.abort(request_id)

    async def on_engine(self, function: Callable[[], _T], between_prompts: bool = False) -> _T:
        """Run a function between two steps, on the engine's thread: for example ``flush_prefix_cache``.

        between_prompts: wait until every prompt that has begun is complete; later prompts stay in the queue
        meanwhile. Raises EngineStopped if the engine ends before.
        """
        self._check_running(even_draining=True)
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.add(future)
        try:
            (self._thread.call_between if between_prompts else self._thread.call)(run)
            self._check_running(even_draining=True)  # a failure from here on fails the call as well
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    async def off_loop(self, function: Callable[[], _T]) -> _T:
        """Run a long function that does not use the engine on a thread beside the event loop."""
        return await self._workers.run("beside", function)

    async def in_queue(self, prompt: Prompt | LazyPrompt, function: Callable[[], _T]) -> _T:
        """Run a function about as long as tokenising a prompt, on the threads and in the queue of prompts.

        All such functions together hold half of the queue at most. Raises Overloaded.
        """
        tokens = estimate(prompt)
        with self._counted.reserved(1, tokens), self.admission.reserved(1, tokens, self._counted.max_tokens):
            return await self._workers.tokenise(tokens, function)

    def _state(self, prompt: Prompt | LazyPrompt, params: SamplingParams, terms: Terms) -> PromptState:
        made = prompt.make() if isinstance(prompt, LazyPrompt) else prompt
        return PromptState(self.llm.engine, self.about.tokenizer, made, params, terms)

    def _check_running(self, even_draining: bool = False) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise EngineStopped(  # this request would never get an answer
                "the engine belongs to another event loop; use it in the loop that started it"
            )
        if self.error is not None:
            raise EngineStopped(f"the engine has failed ({type(self.error).__name__}); restart it")
        if self._draining and not even_draining:
            raise EngineStopped("the engine is shutting down; send this to another one")
        if self._closed:
            raise EngineStopped("the engine has been closed")
        if not self._thread.alive:
            raise EngineStopped("the engine has not been started; call start() first")

    def _check_awake(self) -> None:
        self.llm.check_memory()
        if self._falling_asleep:
            raise EngineStopped("memory is about to be released; send this to another engine")

    def _fail_all(self, error: BaseException) -> None:
        if self.llm.group:  # the other processes must end, too
            self.llm.group.end_soon(f"the engine failed: {type(error).__name__}: {error}")
        self._failed.set()
        failure = EngineStopped(f"the engine failed: {type(error).__name__}")
        self._submissions.fail(failure)
        self._fail_calls(failure)

    def _fail_calls(self, failure: EngineStopped) -> None:
        for call in self._calls:
            if not call.done():
                call.set_exception(failure)

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)
