"""The one thread that steps an engine. Others put jobs into its inbox and are told what became of them."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from mtp_jax.api.completions import Job, Part
from mtp_jax.api.outputs import RequestOutput
from mtp_jax.decode.keys import Key
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request

_LOG = logging.getLogger(__name__)
_PATIENCE = 0.5  # of the work that the device still has

Update = tuple[Job, RequestOutput]


class EngineThread:
    """Sleeps while nothing is to be done. The engine and every ``Part`` are touched by it alone.

    Attributes:
        error: what made the engine fail; None while it works.
    """

    def __init__(
        self,
        engine: Engine,
        admitted: Callable[[Job, int], None],
        updated: Callable[[Sequence[Update]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """The functions are called on this thread: when so many more parts of a job got slots, or ended
        without; with the jobs that grew in a step, all in one call; when the engine has failed and nothing
        more will come.
        """
        self.error: BaseException | None = None
        self._engine = engine
        self._admitted, self._updated, self._failed = admitted, updated, failed
        # What to do, and whether somebody asked for it; None: end.
        self._inbox: queue.SimpleQueue[tuple[Callable[[], object], bool] | None] = queue.SimpleQueue()
        self._parts: dict[int, tuple[Job, Part]] = {}
        # Parts that got slots, or ended without, of jobs of which others wait for their first.
        self._queued: dict[Job, int] = {}
        self._working_since: float | None = None
        self._patience = 0.0  # until when the next launch waits for more requests
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End once everything in the inbox has been done; waits for that."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread.is_alive()

    @property
    def step_age(self) -> float:
        """Seconds since it began the step it is in; 0.0 while nothing is to be done."""
        since = self._working_since
        return 0.0 if since is None else time.monotonic() - since

    def call(self, function: Callable[[], object]) -> None:
        """Run a function between two steps."""
        self._inbox.put((function, True))

    def rehearse(self, key: Key) -> None:
        """Rehearse a program that has just been compiled, if no request is being served."""
        self._inbox.put((lambda: self._engine.rehearse([key]), False))

    def submit(self, job: Job) -> None:
        """Serve a job."""
        self.call(lambda: self._enter(job))

    def abort(self, job: Job) -> None:
        """End a job; it is updated a last time."""
        self.call(lambda: self._end(job))

    def _run(self) -> None:
        try:
            while self._commands():
                self._hand_over(self._engine.step())
                ahead = 0.0 if self._engine.reads_next else self._engine.work_ahead()
                self._patience = time.monotonic() + _PATIENCE * ahead
        except BaseException as error:
            _LOG.critical("the engine failed", exc_info=error)
            self.error = error
            self._failed(error)
        self._working_since = None

    def _commands(self) -> bool:
        """Empty the inbox, or wait for something while there is nothing to serve; False: end.

        While there are free slots and the device is busy, the next launch waits for who may still come: whom
        it misses waits for a step more, and is prefilled alone.
        """
        if not self._engine.busy:
            self._working_since = None
        while True:
            try:
                command = self._inbox.get(timeout=self._wait())
            except queue.Empty:
                self._working_since = time.monotonic()
                return True
            if command is None:
                return False
            function, asked = command
            before, self._working_since = self._working_since, time.monotonic()
            function()
            if not asked:
                self._working_since = before  # no reason to step

    def _wait(self) -> float | None:
        """Seconds to wait for a command; None: until there is one."""
        if self._working_since is None:
            return None
        return max(self._patience - time.monotonic(), 0.0) if self._engine.scheduler.has_room else 0.0

    def _enter(self, job: Job) -> None:
        for part in job.parts:
            self._engine.submit(part.request)
            self._parts[part.request.id] = (job, part)
        self._queued[job] = 0

    def _end(self, job: Job) -> None:
        parts = [part for part in job.parts if not part.done]
        for part in parts:
            self._engine.abort(part.request)
        self._hand_over([part.request for part in parts])

    def _hand_over(self, advanced: Sequence[Request]) -> None:
        """Turn tokens into text and tell what is new."""
        changed: dict[Job, None] = {}
        for request in advanced:
            job, part = self._parts.get(request.id, (None, None))
            if job is None or part is None:
                continue
            try:
                part.advance(self._engine)
            except Exception:  # of this request's text: no reason to fail the others
                _LOG.exception("a request failed")
                self._engine.abort(request, "error")
                part.done = True
            if part.done:
                del self._parts[request.id]
            changed[job] = None
        for job, before in list(self._queued.items()):
            # The parts of a job get their slots in order.
            through = sum(1 for _ in takewhile(_was_admitted, job.parts[before:]))
            if through:
                self._admitted(job, through)
            self._queued[job] = before + through
            if before + through == len(job.parts):
                del self._queued[job]
        updates = [(job, output) for job in changed if (output := job.news())]
        if updates:
            self._updated(updates)


def _was_admitted(part: Part) -> bool:
    """Or ended before it was; one that is preempted waits again, but not in the queue."""
    return part.request.admitted_at is not None or part.request.finished
