"""Layers in the names of tensors, as releases have them."""

import re
from collections.abc import Iterable

LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")
_ONLY_NEXTN = re.compile(r"model\.(?:layers\.(\d{1,9})\.)?(?:enorm|hnorm|eh_proj|shared_head)\..+")
_MTP = re.compile(r"mtp\.(\d{1,9})\.(.+)")


def layer_of(name: str) -> int | None:
    """The layer number in a tensor's name, None outside the layers."""
    match = LAYER.fullmatch(name)
    return int(match[1]) if match else None


def mtp_layer_of(name: str) -> int | None:
    """The number of the draft layer of DeepSeek-V4 that a tensor belongs to, None outside these layers."""
    match = _MTP.fullmatch(name)
    return int(match[1]) if match else None


def nextn_layers(names: Iterable[str]) -> list[int]:
    """Numbers of the layers with tensors of a NextN layer alone; -1 for such tensors outside the layers."""
    matches = (_ONLY_NEXTN.fullmatch(n) for n in names)
    return sorted({int(m[1] or -1) for m in matches if m})
