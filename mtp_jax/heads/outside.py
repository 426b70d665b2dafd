"""Drafters and kinds of heads from outside: a class, or "package.module:name" of one."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mtp_jax.errors import ConfigError
from mtp_jax.heads.kinds import add
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import DraftHead

Maker = Callable[..., Any]
"""Makes a drafter of a model's configuration: a class, or a function."""


@dataclass(frozen=True, kw_only=True)
class Outside(DraftHead):
    """A drafter from outside in the place of the model's own. It has no parameters beside the model's.

    Attributes:
        make: makes it of the model's configuration.
    """

    taps: tuple[int, ...] = ()
    make: Maker

    @property
    def name(self) -> str:
        """The name of its class."""
        return getattr(self.make, "__name__", type(self.make).__name__)

    @property
    def title(self) -> str:
        """A drafter, no head."""
        return f"the drafter {self.name}"

    @property
    def drafts(self) -> Maker:
        """Its class."""
        return self.make

    @classmethod
    def reads(cls, raw: JsonObject, tensors: Collection[str]) -> bool:
        """No folder has it."""
        return False

    def specs(self, trunk: ModelConfig) -> None:
        """No parameters."""


def taken(drafter: Maker | str | None) -> Outside | None:
    """The configuration of a drafter from outside; None of a kind of head, which ``kinds`` knows from now on.

    Raises ConfigError.
    """
    found = imported(drafter) if isinstance(drafter, str) else drafter
    if isinstance(found, type) and issubclass(found, DraftHead):
        add(found)
        return None
    if found is not None and not callable(found):
        raise ConfigError(f"drafter = {found!r:.200}; expected a class or a function that makes a drafter")
    return None if found is None else Outside(make=found)


def taken_kind(drafter: Maker | str | None) -> None:
    """Take a kind of head, for a command that drafts nothing. Raises ConfigError for anything else."""
    if taken(drafter) is not None:
        raise ConfigError(
            f"drafter = {drafter!r:.200} makes drafters without parameters, of which there is nothing to "
            "count, describe or tune; expected a kind of head, a subclass of mtp_jax.model.head.DraftHead"
        )


def imported(reference: str) -> Maker:
    """The class or the function that "package.module:name" names. Raises ConfigError."""
    module, _, name = reference.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"drafter = {reference!r:.200}: {e}; expected package.module:name") from e
    if not callable(found):
        raise ConfigError(f"drafter = {reference!r:.200} is a {type(found).__name__}; expected a class")
    return found
