"""The step loop: requests go in, the engine steps, tokens become text, finished requests are dropped."""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence

from mtp_jax.api.completions import CompletionState, PromptState
from mtp_jax.api.interrupt import interruptible
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request

_LOG = logging.getLogger(__name__)


class Session:
    """One engine and the prompts that it serves. Not thread-safe: one thread owns both."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._serving: dict[int, tuple[PromptState, CompletionState]] = {}

    def submit(self, prompt: PromptState) -> None:
        """Queue every completion of a prompt."""
        for completion in prompt.completions:
            self._serving[completion.request.id] = prompt, completion
            self.engine.submit(completion.request)

    def abort(self, prompt: PromptState) -> list[PromptState]:
        """End the unfinished completions of a prompt. Returns [prompt] if a completion was unfinished."""
        left = [c.request for c in prompt.completions if c.request.id in self._serving]
        for request in left:
            self.engine.abort(request)
        return self._advance(left)

    def pause(self) -> list[PromptState]:
        """Pause the engine. Returns the prompts that its last launches have advanced."""
        return self._advance(self.engine.pause())

    def step(self) -> list[PromptState]:
        """Run one step of the engine, for all its requests. Returns the prompts that advanced."""
        return self._step()[1]

    def run(self, requests: Iterable[Request] = ()) -> Generator[list[Request], None, None]:
        """Serve requests that need no text until the engine is idle; yields the requests that each step
        advanced.

        More may be submitted to the engine meanwhile. The given requests are aborted if the iterator is
        closed.
        """
        requests = list(requests)
        try:
            for request in requests:
                self.engine.submit(request)
            while self.engine.busy:
                yield self._step()[0]
        finally:
            for request in requests:
                self.engine.abort(request)

    def rest(self, wanted: Callable[[], bool] = lambda: False) -> None:
        """Hand pages over to files, unless ``wanted`` says that something else is to be done."""
        engine = self.engine
        while engine.tier and not engine.busy and not engine.asleep and not wanted():
            if not engine.tier.save():
                return

    def _step(self) -> tuple[list[Request], list[PromptState]]:
        """Run a step, then act on Ctrl-C: within a step, results have been read that are in no text yet."""
        with interruptible() as stopped:
            requests = self.engine.step()
            prompts = self._advance(requests)
        if stopped.is_set():
            raise KeyboardInterrupt
        return requests, prompts

    def _advance(self, requests: Sequence[Request]) -> list[PromptState]:
        """Turn tokens into text."""
        changed: dict[PromptState, None] = {}
        for request in requests:
            if request.id not in self._serving:
                continue
            prompt, completion = self._serving[request.id]
            try:
                completion.advance(self.engine)
            except Exception:  # an error in one request's text fails that request alone
                _LOG.exception("a request failed")
                self.engine.abort(request, "error")
                completion.done = True
            if completion.done:
                del self._serving[request.id]
            changed[prompt] = None
        return list(changed)
