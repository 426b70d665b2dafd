"""The rule by which experts are chosen."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """Sizes of the choice (arXiv 2412.19437, section 2.1.2; arXiv 2405.04434, section 2.1.3).

    Attributes:
        chosen: number of experts per token.
        groups: number of equal parts that the experts are divided into.
        kept: number of groups that a token may choose from, by the sums of their two best scores.
        normalise: whether a token's weights are divided by their sum.
        scaling: factor of the weights.
        scoring: function that makes scores of logits; "sqrtsoftplus": the root of softplus (DeepSeek-V4).
    """

    chosen: int
    groups: int = 1
    kept: int = 1
    normalise: bool = True
    scaling: float = 1.0
    scoring: Literal["sigmoid", "sqrtsoftplus"] = "sigmoid"
