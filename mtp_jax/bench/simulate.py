"""Simulated acceptance: the gain of speculation if drafts were accepted at a given rate. NOT real output.

A model without a trained drafter, or with random weights, accepts nothing; this measures the cost of a step
and its tokens at that rate. The drafting and the verification run as always, then their verdict is thrown
away: the text is garbage. It exists only here: no option of the engine, of ``LLM`` or of the server reaches
it, and every report made with it says so in its title, its notes and its JSON.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.api.local import local_runner
from mtp_jax.bench.report import Report
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.keys import SamplingMode
from mtp_jax.decode.sampling import argmax, row_keys
from mtp_jax.decode.state import Slots
from mtp_jax.decode.step import accept_drafts, num_drafts
from mtp_jax.decode.verify import Verdict
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import ConfigError

_PURPOSE = 1 << 20  # of random numbers that no step draws


@dataclass(frozen=True)
class Simulated:
    """The probability that the draft at each position is accepted once those before it are.

    The last one holds for all positions after it.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= r <= 1 for r in self.rates):
            raise ConfigError(f"acceptance {self.rates}: expected probabilities from 0 to 1, such as 0.8,0.7")

    def label(self, report: Report) -> Report:
        """A report that says that its acceptance is simulated, wherever it ends up."""
        rates = ", ".join(f"{r:g}" for r in self.rates)
        note = (
            f"SIMULATED ACCEPTANCE: drafts were kept at random (probabilities {rates}), whatever the model "
            "said. These figures say what steps cost, not what this model achieves; its text was garbage."
        )
        return replace(
            report,
            title=f"SIMULATED ACCEPTANCE ({rates}) - {report.title}",
            notes=[note, *report.notes],
            figures={"simulated_acceptance": list(self.rates), **report.figures},
        )


def simulate(engine: Engine, simulated: Simulated) -> None:
    """Make the steps of an engine that has compiled nothing accept drafts at random."""
    runner = local_runner(engine)
    if runner.keys:
        raise ConfigError("acceptance is simulated from the first program on, or not at all")
    runner.programs = runner.programs.accepting(partial(_accept, simulated.rates))


def _accept(
    rates: tuple[float, ...],
    logits: Float[Array, "B W V"],
    window: Int[Array, "B W"],
    drafts: Drafts,
    s: Slots,
    mode: SamplingMode,
    allowed: None,
) -> Verdict:
    """Replace ``accept_drafts``: keep drafts at their rates, then emit the trunk's greedy choice."""
    depth = drafts.tokens.shape[1]
    real = accept_drafts(logits, window, drafts, s, mode, allowed)
    chance = jnp.asarray([*rates, *rates[-1:] * depth][:depth], jnp.float32)
    keys = row_keys(s.sampling.seed, s.length, _PURPOSE)
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (depth,)))(keys)
    kept = (drawn < chance) & (jnp.arange(depth) < num_drafts(s, drafts)[:, None])
    accepted = jnp.cumprod(kept, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    token = jnp.take_along_axis(argmax(logits), accepted[:, None], axis=1)[:, 0]
    # The barrier keeps the compiler from leaving out the verification whose verdict nobody reads.
    return jax.lax.optimization_barrier((Verdict(accepted, token), real))[0]
