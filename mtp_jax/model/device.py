"""What a program is traced for: a device, or one that is only compiled for."""

import re

import jax

_HOPPER = re.compile(r"NVIDIA (H100|H200|H800|H20|GH200)\b")


def platform() -> str:
    """ "cpu", "gpu" or "tpu"."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if described is None else described.platform


def is_hopper() -> bool:
    """Whether the device is an NVIDIA GPU of the Hopper generation, which the kernels are written for."""
    if platform() != "gpu":
        return False
    described = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if described is None else described.device_kind
    return _HOPPER.match(kind) is not None
