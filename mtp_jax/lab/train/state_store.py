"""Orbax checkpoints of a training run: parameters, optimiser state and step, kept as named arrays."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from mtp_jax.errors import CheckpointError
from mtp_jax.lab.train.step import TrainState


class StateStore:
    """The checkpoints below one directory; the newest two are kept."""

    def __init__(self, directory: Path) -> None:
        """`directory` is created when missing."""
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def latest(self) -> int | None:
        """The number of steps done in the newest checkpoint; None without a checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Write the state after `step` steps, unless the newest checkpoint has it."""
        if step != self.latest():
            self._manager.save(step, args=ocp.args.StandardSave(_named(state)))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state saved after `step` steps, structured as `like`; CheckpointError if it does not fit."""
        names = _named(like)
        target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), names)
        try:
            found: Any = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        except (ValueError, KeyError) as err:
            raise CheckpointError(
                f"the checkpoint of step {step} does not fit this model and optimiser: {err}; use another "
                "output directory or the recipe that made it"
            ) from err
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in names])

    def close(self) -> None:
        """Wait for writes and release the directory."""
        self._manager.close()


def _named(state: TrainState) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
