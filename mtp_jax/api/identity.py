"""The identity of weights in memory: digests of every byte of the files or arrays that they are from."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from mtp_jax.api.compile_cache import compile_cache
from mtp_jax.checkpoint.digest import beside, digest, tensors_of
from mtp_jax.checkpoint.folder import Folder
from mtp_jax.checkpoint.kept_digest import weights_digest
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import CheckpointError
from mtp_jax.hosts.hello import versions
from mtp_jax.machine import program_folder
from mtp_jax.model.backend import Backend
from mtp_jax.model.device import platform
from mtp_jax.model.params import Params

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Digests:
    """Digests of all tensors of a model's folder, and of the folder that has its drafter, often the same.

    drafts: None of an update that leaves the drafter as it is.
    """

    weights: str
    drafts: str | None


@dataclass(frozen=True)
class NewWeights:
    """Parameters on the host, to replace a model's.

    Attributes:
        params: the parameters, without the drafter's if these stay.
        digests: digests of their tensors; None where no hand-over and no host compares them.
    """

    params: Params
    digests: Digests | None = None


def facts_of_pages(engine: Engine, weights: object) -> tuple[object, ...]:
    """Facts that pages depend on besides tokens and their own form: model, name of the weights, cache.

    weights: all bytes of the weights, digested.
    """
    config = engine.config
    of_weights = weights, engine.weight_version, config.dtype
    return engine.cfg, of_weights, config.page_size, config.suffix_drafts


def identified(engine: Engine, identify: Callable[[], "Identity"], on: Backend | None) -> Callable[[], None]:
    """Tell an engine's tier of files whose pages it has. Returns a function that waits until it knows.

    Answers are to be as after computed pages, so pages of other versions, devices, meshes and kernels, which
    decide how sums are rounded, lie in other files. on: the backend; None: the model is simulated.
    """
    files = engine.tier.files if engine.tier else None
    if files is None:
        return lambda: None
    identity, here = identify(), (versions(), engine.config.kernels, on and _place(on))

    def facts() -> str | None:
        weights = identity.known()
        return None if weights is None else repr((here, facts_of_pages(engine, weights)))

    def wait() -> None:
        try:
            identity.wait()
        except CheckpointError as error:
            _LOG.warning("file_cache is not used, as the weights cannot be read again: %s", error)

    files.identity = facts
    return wait


def _place(on: Backend) -> tuple[object, ...]:
    """The devices that pages are computed on."""
    kind = program_folder() if platform() == "cpu" else jax.devices()[0].device_kind
    return kind, on.mesh and tuple(on.mesh.shape.items())


class Identity:
    """The digests of the weights in memory, which change with them. Any thread may ask."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Starts to read the folders that the weights are from, unless digests are kept of their files."""
        self._digests = beside(partial(_of_folders, folders))
        self._replaced: Digests | None = None
        self._whole = True

    def wait(self) -> None:
        """Wait until the digests are known. Raises CheckpointError."""
        self._digests.result()

    def known(self) -> Digests | None:
        """The digests, where they are known by now; None, too, as ``now`` says."""
        done = self._digests.done() and not self._digests.exception()
        return self.now() if done else None

    def now(self) -> Digests | None:
        """The digests; None while weights are being replaced, or if that has failed."""
        return (self._replaced or self._digests.result()) if self._whole else None

    @contextmanager
    def replacing(self, new: Digests) -> Iterator[None]:
        """Replace the weights meanwhile; other threads see no digests."""
        before = self._replaced or self._digests.result()
        self._whole = False
        yield
        self._replaced = Digests(new.weights, new.drafts or before.drafts)
        self._whole = True


def digests_of(folder: Folder, draft: Folder | None, keep_draft: bool) -> Digests:
    """Digests of an update. draft: the folder of its drafter; None: it is in ``folder``, or stays."""
    weights = digest(tensors_of(folder))
    drafts = weights if draft is None else digest(tensors_of(draft))
    return Digests(weights, None if keep_draft else drafts)


def _of_folders(folders: Sequence[Path]) -> Digests:
    weights, *drafts = (weights_digest(folder, compile_cache()) for folder in folders)
    return Digests(weights, drafts[0] if drafts else weights)
