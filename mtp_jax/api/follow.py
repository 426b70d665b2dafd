"""The work of the ranks after the first, in the place of an ``LLM``."""

from pathlib import Path
from typing import Any

from mtp_jax.api.load import load_model
from mtp_jax.api.local import make_runner
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Silent
from mtp_jax.errors import ConfigError
from mtp_jax.hosts.follower_log import FollowerLog
from mtp_jax.hosts.replay import replay


def follow(model: str | Path | None = None, **rest: Any) -> int:
    """Load the model and repeat the launches of rank 0, until it ends. Returns the number of operations.

    Takes the options of ``LLM`` as rank 0 gives them, with this rank's own ``group`` and ``mesh``.

    Raises ConfigError, CheckpointError at the start. A later error ends the process with status 70.
    """
    options = LLMOptions(model, **rest)
    group, report = options.group, options.reporter or Silent()
    if group is None or not isinstance(group.log, FollowerLog):
        raise ConfigError("follow() is for the ranks after the first; rank 0 makes an LLM")
    loaded = load_model(options, report)
    with report.phase("allocate cache"):
        runner = make_runner(loaded.decoding, loaded.params, loaded.engine)
    with report.phase("follow"):
        return replay(runner, group.log, group.ending)
