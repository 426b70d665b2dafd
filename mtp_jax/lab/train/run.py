"""A run of many steps that goes on from its newest checkpoint, if that is of the same run."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from mtp_jax.api.interrupt import interruptible
from mtp_jax.checkpoint.write import write_json
from mtp_jax.errors import CheckpointError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.train.state_store import StateStore
from mtp_jax.lab.train.step import TrainState


class TrainingRun:
    """The steps of a training, with checkpoints below its folder in `state/`."""

    def __init__(self, out_dir: Path, checkpoint_minutes: float, last: int, resume: bool = True) -> None:
        """`last`: the number of steps after which the run ends. `resume`: whether it may go on."""
        self._out_dir, self._minutes, self._last, self._resume = out_dir, checkpoint_minutes, last, resume
        self._store, self._first = StateStore(out_dir / "state"), 0

    def begin(self, state: TrainState, about: JsonObject, beside: JsonObject) -> tuple[int, TrainState]:
        """The number of steps that are done, and the state after them.

        about: facts of the run that must stay; `beside`: more, kept with them. Both are in `run.json`.
        Raises CheckpointError if the folder holds another run or a longer one, or a run that must not go on.
        """
        out_dir, last = self._out_dir, self._last
        self._first = first = self._store.latest() or 0
        if first and not self._resume:
            raise CheckpointError(
                f"{out_dir} holds a run of {first} steps and resume is off; resume it or name another "
                "directory"
            )
        check_same_run(out_dir / "run.json", about, beside, resuming=first > 0)
        if first:
            state = self._store.restore(first, state)
        if first > last:
            raise CheckpointError(
                f"{out_dir} holds a run of {first} steps, more than the {last} of this one; resume it with "
                "as many or more, or name another directory"
            )
        return first, state

    def steps(
        self,
        state: TrainState,
        one: Callable[[int, TrainState], TrainState],
        looked: Callable[[int, TrainState], None],
    ) -> TrainState:
        """Do the steps that are left. looked: called after every checkpoint.

        Raises KeyboardInterrupt: Ctrl-C; the steps that were done have a checkpoint.
        """

        def checkpoint(done: int) -> None:
            self._store.save(done, state)
            looked(done, state)

        saved_at = time.monotonic()
        with interruptible() as stopped:  # in the midst of a step there is no state: it has been donated
            for done in range(self._first, self._last):
                state = one(done, state)
                if stopped.is_set():
                    self._store.save(done + 1, state)
                    self._store.close()
                    raise KeyboardInterrupt
                if time.monotonic() - saved_at > 60 * self._minutes:
                    checkpoint(done + 1)
                    saved_at = time.monotonic()
        checkpoint(self._last)
        self._store.close()
        return state


def checked(step: int, losses: jax.Array, grad_norm: jax.Array) -> tuple[list[float], float]:
    """The losses and the gradient's norm as numbers. Raises CheckpointError if one is not finite."""
    values, norm = np.asarray(losses).tolist(), float(grad_norm)
    if not all(map(math.isfinite, [*values, norm])):
        raise CheckpointError(
            f"the loss is {values}, the gradient's norm {norm} at step {step}; "
            "resume with a lower learning rate"
        )
    return values, norm


def check_same_run(path: Path, now: JsonObject, beside: JsonObject, resuming: bool) -> None:
    """Write the facts of a run. If ``resuming``, ``now`` must match the file; ``beside`` may differ from it.

    Raises CheckpointError where a fact of ``now`` has changed.
    """
    if resuming:
        before = _read_run(path)
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            raise CheckpointError(
                f"{path.parent} holds a run that differs in {', '.join(changed)}; resume with the recipe "
                "and the Python that started it, or name another output directory"
            )
    write_json(path, now | beside)


def _read_run(path: Path) -> JsonObject:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}, which says what the checkpoints beside it are of, cannot be read: {error}; restore it, "
            "or name another output directory"
        ) from error
