"""The application that Ray Serve deploys in a running cluster: configs/kubernetes/rayservice.yaml."""

import shlex
from collections.abc import Mapping

from mtp_jax.cluster.commands.ray_options import ray_options
from mtp_jax.cluster.commands.ray_serve import engine_spec
from mtp_jax.cluster.on_ray.start import reservation
from mtp_jax.commands.cli import make_parser
from mtp_jax.errors import ConfigError


def application(arguments: Mapping[str, str]) -> object:
    """The object that Ray Serve deploys by its import path, mtp_jax.cluster.commands.ray_app:application.

    arguments: ``command``, a command line that begins with `serve` and has --ray. Address and port are in
    Serve's `http_options`; --host must repeat the address, as it decides whether clients need a key.

    Raises ConfigError.
    """
    from mtp_jax.cluster.on_ray.replicas import application as make

    args = make_parser().parse_args(shlex.split(arguments["command"]))
    options = ray_options(args)
    if options is None:
        raise ConfigError("the command must have --ray")
    spec = engine_spec(args)
    return make(spec, options, reservation(options, spec.devices, spec.hosts))
