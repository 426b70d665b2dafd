"""Weights as compressed-tensors names them, under the names of DeepSeek's releases.

    FP8 blocks:  X.weight, X.weight_scale                 ->  X.weight, X.weight_scale_inv, or of V4 X.scale
    MXFP4:       X.weight_packed, X.weight_scale, uint8   ->  X.weight, int8, and X.scale, ue8m0
    NVFP4:       X.weight_packed                          ->  X.weight, uint8, as ModelOpt has it

The bytes are the same. A scale of a whole weight is a row of one number. int4 (``int4``) keeps its names,
which are a release's, and has X.weight_shape.
"""

from collections.abc import Mapping
from dataclasses import replace

from mtp_jax.checkpoint.int4 import PACKED, SCALE, SHAPE
from mtp_jax.checkpoint.nvfp4 import OVER, TIMES
from mtp_jax.checkpoint.safetensors_file import Tensor
from mtp_jax.model.spec import scale_name


def as_released(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """The tensor as a release has it: its name, and itself in that dtype. tensors: all of its folder."""

    def in_bytes(weight: str) -> bool:
        packed = tensors.get(weight + PACKED)
        others = weight + SHAPE in tensors or weight + OVER in tensors
        return packed is not None and packed.dtype == "U8" and not others

    if name.endswith((f".weight{TIMES}", f".weight{OVER}")) and tensor.shape == ():
        return name, replace(tensor, shape=(1,))
    if name.endswith(f".weight{PACKED}") and f"{name.removesuffix(PACKED)}{OVER}" in tensors:
        return name.removesuffix(PACKED), tensor
    if name.endswith(f".weight{PACKED}") and in_bytes(name.removesuffix(PACKED)):
        return name.removesuffix(PACKED), replace(tensor, dtype="I8")
    if name.endswith(f".weight{SCALE}"):
        weight = name.removesuffix(SCALE)
        values = tensors.get(weight)
        if values is not None and values.dtype == "F8_E4M3":
            return scale_name(weight), tensor
        if in_bytes(weight):
            return scale_name(weight), replace(
                tensor, dtype="F8_E8M0" if tensor.dtype == "U8" else tensor.dtype
            )
    return name, tensor
