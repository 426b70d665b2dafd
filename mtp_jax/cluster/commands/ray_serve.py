"""`mtp-jax serve --ray`: several replicas of the server, behind a router, by Ray Serve."""

import argparse
import logging
import signal
import threading
from contextlib import ExitStack

from mtp_jax.api.admission import QueueLimits
from mtp_jax.api.progress import Reporter, Terminal
from mtp_jax.cluster.commands.ray_options import portable_options
from mtp_jax.cluster.handover.options import HandoverOptions
from mtp_jax.cluster.on_ray.options import RayOptions
from mtp_jax.cluster.on_ray.spec import EngineSpec
from mtp_jax.cluster.on_ray.start import cluster, reservation
from mtp_jax.commands import show
from mtp_jax.commands.options import chosen, given, model_dir
from mtp_jax.commands.server_options import SLOTS, address_of, settings_of
from mtp_jax.errors import ConfigError, EngineStopped
from mtp_jax.hosts.options import Hosts
from serve.http.run import listen

_NAME = "mtp-jax"
_LOGS = "Ray's logs say more, as a rule in /tmp/ray/session_latest/logs/serve"


def serve_on_ray(args: argparse.Namespace, report: Reporter, options: RayOptions) -> int:
    """Serve until a signal. Returns the exit status."""
    spec = engine_spec(args)
    with listen(spec.settings) as free:  # Serve's proxy takes the port; an error for a taken port comes first
        port = free.getsockname()[1]
    with ExitStack() as stack:
        with report.phase("join Ray"):
            own = stack.enter_context(cluster(options.ray_address))
            from ray import serve as ray_serve  # pyright: ignore[reportMissingImports]

            from mtp_jax.cluster.on_ray.replicas import application as make

            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            app = make(spec, options, reservation(options, spec.devices, spec.hosts, own))
            ray_serve.start(http_options={"host": spec.settings.host, "port": port})
        if not args.quiet:
            show.note(_summary(spec, options, own))
        with report.phase("start engines"):
            try:
                ray_serve.run(app, name=_NAME, route_prefix="/")
            except RuntimeError as error:
                raise EngineStopped(f"the engines did not start: {error}; {_LOGS}") from error
        if isinstance(report, Terminal):
            report.ready(f"{address_of(spec.settings, port)}/v1")
        _wait_for_signal()
        ray_serve.delete(_NAME)  # lets running requests finish
    return 0


def engine_spec(args: argparse.Namespace) -> EngineSpec:
    """The engine and server of each replica. Raises ConfigError for options that replicas cannot have."""
    for cls, allowed in ((Hosts, {"hosts"}), (HandoverOptions, set[str]())):
        others = [f"--{name.replace('_', '-')}" for name in given(args, cls) if name not in allowed]
        if others:
            raise ConfigError(
                f"{', '.join(others)} cannot be with --ray, which starts every process itself, and whose "
                "proxy speaks http alone"
            )
    settings = settings_of(args)
    if settings.admin_key is not None:
        raise ConfigError(
            "an admin key cannot be with --ray: its routes would change one replica of several; leave it "
            "out, and start the application again with other weights"
        )
    limits = chosen(args, QueueLimits)
    hosts = Hosts.hosts if "hosts" not in args else args.hosts
    return EngineSpec(
        model_dir(args).absolute(),
        portable_options(args, SLOTS),
        settings,
        limits.max_queued_requests,
        limits.max_queued_tokens,
        hosts,
    )


def _summary(spec: EngineSpec, options: RayOptions, own: bool) -> str:
    count = f"{options.min_replicas} to {options.most}" if options.scales else f"{options.min_replicas}"
    slack = f", {options.routing_slack} requests of slack" if options.routing == "prefix" else ""
    rows = {
        "model": f"{spec.settings.model_name}: {spec.model}",
        "engines": f"{count}, each on {spec.hosts} hosts, {spec.options['max_num_seqs']} slots",
        "routing": f"{options.routing}{slack}",
        "cluster": "of this command" if own else "joined",
    }
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def _wait_for_signal() -> None:
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    asked.wait()
