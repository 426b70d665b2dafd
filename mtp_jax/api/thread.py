"""The one thread that steps an engine. Other threads put prompts into its inbox."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from mtp_jax.api.completions import CompletionState, PromptState
from mtp_jax.api.outputs import RequestOutput
from mtp_jax.api.session import Session
from mtp_jax.decode.keys import Key
from mtp_jax.engine.engine import Engine

_LOG = logging.getLogger(__name__)

PromptUpdate = tuple[PromptState, RequestOutput]


class EngineThread:
    """The owner of the engine and of every prompt's state. It sleeps while there is no work.

    Attributes:
        error: the error that made the engine fail; None while it works.
    """

    def __init__(
        self,
        engine: Engine,
        admitted: Callable[[PromptState, int], None],
        updated: Callable[[Sequence[PromptUpdate]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Take functions, which are called on this thread.

        admitted: n more completions of a prompt got a slot, or ended in the queue. updated: the prompts that
        a step advanced, in one call. failed: the engine has failed and gives no further results.
        """
        self.error: BaseException | None = None
        self._engine, self._session = engine, Session(engine)
        self._admitted, self._updated, self._failed = admitted, updated, failed
        # A function to run, and whether the engine must step after it; None ends the thread.
        self._inbox: queue.SimpleQueue[tuple[Callable[[], object], bool] | None] = queue.SimpleQueue()
        # For prompts with completions in the queue: the number of them that got a slot, or ended there.
        self._queued: dict[PromptState, int] = {}
        self._quiet: list[Callable[[], object]] = []  # functions to call once no prompt is running
        self._working_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Process the whole inbox, end the thread and any pause, and wait for the end."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._engine.scheduler.unpause()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def step_age(self) -> float:
        """Seconds since the current step began; 0.0 between steps without work."""
        since = self._working_since
        return 0.0 if since is None else time.monotonic() - since

    def call(self, function: Callable[[], object]) -> None:
        """Run a function between two steps."""
        self._inbox.put((function, True))

    def call_between(self, function: Callable[[], object]) -> None:
        """Run a function once every prompt that has begun is complete; later prompts wait in the queue."""
        self.call(lambda: self._hold_for(function))

    def pause(self) -> None:
        """Put all requests back into the queue until ``unpause``. This thread alone may call both."""
        self._hand_over(self._session.pause())

    def unpause(self) -> None:
        """Serve the requests of the queue again."""
        self._engine.scheduler.unpause()

    def warm_up(self, key: Key) -> None:
        """Warm up a program that has just been compiled, if no request is being served."""
        self._inbox.put((lambda: self._engine.warm_up([key]), False))

    def forget_costs(self) -> None:
        """Have the next steps measured anew, now that nothing is compiled beside them."""
        self._inbox.put((self._engine.depth.forget, False))

    def submit(self, prompt: PromptState) -> None:
        """Serve a prompt."""
        self.call(lambda: self._enter(prompt))

    def abort(self, prompt: PromptState) -> None:
        """End a prompt; ``updated`` is called for it a last time."""
        self.call(lambda: self._hand_over(self._session.abort(prompt)))

    def _run(self) -> None:
        try:
            while self._commands():
                self._hand_over(self._session.step())
        except BaseException as error:
            _LOG.critical("the engine failed", exc_info=error)
            self.error = error
            self._failed(error)
        self._working_since = None

    def _commands(self) -> bool:
        """Run the functions of the inbox; wait for one while no request is left. Returns False at the end."""
        if not self._engine.busy:
            self._working_since = None
            self._run_quiet()
            self._session.rest(lambda: not self._inbox.empty())
        while True:
            try:
                command = self._inbox.get(block=self._working_since is None)
            except queue.Empty:
                self._working_since = time.monotonic()
                return True
            if command is None:
                return False
            function, asked = command
            before, self._working_since = self._working_since, time.monotonic()
            function()
            if not asked:
                self._working_since = before  # no step is needed

    def _hold_for(self, function: Callable[[], object]) -> None:
        self._engine.hold()
        self._quiet.append(function)

    def _run_quiet(self) -> None:
        while self._quiet:
            self._quiet.pop(0)()
        self._engine.resume()
        if self._engine.busy:
            self._working_since = time.monotonic()

    def _enter(self, prompt: PromptState) -> None:
        self._session.submit(prompt)
        self._queued[prompt] = 0

    def _hand_over(self, advanced: Sequence[PromptState]) -> None:
        """Hand over the new outputs."""
        for prompt, before in list(self._queued.items()):
            # The completions of a prompt get their slots in order.
            through = sum(1 for _ in takewhile(_was_admitted, prompt.completions[before:]))
            if through:
                self._admitted(prompt, through)
            self._queued[prompt] = before + through
            if before + through == len(prompt.completions):
                del self._queued[prompt]
        updates = [(prompt, output) for prompt in advanced if (output := prompt.poll())]
        if updates:
            self._updated(updates)


def _was_admitted(completion: CompletionState) -> bool:
    """Whether a request has had a slot, or ended. A preempted request has had one."""
    return completion.request.progress.admitted_at is not None or completion.request.finished
