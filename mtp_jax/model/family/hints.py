"""Hints where a config.json does not describe a folder's tensors."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mtp_jax.errors import shortlist
from mtp_jax.model.layer_names import nextn_layers


@dataclass(frozen=True)
class TensorNames:
    """Names of a folder's tensors, and names that it lacks."""

    found: Collection[str]
    missing: Collection[str]

    def numbers(self, pattern: str) -> set[int]:
        """Numbers in the names that a pattern with one group matches as a whole."""
        matches = (re.fullmatch(pattern, name) for name in self.found)
        return {int(m[1]) for m in matches if m}

    @property
    def nextn(self) -> set[int]:
        """Numbers of layers with tensors of a NextN layer."""
        return set(nextn_layers(self.found))

    def lacks(self, part: str) -> bool:
        """Whether a name with this part is missing."""
        return any(part in name for name in self.missing)


def contradicts(key: str, got: object, tensors: str) -> str:
    """The hint that a key of config.json says one thing, and the tensors another."""
    return f"config.json says {key} = {got}; {tensors}"


def listed(layers: Sequence[int]) -> str:
    """Numbers of layers as text."""
    return shortlist(map(str, layers)) or "none"
