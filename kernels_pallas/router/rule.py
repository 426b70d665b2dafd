"""How experts are chosen."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Sizes of the choice (arXiv 2412.19437, section 2.1.2; arXiv 2405.04434, section 2.1.3).

    Attributes:
        chosen: experts per token.
        groups: equal parts that the experts are divided into.
        kept: groups that a token may choose from: their best two experts add up to most.
        normalise: divide a token's weights by their sum.
        scaling: factor of the weights.
    """

    chosen: int
    groups: int = 1
    kept: int = 1
    normalise: bool = True
    scaling: float = 1.0
