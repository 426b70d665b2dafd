"""``AsyncLLM``: one engine for many coroutines. An engine thread steps; an event loop reads.

    submit: a place in the queue -> tokenised -> inbox -> engine thread: step, text -> Stream

The engine and every ``Part`` are touched by the engine's thread alone; what it hands over, once per step, is
immutable.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from mtp_jax.admission import Admission, Place
from mtp_jax.engine.request import Request, SamplingParams, Status
from mtp_jax.errors import EngineStopped, RequestError
from mtp_jax.jobs import Job, Part, Prompt
from mtp_jax.llm import LLM
from mtp_jax.outputs import RequestOutput
from mtp_jax.progress import Reporter, Silent

_LOG = logging.getLogger(__name__)
_CHARACTERS_PER_TOKEN = 4
_SHORT_PROMPT = 1000
_TOKENISING_THREADS = 2
_T = TypeVar("_T")

LazyPrompt = Prompt | Callable[[], Prompt]
"""A prompt, or what makes it: called on a worker thread once there is a place in the queue."""


class Stream:
    """The growing output of one prompt: iterating gives its newest state, skipping what nobody waited for.

    Attributes:
        request_id: as given, or made up.
    """

    def __init__(self, request_id: str, job: Job, place: Place, abort: Callable[["Stream"], None]) -> None:
        self.request_id = request_id
        self._job, self._place, self._abort = job, place, abort
        self._latest: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = False
        self._wake = asyncio.Event()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> RequestOutput:
        while self._latest is None:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            await self._wake.wait()
            self._wake.clear()
        output, self._latest = self._latest, None
        self._ended = output.finished
        return output

    async def aclose(self) -> None:
        """Abort what is left of it."""
        self.abort()

    def abort(self) -> None:
        """End it now: the last output has the finish reason "abort"."""
        if not self._ended:
            self._abort(self)

    def _deliver(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        self._latest, self._error = output, error
        self._wake.set()


class AsyncLLM:
    """A model that serves many coroutines of one event loop.

    ``start`` it, ``generate`` or ``submit``, and ``close`` it; ``async with`` does the first and the last.
    """

    def __init__(self, llm: LLM, max_queued_requests: int = 256, max_queued_tokens: int = 2**20) -> None:
        """Take over an LLM: nothing else may use it from now on.

        Args:
            llm: the model.
            max_queued_requests: most requests that may wait for a slot, each of a prompt's n counted.
            max_queued_tokens: most prompt tokens that may wait.
        """
        self.llm = llm
        self.admission = Admission(max_queued_requests, max_queued_tokens)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._parts: dict[int, tuple[Stream, Part]] = {}
        self._queued: list[Stream] = []
        self._ids = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._error: BaseException | None = None
        self._failed = asyncio.Event()
        self._working_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._warming = threading.Thread(target=self._warm_the_rest, name="warm-up", daemon=True)
        self._closing = threading.Event()
        self._workers = ThreadPoolExecutor(_TOKENISING_THREADS, "tokenise")

    # Life

    async def start(self, reporter: Reporter | None = None) -> None:
        """Compile enough to serve anything, then start to; cheaper executables follow in the background."""
        self._loop = asyncio.get_running_loop()
        first, self._rest = self.llm.engine.warm_up_keys()
        with (reporter or Silent()).phase("compile", "executables") as update:
            await asyncio.to_thread(self.llm.engine.executables.compile, first, update)
        self._thread.start()
        self._warming.start()

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and let what runs come to its end; after ``timeout`` seconds abort the rest.

        Returns whether everything ended by itself.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
            return True
        except TimeoutError:
            for stream in list(self._streams.values()):
                stream.abort()
            return False

    async def close(self) -> None:
        """Abort what runs and end the engine thread. What is being compiled is not waited for."""
        self._draining = True
        for stream in list(self._streams.values()):
            stream.abort()
        self._closing.set()
        self._inbox.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._workers.shutdown(wait=False)

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # State

    @property
    def error(self) -> BaseException | None:
        """What made the engine fail; None while it works."""
        return self._error

    async def failed(self) -> None:
        """Returns once the engine has failed and every stream has been told."""
        await self._failed.wait()

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken any more."""
        return self._draining

    @property
    def warming(self) -> bool:
        """Whether executables are still being compiled in the background."""
        return self._warming.is_alive()

    @property
    def live(self) -> int:
        """Prompts on their way."""
        return len(self._streams)

    @property
    def step_age(self) -> float:
        """Seconds since the engine thread began the step it is in; 0.0 while nothing is to be done."""
        since = self._working_since
        return 0.0 if since is None else time.monotonic() - since

    # Requests

    async def generate(
        self,
        prompt: LazyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, yielding the output so far as it grows. Ending the iteration early aborts.

        Arguments and errors are those of ``submit``; errors come with the first output.
        """
        stream = await self.submit(prompt, sampling_params, request_id, priority, timeout, cache_salt)
        async with aclosing(stream):
            async for output in stream:
                yield output

    async def submit(
        self,
        prompt: LazyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
    ) -> Stream:
        """Queue one prompt.

        Args:
            prompt: a string, token ids, or a function that makes one of them, called on a worker thread.
            sampling_params: how to choose tokens.
            request_id: names it to ``abort``.
            priority: lower runs first.
            timeout: seconds after which it ends with the reason "timeout".
            cache_salt: only requests of the same salt share cached prefixes.

        Raises:
            RequestError: it cannot be served.
            Overloaded: the queue is full.
            EngineStopped: nothing can be served any more.
        """
        self._check_running()
        params = sampling_params or SamplingParams()
        if request_id is None:
            request_id = f"request-{self._ids}"
            self._ids += 1
        if request_id in self._streams:
            raise RequestError(f"request_id {request_id!r} is in use; give another, or none")
        options: dict[str, Any] = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt}
        options = {name: value for name, value in options.items() if value}
        place = self.admission.take(params.n, _estimate(prompt))
        try:
            make = partial(self._job, prompt, params, options)
            slow = callable(prompt) or (isinstance(prompt, str) and len(prompt) > _SHORT_PROMPT)
            slow |= params.structured is not None
            job = await self.off_loop(make) if slow else make()
            self.admission.correct(place, params.n * len(job.parts[0].request.prompt))
            self._check_running()
        except BaseException:
            self.admission.leave(place)
            raise
        stream = Stream(request_id, job, place, self._abort)
        self._streams[request_id] = stream
        self._idle.clear()
        self._inbox.put(partial(self._enter, stream))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request, if there is one of this name: its stream gets a last output."""
        if stream := self._streams.get(request_id):
            stream.abort()

    async def on_engine(self, function: Callable[[], _T]) -> _T:
        """Run a function between two steps, on the engine's thread: for example ``flush_prefix_cache``."""
        self._check_running(even_draining=True)
        future: Future[_T] = Future()

        def run() -> None:
            try:
                self._check_running(even_draining=True)
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        self._check_running(even_draining=True)
        return await asyncio.wrap_future(future)

    async def off_loop(self, function: Callable[[], _T]) -> _T:
        """Run what takes long, but not the engine, on a worker thread: rendering, tokenising."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function)

    def _job(self, prompt: LazyPrompt, params: SamplingParams, options: dict[str, Any]) -> Job:
        made = prompt() if callable(prompt) else prompt
        return Job(self.llm.engine, self.llm.tokenizer, made, params, **options)

    def _check_running(self, even_draining: bool = False) -> None:
        if self._error is not None:
            raise EngineStopped(f"the engine has failed ({type(self._error).__name__}); restart it")
        if self._draining and not even_draining:
            raise EngineStopped("the engine is shutting down; send this to another one")
        if not self._thread.is_alive():
            raise EngineStopped("the engine has not been started; call start() first")

    def _abort(self, stream: Stream) -> None:
        self._inbox.put(partial(self._end, stream))

    def _deliver(self, updates: Sequence[tuple[Stream, RequestOutput]]) -> None:
        """On the event loop, once per step."""
        for stream, output in updates:
            stream._deliver(output)
            if output.finished:
                self._forget(stream)

    def _fail_all(self, error: Exception) -> None:
        self._failed.set()
        for stream in list(self._streams.values()):
            stream._deliver(None, error)
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.request_id, None)
        self.admission.leave(stream._place)
        self.admission.finished()
        if not self._streams:
            self._idle.set()

    # The engine's thread

    def _run(self) -> None:
        engine = self.llm.engine
        try:
            while self._commands(wait=not engine.busy):
                self._hand_over(engine.step())
        except BaseException as error:
            _LOG.critical("the engine failed", exc_info=error)
            self._error = error
            self._call(self._fail_all, EngineStopped(f"the engine failed: {type(error).__name__}"))
        self._working_since = None

    def _commands(self, wait: bool) -> bool:
        """Carry out what the event loop asked for; sleeps while there is nothing to do. False: end."""
        if wait:
            self._working_since = None
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                self._working_since = time.monotonic()
                return True
            if command is None:
                return False
            self._working_since = time.monotonic()
            command()
            wait = False

    def _enter(self, stream: Stream) -> None:
        for part in stream._job.parts:
            self.llm.engine.submit(part.request)
            self._parts[part.request.id] = (stream, part)
        self._queued.append(stream)

    def _end(self, stream: Stream) -> None:
        parts = [part for part in stream._job.parts if not part.done]
        for part in parts:
            self.llm.engine.abort(part.request)
        self._hand_over([part.request for part in parts])

    def _hand_over(self, advanced: Sequence[Request]) -> None:
        """Turn tokens into text and give the event loop what is new, all of it in one call."""
        changed: dict[str, Stream] = {}
        for request in advanced:
            stream, part = self._parts.get(request.id, (None, None))
            if stream is None or part is None:
                continue
            try:
                part.advance(self.llm.engine)
            except Exception:  # of this request's text: no reason to fail the others
                _LOG.exception("a request failed")
                self.llm.engine.abort(request)
                request.finish_reason, part.done = "error", True
            if part.done:
                del self._parts[request.id]
            changed[stream.request_id] = stream
        if self._queued:
            waiting = [s for s in self._queued if any(map(_waits, s._job.parts))]
            for stream in set(self._queued).difference(waiting):
                self.admission.leave(stream._place)
            self._queued = waiting
        if changed:
            self._call(self._deliver, [(stream, stream._job.output()) for stream in changed.values()])

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *args)

    def _warm_the_rest(self) -> None:
        for key in self._rest:
            if self._closing.is_set():
                return
            try:
                self.llm.engine.executables.compile([key])
            except Exception:  # what is compiled already serves everything
                _LOG.exception("an executable did not compile")


def _estimate(prompt: LazyPrompt) -> int:
    """Tokens of a prompt, before they are known."""
    if callable(prompt):
        return 1
    return len(prompt) // _CHARACTERS_PER_TOKEN + 1 if isinstance(prompt, str) else len(prompt)


def _waits(part: Part) -> bool:
    return part.request.status is Status.WAITING
