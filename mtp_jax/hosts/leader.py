"""The runner of rank 0: writes every launch to the launch log, then launches it on its own devices."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from mtp_jax.decode.arrays import MaskMaker
from mtp_jax.decode.keys import Key, StepKey
from mtp_jax.decode.launches import Launch, Pending, Runner
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.hosts.ending import Ending
from mtp_jax.hosts.leader_log import LeaderLog
from mtp_jax.hosts.messages import Compile, Masks, Publish

T = TypeVar("T")


class LeaderRunner(Runner):
    """See ``launches.Runner``. A launch that cannot be sent, or fails here, ends the group.

    Attributes:
        local: the runner of this process's devices. All its launches go through ``LeaderRunner``.
    """

    def __init__(self, local: LocalRunner, log: LeaderLog, ending: Ending) -> None:
        super().__init__(local.shards, local.layout, local.traits)
        self.local, self._log, self._ending = local, log, ending
        # A lock: launches of all threads have one order, here and in the log.
        self._order = threading.RLock()
        # XLA's autotuning exchanges results between processes: all compile one program after the other.
        self._compiling, self._jobs = threading.Lock(), 0

    @property
    def keys(self) -> list[Key]:
        """The keys of programs that every rank has compiled."""
        return self.local.keys

    def compile(self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None) -> None:
        """Compile the missing programs, on every rank. Raises ConfigError."""
        with self._compiling:
            missing = [k for k in dict.fromkeys(keys) if k not in self.local.programs]
            for i, key in enumerate(missing, start=1):
                self._jobs += 1
                self._log.send(Compile(self._jobs, key))
                program = self.local.programs.build(key)
                self._log.compiled(self._jobs)
                with self._order:
                    self._log.send(Publish(self._jobs, key))
                    self.local.programs.publish(key, program)
                if done:
                    done(i, len(missing))

    def find(self, need: StepKey) -> StepKey | None:
        """The cheapest compiled key that covers ``need``, or None if there is none."""
        return self.local.find(need)

    def _do(self, launch: Launch[T], masks: MaskMaker | None) -> Pending[T]:
        """Launch on every rank. Masks go to the log as they are made."""

        def sent(drafts: np.ndarray | None, parents: np.ndarray | None = None) -> np.ndarray:
            assert masks is not None
            allowed = masks(drafts, parents)
            self._log.send(Masks(allowed))
            return allowed

        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(launch)
            pending = self.local.do(launch, masks and sent)
        flush = pending.flush
        flush = flush and replace(flush, wait=self._checked(flush.wait))
        return replace(pending, read=self._checked(pending.read), flush=flush)

    def _checked(self, wait: Callable[[], T]) -> Callable[[], T]:
        """A pending result; the group ends if reading it fails."""

        def checked() -> T:
            with self._ending.on_error("a launch failed"):
                return wait()

        return checked
