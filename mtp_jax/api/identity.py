"""The identity of weights in memory: digests of every byte of the files or arrays that they are from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mtp_jax.checkpoint.digest import beside, digest, folder_digest, tensors_of
from mtp_jax.checkpoint.folder import Folder
from mtp_jax.model.params import Params


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


class Identity:
    """The digests of the weights in memory, which change with them. Any thread may ask."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Starts to read the folders that the weights are from, beside everything else."""
        self._digests = beside(partial(_of_folders, folders))
        self._replaced: Digests | None = None
        self._whole = True

    def wait(self) -> None:
        """Wait until the digests are known. Raises CheckpointError."""
        self._digests.result()

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
    weights, *drafts = (folder_digest(folder, weights=True) for folder in folders)
    return Digests(weights, drafts[0] if drafts else weights)
