"""Parts of a ``ModelConfig``: scalings of rope, hyper-connections, draft heads; checks of their values."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject, is_number

Trees = Literal["grown", "given"]
"""Trees whose nodes are the best of all that a drafter finds, or a tree of nodes that the user names."""


Scoring = Literal["sigmoid", "sqrtsoftplus"]
"""The function that makes scores of a router's logits."""
MOST = 2**16
"""The limit of counts: each layer, head or expert has tensors of its own."""

MOST_SIZE = 2**31 - 1
"""The limit of sizes: ids and positions on a device are int32."""


def is_whole(value: object, least: int) -> bool:
    """Whether a value is an integer of at least ``least``; true and false are none."""
    return type(value) is int and value >= least


def check_size(name: str, value: Any, or_else: str = "") -> None:
    """Raises ConfigError with the key of config.json for a value that is no size."""
    if not is_whole(value, 1):
        raise ConfigError(f"{name} = {value!r:.200}; expected a positive integer{or_else}")
    if value > MOST_SIZE:
        raise ConfigError(f"{name} = {value!r:.200}; expected at most {MOST_SIZE:,}")


def check_even(name: str, value: int) -> None:
    """Raises ConfigError with the key of config.json for an odd number."""
    if value % 2:
        raise ConfigError(f"{name} = {value!r:.200}; expected an even number")


def check_part(part: Any, sizes: Iterable[str], flags: Iterable[str] = ()) -> None:
    """Check the types of fields, and the range of sizes. Raises ConfigError with the key of config.json."""
    for name in sizes:
        value = getattr(part, name)
        if type(value) is not int or not 1 <= value <= MOST:
            raise ConfigError(
                f"{part.KEYS[name]} = {value!r:.80}; expected a whole number from 1 to {MOST:,}"
            )
    for name in flags:
        if type(value := getattr(part, name)) is not bool:
            raise ConfigError(f"{part.KEYS[name]} = {value!r:.80}; expected true or false")


@dataclass(frozen=True)
class RopeScaling(ABC):
    """Rope for contexts longer than a model was first trained for, in the names of ``rope_scaling``.

    A share of each frequency is divided by ``factor``.

    Attributes:
        rope_type: its value in config.json.
    """

    rope_type: ClassVar[str]

    factor: float
    original_max_position_embeddings: int

    @abstractmethod
    def shares(self, i: Any, inv: Any, theta: float) -> Any:
        """The share of each frequency that ``factor`` divides: an array of numbers from 0 to 1.

        i: number of each frequency. inv: the frequencies. theta: their base.
        """

    @property
    def rope_factor(self) -> float:
        """The factor of cos and sin."""
        return 1.0

    @property
    def softmax_factor(self) -> float:
        """The factor of the softmax scale."""
        return 1.0

    @property
    def keys(self) -> JsonObject:
        """``rope_scaling`` of config.json."""
        return {"rope_type": self.rope_type, **asdict(self)}

    def check(self, theta: float) -> None:
        """Raises ConfigError for values that do not go together, or with the base of rope's frequencies."""
        original = self.original_max_position_embeddings
        if not (is_whole(original, 1) and is_number(original)):
            raise ConfigError(f"rope_scaling = {self}; expected whole original_max_position_embeddings >= 1")


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's scaling: long waves are divided, short waves are kept, waves between are blended.

    Attributes:
        low_freq_factor: number of times that a wave fits the original context, below which it is divided.
        high_freq_factor: number of times above which it is kept.
    """

    rope_type = "llama3"

    low_freq_factor: float
    high_freq_factor: float

    def shares(self, i: Any, inv: Any, theta: float) -> Any:
        """See ``RopeScaling``."""
        times = inv * (self.original_max_position_embeddings / (2 * math.pi))
        kept = (times - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return 1 - kept.clip(0, 1)

    def check(self, theta: float) -> None:
        """See ``RopeScaling``."""
        super().check(theta)
        if not (self.factor >= 1 and self.high_freq_factor > self.low_freq_factor > 0):
            raise ConfigError(
                f"rope_scaling = {self}; expected factor >= 1 and high_freq_factor > low_freq_factor > 0"
            )


@dataclass(frozen=True)
class YarnConfig(RopeScaling):
    """YaRN context extension (arXiv 2309.00071)."""

    rope_type = "yarn"

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True  # the blend begins and ends at whole channels

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rope_factor(self) -> float:
        """See ``RopeScaling``."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """See ``RopeScaling``."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @property
    def keys(self) -> JsonObject:
        """See ``RopeScaling``; in the dialect of the releases."""
        said = {k: v for k, v in asdict(self).items() if v is not None}
        if self.truncate:
            del said["truncate"]
        return {"type": self.rope_type, **said}

    def shares(self, i: Any, inv: Any, theta: float) -> Any:
        """See ``RopeScaling``; section 3.2 of the source."""
        dims = 2 * len(inv)

        def dim_of(rotations: float) -> float:
            wavelength = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return dims * math.log(wavelength) / (2 * math.log(theta))

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
        low, high = max(low, 0), min(high, dims - 1)
        return ((i - low) / max(high - low, 0.001)).clip(0, 1)

    def check(self, theta: float) -> None:
        """See ``RopeScaling``."""
        if not (self.factor >= 1 and self.beta_fast >= self.beta_slow > 0):
            raise ConfigError(f"rope_scaling = {self}; expected factor >= 1 and beta_fast >= beta_slow > 0")
        if theta <= 1:
            raise ConfigError(f"rope_theta = {theta!r:.200}; expected more than 1 with YaRN")
        super().check(theta)


@dataclass(frozen=True)
class HyperConfig:
    """Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams side by side.

    Attributes:
        streams: number of streams.
        iterations: number of normalisations of the matrix that mixes them, columns and rows in turn.
        eps: the least sum and gate, added to them.
    """

    streams: int
    iterations: int
    eps: float

    KEYS: ClassVar[Mapping[str, str]] = {
        "streams": "hc_mult",
        "iterations": "hc_sinkhorn_iters",
        "eps": "hc_eps",
    }
    """Keys of config.json by field."""

    def check(self) -> None:
        """Raises ConfigError for impossible values."""
        check_part(self, ("streams", "iterations"))
        if not (is_number(self.eps) and self.eps > 0):
            raise ConfigError(f"hc_eps = {self.eps!r:.80}; expected a positive number")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A draft head beside a trunk; ``head.DraftHead`` asks it more, ``heads`` has kinds.

    Attributes:
        taps: residual streams of the trunk that the head reads, k the stream after k layers.
        maps: whether the head has a table of its tokens' ids (``d2t``).
        embeds: whether the head has an embedding of its own.
        trees: the trees that it can make.
        inside: whether its tensors are in the model's own folder.
    """

    trees: ClassVar[Trees | None] = None
    inside: ClassVar[bool] = False

    taps: tuple[int, ...]
    maps: bool = False
    embeds: bool = False

    @property
    def name(self) -> str:
        """Its kind, for people."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """A noun phrase for it, for people."""
        return f"a {self.name} head"

    @property
    def keys(self) -> JsonObject:
        """Keys of the model's config.json that describe it; none of a head with a folder of its own."""
        return {}

    @property
    def most_drafts(self) -> int | None:
        """The most drafts of a chain; None: any number, by recursion."""
        return None
