"""The tensors of a draft head's folder, under the names of its parameters."""

import numpy as np

from mtp_jax.checkpoint.folder import Folder
from mtp_jax.checkpoint.formats import IDS
from mtp_jax.checkpoint.safetensors_file import Tensor
from mtp_jax.errors import CheckpointError, shown
from mtp_jax.heads.tables import CHOSEN, OFFSETS
from mtp_jax.model.head import DRAFT_HEAD, DraftHead


def head_tensors(folder: Folder, kind: type[DraftHead]) -> dict[str, Tensor]:
    """The tensors of a head under the names of ``specs``. Raises CheckpointError for two of one name."""
    found: dict[str, Tensor] = {}
    for name, short in kind.names(folder.tensors).items():
        tensor, new = folder.tensors[name], f"{DRAFT_HEAD}.{short}"
        if new in found:
            raise CheckpointError(f"{tensor} is also there as {shown(found[new].name)}; expected one of them")
        found[new] = tensor
    return found


def check_ids(tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Check the tables of the head's tokens, and take out ``t2d``, which says the same as ``d2t``.

    Raises CheckpointError.
    """
    chosen, offsets = tensors.pop(CHOSEN, None), tensors.get(OFFSETS)
    if offsets is None:
        return
    if offsets.dtype not in IDS or len(offsets.shape) != 1:
        raise CheckpointError(
            f"{offsets} is {offsets.dtype} {list(offsets.shape)}; expected a list of {' or '.join(IDS)}"
        )
    ids = np.arange(offsets.shape[0]) + offsets.array()
    wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if wrong.size:
        raise CheckpointError(
            f"{offsets} maps token {wrong[0]} of the head to {ids[wrong[0]]}; expected tokens of "
            f"the model, 0 to {vocabulary - 1}"
        )
    if chosen is not None and set(np.flatnonzero(chosen.array())) != set(ids.tolist()):
        raise CheckpointError(f"{chosen} marks other tokens than {offsets.name} names; expected the same")
