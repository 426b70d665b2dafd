"""`mtp-jax serve`: the model behind an OpenAI-compatible HTTP API."""

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from mtp_jax.api.admission import QueueLimits
from mtp_jax.api.handover_options import HandoverOptions
from mtp_jax.api.progress import Reporter, Terminal
from mtp_jax.commands import show
from mtp_jax.commands.hosts import SECRET, add_hosts, on_hosts
from mtp_jax.commands.options import (
    add_engine,
    add_groups,
    add_options,
    depth,
    given,
    model_dir,
    open_llm,
    reporter,
)
from mtp_jax.commands.parser import Subparsers
from mtp_jax.options import declared
from serve.access_log import LOGGER as ACCESS
from serve.access_log import AccessLog, JsonLines
from serve.settings import Settings

if TYPE_CHECKING:
    from mtp_jax.api.async_llm import AsyncLLM
    from mtp_jax.hosts.group import Group

_KEY_VARIABLE, _ADMIN_KEY_VARIABLE = "MTP_JAX_API_KEY", "MTP_JAX_ADMIN_KEY"
_SLOTS = 8
_SUBJECTS = {
    "access": (
        "host",
        "port",
        "api_keys",
        "admin_key",
        "insecure_no_auth",
        "allowed_hosts",
        "allowed_origins",
    ),
    "limits": ("max_body_bytes", "max_connections", "request_seconds", "drain_seconds", "step_seconds"),
}
_DESCRIPTION = f"""\
Serve a model over HTTP with OpenAI's API. It listens on this computer alone unless --host says otherwise,
which needs an API key: --api-key, or {_KEY_VARIABLE} in the environment, which other users cannot see."""


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=_DESCRIPTION,
        usage="%(prog)s [MODEL] [options]",
    )
    add_engine(parser, quiet="show warnings and errors alone")
    add_groups(parser, Settings, _SUBJECTS, "server", {"model_name": "its folder's name"})
    add_options(parser.add_argument_group("queue"), QueueLimits)
    own = [name for name in declared(HandoverOptions) if name != SECRET]
    add_options(parser.add_argument_group("prefill apart from decode"), HandoverOptions, own)
    add_hosts(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or follow rank 0. Returns the exit status."""
    report = reporter(args)
    return on_hosts(args, report, _SLOTS, lambda group: _serve(args, report, group))


def _serve(args: argparse.Namespace, report: Reporter, group: "Group | None") -> int:
    directory = model_dir(args)
    found: dict[str, Any] = {"model_name": directory.resolve().name, **given(args, Settings)}
    keys = (*found.pop("api_keys", ()), *filter(None, [os.environ.get(_KEY_VARIABLE)]))
    found.setdefault("admin_key", os.environ.get(_ADMIN_KEY_VARIABLE))
    settings = Settings(**found, api_keys=keys)
    limits = QueueLimits(**given(args, QueueLimits))
    apart = given(args, HandoverOptions)
    if apart.get("role", "both") == "both":
        apart.pop(SECRET, None)  # it is the group's
    handover = HandoverOptions(**apart)
    if handover.apart:
        handover.secret()  # or say what is wrong before weights are read
    with report.phase("import server"):
        from serve.run import listen, serve
    with listen(settings) as listener:
        llm = open_llm(args, report, _SLOTS, group)
        from mtp_jax.api.async_llm import AsyncLLM

        allm = AsyncLLM(llm, limits.max_queued_requests, limits.max_queued_tokens, handover)
        address = f"http://{_bracketed(settings.host)}:{listener.getsockname()[1]}"
        _log(args.quiet, settings.access_log)
        if not args.quiet:
            show.note(summary(allm, settings, address))

        def ready() -> None:
            if isinstance(report, Terminal):
                report.ready(f"{address}/v1")

        return serve(allm, settings, listener, report, ready)


def summary(allm: "AsyncLLM", settings: "Settings", address: str) -> str:
    """What is about to be served, a line per subject."""
    import jax

    engine, model = allm.llm.engine, allm.llm.config
    c, tokens = engine.config, engine.pages * engine.shards * engine.config.page_size
    first, rest = engine.warm_up_keys()
    size = allm.llm.weight_bytes // 10**6
    layers = model.num_nextn_predict_layers
    drafts = f"{layers} NextN layer{'s' * (layers != 1)}, {depth(allm.llm)}"
    keys = f"{len(settings.api_keys)} API key{'s' * (len(settings.api_keys) != 1)}"
    who = keys if settings.api_keys else "no API key"
    only = ", this computer only" if settings.is_loopback else ""
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    kept = f"kept in {folder}" if folder else "not kept"
    kept_prefixes = "kept" if c.prefix_cache else "not kept"
    if c.host_cache_gib:
        kept_prefixes += f", and up to {c.host_cache_gib:g} GiB more in the host's memory"
    rows = {
        "model": f"{settings.model_name}: {model.num_hidden_layers} layers, {c.dtype}, {size:,} MB",
        "drafts": drafts,
        "cache": f"{tokens:,} tokens, {tokens / c.max_model_len:.1f} requests of {c.max_model_len:,}; "
        f"prefixes {kept_prefixes}",
        "slots": f"{c.max_num_seqs}; up to {allm.admission.max_requests} requests wait",
        "programs": f"{len(first)} before serving, {len(rest)} smaller ones while it is idle; {kept}",
        "address": f"{address} once it is ready; {who}{only}",
    }
    if allm.handover:
        rows["role"] = allm.handover.describe()
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def _log(quiet: bool, access_log: AccessLog | None) -> None:
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("uvicorn", "jax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if access_log == "off":
        ACCESS.setLevel(logging.CRITICAL)
    elif access_log is not None:
        ACCESS.setLevel(logging.INFO)
    if access_log == "json":
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(JsonLines())
        ACCESS.addHandler(handler)
        ACCESS.propagate = False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
