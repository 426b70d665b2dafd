"""DeepSeek-V4's draft layers, ``mtp.{k}.*``: MTP layers or DSpark stages, of which their tensors tell.

config.json does not: ``num_nextn_predict_layers`` is 1 beside either.
"""

from collections.abc import Collection
from pathlib import Path

from mtp_jax.errors import CheckpointError, shortlist
from mtp_jax.model.layer_names import mtp_layer_of

STAGES = "DSpark stages"

_OF_MTP = "enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight"
# The first stage makes the context, the last chooses drafts; stages between them are plain blocks.
_OF_FIRST = "main_proj.weight", "main_norm.weight"
_OF_LAST = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"


def mtp_layers(names: Collection[str], folder: Path) -> tuple[str | None, list[str]]:
    """``STAGES`` or None, and the names of the draft layers' tensors.

    Raises CheckpointError for a layer that is missing, and for layers of two kinds.
    """
    tensors = [name for name in names if mtp_layer_of(name) is not None]
    there = {*tensors}
    numbers = sorted({mtp_layer_of(n) or 0 for n in tensors})
    count = len(numbers)
    if absent := [k for k in range(count) if k not in numbers]:
        raise CheckpointError(
            f"{folder} has {count} draft layers, mtp.{shortlist(map(str, numbers))}; "
            f"mtp.{absent[0]} is missing"
        )
    of_mtp, of_stages = (
        [f"mtp.{k}.{name}" for k in numbers for name in marks if f"mtp.{k}.{name}" in there]
        for marks in (_OF_MTP, _OF_FIRST + _OF_LAST)
    )
    if of_mtp and of_stages:
        raise CheckpointError(
            f"{folder}: mtp.* is half MTP, half DSpark: {len(of_mtp)} tensors of MTP layers "
            f"({shortlist(of_mtp)}) and {len(of_stages)} of DSpark stages ({shortlist(of_stages)}); expected "
            "one kind"
        )
    if not of_stages:
        return None, tensors
    ends = (0, _OF_FIRST), (count - 1, (*_OF_LAST, "norm.weight"))
    lacking = [f"mtp.{k}.{name}" for k, marks in ends for name in marks if f"mtp.{k}.{name}" not in there]
    if lacking:
        raise CheckpointError(
            f"{folder} has {count} DSpark stages, mtp.0 to mtp.{count - 1}, without "
            f"{shortlist(lacking)}; expected main_proj in the first and markov_head in the last: a stage is "
            "missing"
        )
    return STAGES, tensors
