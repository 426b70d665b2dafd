"""DeepSeek-V4's draft layers, ``mtp.{k}.*``: MTP layers or DSpark stages, of which their tensors tell.

config.json does not: ``num_nextn_predict_layers`` is 1 beside either.
"""

from mtp_jax.checkpoint.folder import Folder, shortlist
from mtp_jax.checkpoint.layer_names import mtp_layer_of
from mtp_jax.checkpoint.safetensors_file import Tensor
from mtp_jax.errors import CheckpointError

STAGES = "DSpark stages"

_OF_MTP = "enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight"
# The first stage makes the context, the last chooses drafts; stages between them are plain blocks.
_OF_FIRST = "main_proj.weight", "main_norm.weight"
_OF_LAST = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"


def layers(folder: Folder) -> tuple[str | None, dict[str, Tensor]]:
    """``STAGES`` or None, and the tensors of the draft layers.

    Raises CheckpointError for a layer that is missing, and for layers of two kinds.
    """
    tensors = {n: t for n, t in folder.tensors.items() if mtp_layer_of(n) is not None}
    numbers = sorted({mtp_layer_of(n) or 0 for n in tensors})
    count = len(numbers)
    if absent := [k for k in range(count) if k not in numbers]:
        raise CheckpointError(
            f"{folder.path} has {count} draft layers, mtp.{shortlist(map(str, numbers))}; "
            f"mtp.{absent[0]} is missing"
        )
    of_mtp, of_stages = (
        [f"mtp.{k}.{name}" for k in numbers for name in marks if f"mtp.{k}.{name}" in tensors]
        for marks in (_OF_MTP, _OF_FIRST + _OF_LAST)
    )
    if of_mtp and of_stages:
        raise CheckpointError(
            f"{folder.path}: mtp.* is half MTP, half DSpark: {len(of_mtp)} tensors of MTP layers "
            f"({shortlist(of_mtp)}) and {len(of_stages)} of DSpark stages ({shortlist(of_stages)}); expected "
            "one kind"
        )
    if not of_stages:
        return None, tensors
    ends = (0, _OF_FIRST), (count - 1, (*_OF_LAST, "norm.weight"))
    lacking = [f"mtp.{k}.{name}" for k, marks in ends for name in marks if f"mtp.{k}.{name}" not in tensors]
    if lacking:
        raise CheckpointError(
            f"{folder.path} has {count} DSpark stages, mtp.0 to mtp.{count - 1}, without "
            f"{shortlist(lacking)}; expected main_proj in the first and markov_head in the last: a stage is "
            "missing"
        )
    return STAGES, tensors
