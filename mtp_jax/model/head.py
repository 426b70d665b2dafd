"""A draft head beside a trunk, of any kind, without jax: the questions that it answers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.config_parts import HeadConfig
from mtp_jax.model.layer_specs import Layer, Weight
from mtp_jax.model.spec import Spec

Captures = Literal["outputs", "inputs"]
"""A list of taps in a draft head's config.json counts outputs of layers, or their inputs."""


@dataclass(frozen=True)
class DraftFolder:
    """A folder with NextN layers, or with a draft head, beside a model.

    Attributes:
        path: the folder.
        captures: the meaning of a head's list of taps; None: the usual one of its kind.
    """

    path: str | Path
    captures: Captures | None = None

    @classmethod
    def of(
        cls, path: "str | Path | DraftFolder | None", captures: Captures | None = None
    ) -> "DraftFolder | None":
        """The folder with this path; None without one. Raises ConfigError for captures of none."""
        if path is None and captures is not None:
            raise ConfigError(f"draft_captures = {captures!r} without a draft_model that is a head")
        return path if path is None or isinstance(path, DraftFolder) else cls(path, captures)


DRAFT_HEAD = "draft_head"
"""The prefix, in names here, of the tensors of a draft head."""


class StoredTensor(Protocol):
    """A tensor of a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        ...


class HeadTree(Protocol):
    """The parameters of a head, a class of ``spec.parameters``: the parts that its cost is counted from."""

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """Its decoder blocks."""
        ...

    @property
    def merging(self) -> object:
        """The parameters beside its blocks that a draft reads, without tables."""
        ...

    @property
    def entries(self) -> object:
        """The parameters that make entries of its cache."""
        ...

    @property
    def head(self) -> Weight:
        """The table behind its logits; None: the trunk's."""
        ...


@dataclass(frozen=True, kw_only=True)
class DraftHead(HeadConfig):
    """The configuration of a draft head.

    Attributes:
        drafts: the function, or the class, that makes its drafter of the trunk's configuration, and of the
            shape of its trees if they are asked for; or its "module:name", which is imported when an engine
            is made.
    """

    drafts: ClassVar[str | Callable[..., object]]

    @classmethod
    def reads(cls, raw: JsonObject, tensors: Mapping[str, StoredTensor]) -> bool:
        """Whether a folder with this config.json and these tensors has a head of this kind."""
        raise NotImplementedError

    @classmethod
    def read(
        cls,
        raw: JsonObject,
        trunk: ModelConfig,
        tensors: Mapping[str, StoredTensor],
        captures: Captures | None,
    ) -> Self:
        """The head that config.json and its tensors describe.

        tensors: the folder's by their names here, behind ``DRAFT_HEAD``. captures: the meaning of a list of
        taps; None: this kind's own. Raises ConfigError for a head that does not fit the trunk, or is not
        supported.
        """
        raise NotImplementedError

    @classmethod
    def names(cls, names: Collection[str]) -> dict[str, str]:
        """The names here, without ``DRAFT_HEAD``, of a folder's tensors."""
        return {name: name for name in names}

    def specs(self, trunk: ModelConfig) -> HeadTree | None:
        """Its parameters; None: it has none."""
        raise NotImplementedError

    @property
    def sizes(self) -> ModelConfig | None:
        """Its decoder layers; None: it has none."""
        return None

    @property
    def rows(self) -> int | None:
        """Rows of the one pass that makes all drafts of a slot; None: each draft takes a pass of one row."""
        return None

    @property
    def described(self) -> str:
        """The head, for people."""
        sizes = self.sizes
        layers = "" if sizes is None else f", {self.layers_named(sizes)}, {sizes.vocab_size:,} tokens"
        taps = f"; reads the stream after layers {', '.join(map(str, self.taps))}" if self.taps else ""
        return f"{self.name}{layers}{taps}"

    def layers_named(self, sizes: ModelConfig) -> str:
        """Its layers, for people."""
        return sizes.attention.short

    @property
    def untuned(self) -> str | None:
        """The reason why ``tune-head`` cannot tune it; None: it can."""
        return f"{self.name} heads are not tuned here; name NextN layers, or a head of another kind"


def head_of(cfg: ModelConfig) -> DraftHead | None:
    """The draft head beside a model; None without."""
    return cfg.drafter if isinstance(cfg.drafter, DraftHead) else None


def plain(name: str, *shape: int) -> Spec:
    """A tensor of a head as it is, whole on every device. name: without ``DRAFT_HEAD``."""
    return Spec(shape, (None,) * len(shape), f"{DRAFT_HEAD}.{name}", shape)
