"""The options of tuning a draft head."""

from dataclasses import dataclass
from typing import Literal, get_args

from mtp_jax.errors import ConfigError
from mtp_jax.options import check, documented, option

Fresh = Literal["nextn", "eagle3"]
Objective = Literal["kl", "tv", "text"]


@documented
@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Raises ConfigError for a value out of range."""

    fresh: Fresh | None = option(
        None,
        "begin with a random head of this kind: a NextN layer, or an EAGLE-3 head with the trunk's attention",
        choices=get_args(Fresh),
        unset="the model's NextN layers, or the head of draft_model",
        excludes={"draft_model": "one head is begun, the other is there"},
    )
    draft_vocab: int | None = option(
        None,
        "tokens that a fresh EAGLE-3 head drafts, the commonest of the answers; verification has them all",
        kind=int,
        low=2,
        unset="the whole vocabulary",
        metavar="N",
    )
    draft_mlp: int | None = option(
        None,
        "width of a fresh EAGLE-3 head's MLP",
        kind=int,
        low=1,
        unset="the model's dense width",
        metavar="N",
    )
    own_prompts: int | None = option(
        None,
        "prompts that the model writes itself, given the beginning of a user's turn, in the place of a file",
        kind=int,
        low=2,
        high=10**7,
        unset="the prompts of a file",
        metavar="N",
    )
    objective: Objective = option(
        "kl",
        "distance of the drafts' distribution from the trunk's: the Kullback-Leibler divergence, or the "
        "total variation, which is the rate of rejection; text: the answers' own tokens, which lowers "
        "acceptance",
        choices=get_args(Objective),
    )
    decay: float | None = option(
        None,
        "weight of each draft in the objective over that of the draft before it",
        kind=float,
        low=0,
        above=True,
        high=1,
        unset="0.6; the weights of a whole block fall by 0.6^3",
        metavar="F",
    )
    steps: int = option(1000, "optimiser steps", low=1, high=10**7, metavar="N")
    window: int = option(512, "tokens of a window, from each of which drafts follow", low=8, metavar="N")
    windows: int = option(8, "windows in an optimiser step", low=1, metavar="N")
    learning_rate: float = option(1e-3, "the highest rate", low=0, above=True, high=1, metavar="F")
    optimizer: Literal["muon", "adamw"] = option(
        "muon", "how matrices learn; norms and tables learn by AdamW", choices=("muon", "adamw")
    )
    products: Literal["float32", "bfloat16"] = option(
        "float32", "factors of products; parameters stay in float32", choices=("float32", "bfloat16")
    )
    held_out: int = option(
        16, "texts of the file that are not learned, to measure acceptance with", low=1, metavar="N"
    )
    seed: int = option(0, "seed of windows, answers and a random head", low=0, high=2**31 - 1, metavar="N")
    checkpoint_minutes: float = option(8.0, "minutes between checkpoints", low=0, metavar="M")

    def __post_init__(self) -> None:
        check(self, ConfigError)
        for name in ("draft_vocab", "draft_mlp"):
            if (value := getattr(self, name)) and self.fresh != "eagle3":
                raise ConfigError(f"{name}={value} without fresh=eagle3; expected both, or neither")

    def decay_of(self, drafts: int, whole_block: bool) -> float:
        """The weight of each draft over that of the draft before it (FastMTP, arXiv 2509.18362: 0.6)."""
        return self.decay or 0.6 ** (3 / drafts if whole_block else 1)
