"""Backends carry out a forward pass, stage by stage; the mathematics does not depend on them.

    before_attention  norm, projections, rope, index queries      -> queries, entries to cache
    attend            write them, choose, attend over the cache   -> context, choice
    after_attention   output projection, added to the stream
    feed_forward      norm; router, routed and shared experts, or a dense MLP, added to the stream
    finish            the norm at the end

A stage's computation depends on a layer's kind of attention (``attention``): MLA, with sparse attention or
without, or grouped-query attention.

``Xla`` has every stage as the papers write it, and is the oracle of the other backends, which replace stages
or parts of them: ``XlaCpu`` parts that XLA on a CPU does slowly, ``MosaicGpu`` parts with kernels on a Hopper
GPU. The values between the stages of one backend, the residual stream and the rows of a product, are its own
business.
"""

from typing import Literal

import jax
from jax.sharding import Mesh

from mtp_jax.errors import ConfigError
from mtp_jax.model.backend.exchange import ExchangeChoice, exchange_of
from mtp_jax.model.backend.mosaic_gpu import MosaicGpu
from mtp_jax.model.backend.xla import Xla
from mtp_jax.model.backend.xla_cpu import XlaCpu
from mtp_jax.model.device import is_hopper, multiplies_bf16, platform
from mtp_jax.model.sharding import data_size, with_auto_axes

__all__ = ["Backend", "MosaicGpu", "Xla", "XlaCpu", "backend"]

Backend = Xla


def backend(
    kernels: Literal["auto", "xla", "mosaic_gpu"] = "auto",
    mesh: Mesh | None = None,
    exchange: ExchangeChoice = "auto",
    room: float = 1.5,
    micro_batches: int = 1,
) -> Backend:
    """The fastest backend for the device, or the one that was asked for.

    kernels: "auto": kernels on a Hopper GPU where there are any for the shapes; "xla": none; "mosaic_gpu":
    kernels, and a ConfigError for shapes that they cannot take. exchange, room: the way of rows to the
    experts of other devices (see ``exchange.exchange_of``). micro_batches: see its module. Raises
    ConfigError.
    """
    mesh = with_auto_axes(mesh)
    by = exchange_of(exchange, room, mesh)
    if micro_batches > 1 and data_size(mesh) == 1:
        raise ConfigError(
            f"micro_batches = {micro_batches} with one data shard: no rows travel that products could run "
            "beside; give a mesh whose data axis is 2 or more, or micro_batches=1"
        )
    if kernels == "mosaic_gpu" and not is_hopper():
        found = jax.devices()[0].device_kind
        raise ConfigError(
            "kernels = 'mosaic_gpu' needs an NVIDIA GPU of the Hopper generation (H100, H200); found "
            f"{found}: --kernels auto or xla, in Python kernels='auto' or 'xla'"
        )
    if kernels == "mosaic_gpu" or (kernels == "auto" and is_hopper()):
        return MosaicGpu(mesh, exchange=by, micro_batches=micro_batches, strict=kernels == "mosaic_gpu")
    if platform() == "cpu":
        return XlaCpu(mesh, exchange=by, micro_batches=micro_batches, matrices=multiplies_bf16())
    return Xla(mesh, exchange=by, micro_batches=micro_batches)
