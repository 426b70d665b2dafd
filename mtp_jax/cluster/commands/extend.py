"""Options that this room adds to `serve` and `batch`: engines on Ray, and prefill apart from decode."""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from mtp_jax.commands.options import add_options, chosen, reporter
from mtp_jax.commands.parser import Subparsers
from mtp_jax.commands.server import hidden_by
from mtp_jax.options import declared
from mtp_jax.wire.tls import TlsFiles

if TYPE_CHECKING:
    from mtp_jax.api.async_llm import AsyncLLM
    from mtp_jax.cluster.handover.options import HandoverOptions

_OF_BATCHES = ("ray", "ray_address", "min_replicas", "max_replicas", "cpus", "gpus")
_SHARED = ("secret_file", *declared(TlsFiles))
"""Options of both ``Hosts`` and ``HandoverOptions``, which share their flags."""


def register(subparsers: Subparsers) -> None:
    """Declare the options. Leaves commands alone that cannot run, as another module hides the server's."""
    if hidden_by():
        return
    from mtp_jax.cluster.handover.options import HandoverOptions
    from mtp_jax.cluster.on_ray.options import RayOptions

    serve, batch = (subparsers.choices[name] for name in ("serve", "batch"))
    own = [name for name in declared(HandoverOptions) if name not in _SHARED]
    add_options(serve.add_argument_group("prefill apart from decode"), HandoverOptions, own)
    add_options(serve.add_argument_group("engines on Ray"), RayOptions)
    add_options(batch.add_argument_group("engines on Ray"), RayOptions, _OF_BATCHES)
    serve.set_defaults(run=_serve)
    batch.set_defaults(run=_batch)


def _serve(args: argparse.Namespace) -> int:
    from mtp_jax.cluster.commands.ray_options import ray_options
    from mtp_jax.cluster.handover.options import HandoverOptions
    from mtp_jax.commands import serve

    if (options := ray_options(args)) is not None:
        from mtp_jax.cluster.commands.ray_serve import serve_on_ray

        return serve_on_ray(args, reporter(args), options)
    # They are the group's where there is no hand-over.
    both = getattr(args, "role", "both") == "both"
    apart = chosen(args, HandoverOptions, _SHARED if both else ())
    if both:
        return serve.run(args)
    apart.credentials()  # raises its error before weights are read
    return serve.run(args, partial(_attach, apart), _SHARED)


def _attach(options: "HandoverOptions", allm: "AsyncLLM") -> Mapping[str, str]:
    from mtp_jax.cluster.handover.handover import Handover

    return {"role": Handover(allm, options).describe()}


def _batch(args: argparse.Namespace) -> int:
    from mtp_jax.cluster.commands.ray_options import ray_options
    from mtp_jax.commands import batch

    if (options := ray_options(args)) is None:
        return batch.run(args)
    from mtp_jax.cluster.commands.ray_batch import answer_on_ray

    return batch.run(args, partial(answer_on_ray, options))
