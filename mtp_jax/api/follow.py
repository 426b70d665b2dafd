"""What the ranks after the first run in the place of an ``LLM``."""

from mtp_jax.api.device_memory import drafting
from mtp_jax.api.load import load_model
from mtp_jax.api.local import make_runner
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Silent
from mtp_jax.errors import ConfigError
from mtp_jax.hosts.follower_log import FollowerLog
from mtp_jax.hosts.replay import replay


def follow(options: LLMOptions) -> int:
    """Load the model and repeat what rank 0 launches, until it ends. Returns how many operations there were.

    options: those that rank 0 gives its ``LLM``, with this rank's own ``group`` and ``mesh``.

    Raises ConfigError, CheckpointError at the start. What goes wrong later ends the process with status 70.
    """
    group, report = options.group, options.reporter or Silent()
    if group is None or not isinstance(group.log, FollowerLog):
        raise ConfigError("follow() is for the ranks after the first; rank 0 makes an LLM")
    model = load_model(options, report)
    params = drafting(model.params, model.engine.num_speculative_tokens)
    cfg = model.config if params.nextn else model.config.with_nextn(())
    with report.phase("allocate cache"):
        runner = make_runner(cfg, params, model.engine, options.mesh)
    with report.phase("follow"):
        return replay(runner, group.log, group.ending)
