"""An LLM's memory on its devices: weights and a cache, which can be given back and replaced.

update: files or arrays -> the host, all checked -> in the place of the old ones, array by array
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mtp_jax.api.identity import Identity, NewWeights, digests_of
from mtp_jax.checkpoint.folder import open_folder
from mtp_jax.checkpoint.update import WeightSource, open_source, read_update
from mtp_jax.decode.launches import (
    AllocateCache,
    DropWeights,
    PutWeights,
    ReleaseCache,
    RestoreWeights,
    WeightPart,
)
from mtp_jax.decode.weights import pieces
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import ConfigError, EngineStopped, RequestError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params, shapes

Tag = WeightPart | Literal["cache"]
"""Parts of memory that can be released: the trunk's weights, the drafter's, the cache."""

_TAGS: tuple[Tag, ...] = *get_args(WeightPart), "cache"


@dataclass(frozen=True)
class WeightUpdate:
    """The result of an update of the weights.

    Attributes:
        weight_version: the new one.
        acceptance_before: acceptance length of the probe's prompts with the old weights; None: the model does
            not draft, acceptance is forced, there was no prompt, or memory was released. 0.0: a completion
            failed because the model's numbers were not finite.
        acceptance_after: the acceptance length with the new weights.
    """

    weight_version: str
    acceptance_before: float | None
    acceptance_after: float | None


class DeviceMemory:
    """The parameters of one model, and the cache of its engine. The runner of the engine has both.

    Attributes:
        shapes: shapes of the parameters.
        released: parts that are not on the devices.
    """

    _identity: Identity | None = None
    _updates = 0

    def __init__(self, params: Params) -> None:
        self.shapes, self.released = shapes(params), list[Tag]()
        self._known: list[Tag] = [tag for tag in _TAGS if tag != "draft" or params.can_draft]
        self._kept = set[Tag]()  # released parts that the hosts have copies of

    def identify(self, folders: Sequence[Path]) -> Identity:
        """The identity of the weights, now and after updates. folders: they were loaded from these.

        Raises ConfigError for weights that were updated before anybody asked.
        """
        if self._identity is None:
            if self._updates:
                raise ConfigError(
                    "the weights were updated before their identity was asked for; make the Handover before "
                    "the first update"
                )
            self._identity = Identity(folders)
        return self._identity

    def read(
        self,
        cfg: ModelConfig,
        dtype: str,
        source: WeightSource,
        draft_model: str | Path | None,
        keep_draft: bool,
    ) -> NewWeights:
        """Read and check new weights, see ``read_update``; with digests if the weights' identity is known."""
        folder = open_source(source)
        draft = None if draft_model is None else open_folder(draft_model)
        digests = self._identity and digests_of(folder, draft, keep_draft)
        params = read_update(cfg, self.shapes, folder, draft, dtype=dtype, keep_draft=keep_draft)
        return NewWeights(params, digests)

    def tags(self, asked: Sequence[Tag] | None = None) -> list[Tag]:
        """Check a list of parts. None: all parts that can be released. Raises ConfigError."""
        known = self._known
        if asked is None:
            return list(known)
        if isinstance(asked, str) or not asked or any(tag not in known for tag in asked):
            raise ConfigError(f"tags = {asked!r:.80}; expected a list of {', '.join(map(repr, known))}")
        return [tag for tag in known if tag in asked]

    def check(self) -> None:
        """Raises EngineStopped while anything is released."""
        if self.released:
            raise EngineStopped(
                f"the memory of {', '.join(self.released)} is released; resume it, or update the weights"
            )

    def release(self, engine: Engine, tags: Sequence[Tag], backup: bool) -> None:
        """Release these parts. backup: keep a copy of weights in the host's memory."""
        engine.sleep()
        for tag in tags:
            if tag in self.released:
                continue
            if tag == "cache":
                engine.flush_prefix_cache()
                engine.runner.do(ReleaseCache())
            else:
                engine.runner.do(DropWeights(tag, backup))
                self._kept |= {tag} if backup else set()
            self.released.append(tag)

    def resume(self, engine: Engine, tags: Sequence[Tag]) -> None:
        """Put these parts back. Raises RequestError for weights without a copy, ConfigError."""
        wanted: list[Tag] = [tag for tag in tags if tag in self.released]
        if gone := [tag for tag in wanted if tag != "cache" and tag not in self._kept]:
            raise RequestError(
                f"{', '.join(gone)}: released without a backup; update the weights to bring them back"
            )
        for tag in wanted:
            if tag == "cache":
                engine.runner.do(AllocateCache())
            else:
                engine.runner.do(RestoreWeights(tag))
                self._kept.remove(tag)
            self.released.remove(tag)
        self._wake(engine)

    def replace(self, engine: Engine, new: NewWeights, weight_version: str | None) -> None:
        """Replace the parameters, released or not. weight_version: None: the count of updates.

        Raises ConfigError for weights that were read before anybody asked for their identity.
        """
        if self._identity and not new.digests:
            raise ConfigError("the new weights were read before the Handover was made; read them again")
        with self._identity.replacing(new.digests) if self._identity and new.digests else nullcontext():
            self._place(engine, "weights", new.params)
            if new.params.can_draft:
                self._place(engine, "draft", new.params)
            self._updates += 1
            engine.new_weights(str(self._updates) if weight_version is None else weight_version)
        self._wake(engine)

    def _wake(self, engine: Engine) -> None:
        if not self.released:
            engine.wake()

    def _place(self, engine: Engine, part: WeightPart, new: Params) -> None:
        """Place array by array, behind the end of the old arrays, unless a caller holds these."""
        if part not in self.released:
            self.released.append(part)
        engine.runner.do(DropWeights(part, backup=False))
        self._kept.discard(part)
        for begin, rows in pieces(new, part):
            engine.runner.do(PutWeights(part, begin, rows))
        self.released.remove(part)


class NoWeights(DeviceMemory):
    """The cache of a simulated model."""

    def __init__(self) -> None:
        self.released, self._known = [], list[Tag](["cache"])
