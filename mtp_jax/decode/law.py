"""Forced acceptance, for benchmarks: a law, not the model, says how many drafts a step keeps.

Engines are compared at one acceptance length, so that none gains by a drafter of its own. The text means
nothing; everything that is made with a law says SYNTHETIC. No jax here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mtp_jax.errors import ConfigError

MARK = "SYNTHETIC"

Acceptance = int | float | str | Sequence[float]
"""An acceptance length, the name of a golden one, or shares of steps that keep each draft."""

# Acceptance lengths at 1, 2, ... drafts that InferenceX has its submissions force: of real drafts, for the
# coding prompts of SPEED-Bench (arXiv 2604.09557) at temperature 1, by vLLM on B300; with thinking unless the
# name says no. Each is from a file of github.com/SemiAnalysisAI/InferenceX, golden_al_distribution.
GOLDEN: Mapping[str, tuple[float, ...]] = {
    # glm5.2_mtp.yaml
    "glm-5.2": (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06),
    # dsv4_mtp.yaml
    "v4-pro": (1.79, 2.27, 2.49, 2.54, 2.55),
    "v4-pro-no-thinking": (1.92, 2.61, 2.97, 3.00, 3.10),
    # dsv4_dspark_probabilistic.yaml
    "v4-pro-dspark": (1.86, 2.55, 3.08, 3.43, 3.74, 3.82, 3.86, 3.75),
    "v4-pro-dspark-no-thinking": (1.93, 2.76, 3.47, 4.10, 4.52, 4.87, 4.94, 4.94),
    # dsv4_0813_dspark_probabilistic.yaml
    "v4-pro-0813": (1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47),
    "v4-pro-0813-no-thinking": (1.94, 2.81, 3.58, 4.17, 4.74, 5.12, 5.24, 4.95),
    # kimik2.5_eagle3.yaml
    "kimi-k2.5": (1.83, 2.43, 2.88, 3.24, 3.46),
    # kimik3_dspark_probabilistic_sample_method_block_rejection_sample_method.yaml, kimik3_dspark.yaml
    "kimi-k3": (1.85, 2.51, 3.00, 3.36, 3.62, 3.75, 3.84, 4.00),
    "kimi-k3-greedy": (1.84, 2.45, 2.87, 3.22, 3.44),
    # qwen3.5_mtp.yaml
    "qwen3.5": (1.93, 2.73, 3.39, 3.97, 4.41),
}


@dataclass(frozen=True)
class Law:
    """How many drafts a step keeps.

    Attributes:
        shares: the share of steps that keeps each draft, from the first on; it never rises.
    """

    shares: tuple[float, ...]

    @classmethod
    def of(cls, asked: Acceptance, drafts: int) -> "Law":
        """The law for steps of ``drafts`` drafts. Raises ConfigError.

        A length L counts the model's own token. Its law has the least variance: with L - 1 = n + f, n drafts
        are kept always and one more in a share f of the steps, as in vLLM, SGLang, TensorRT-LLM and ATOM.
        Shares of fewer drafts than there are: the further drafts are never kept.
        """
        plain = isinstance(asked, str | int | float)
        told = f"synthetic_acceptance = {asked if plain else ','.join(map(str, asked))}"
        most = f"num_speculative_tokens = {drafts}"
        if not drafts:
            raise ConfigError(f"{told}; expected drafts to keep, but {most}; raise that, or leave it out")
        length = _golden(asked, drafts) if isinstance(asked, str) else asked
        if isinstance(length, int | float):
            if not 1 <= length <= 1 + drafts:
                raise ConfigError(
                    f"{told}; expected a length from 1, the model's own token, to {1 + drafts}, as {most}"
                )
            return cls(tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(drafts)))
        shares = tuple(length)
        if not shares or not all(isinstance(s, int | float) and 0 <= s <= 1 for s in shares):
            raise ConfigError(f"{told}; expected shares from 0 to 1, such as 0.8,0.6,0.4")
        if len(shares) > drafts:
            raise ConfigError(f"{told}; expected {drafts} shares at most, as {most}")
        if any(later > earlier for earlier, later in pairwise(shares)):
            raise ConfigError(
                f"{told}; expected shares that do not rise: a step that keeps a draft has kept all before it"
            )
        return cls((*map(float, shares), *(0.0,) * (drafts - len(shares))))

    @property
    def length(self) -> float:
        """The mean of tokens per step of a row, the model's own among them."""
        return 1 + sum(self.shares)

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.4g}" for share in self.shares)
        return f"{MARK} acceptance: length {self.length:.4g} (drafts kept in shares of {shares} of the steps)"


def golden_rates(name: str) -> tuple[float, ...]:
    """The chance of each draft, once all before it are kept, with which every depth has its golden length.

    Raises KeyError for a name that is not in ``GOLDEN``.
    """
    lengths = (1.0, *GOLDEN[name])
    shares = [1.0, *(max(later - earlier, 0.0) for earlier, later in pairwise(lengths))]
    return tuple(min(later / earlier, 1.0) if earlier else 0.0 for earlier, later in pairwise(shares))


def _golden(name: str, drafts: int) -> float:
    """The golden length of a name. Raises ConfigError."""
    lengths = GOLDEN.get(name, ())
    if not lengths:
        raise ConfigError(f"synthetic_acceptance = {name}; expected a number, or one of {', '.join(GOLDEN)}")
    if drafts > len(lengths):
        raise ConfigError(
            f"synthetic_acceptance = {name}, which has lengths for up to {len(lengths)} drafts; "
            f"num_speculative_tokens = {drafts}: lower it, or give a length"
        )
    return lengths[drafts - 1]
