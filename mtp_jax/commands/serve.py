"""`mtp-jax serve`: the model behind an OpenAI-compatible HTTP API."""

import argparse
import logging
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from mtp_jax.api.progress import Terminal
from mtp_jax.commands import show
from mtp_jax.commands.options import add_engine, depth, model_dir, open_llm, reporter
from mtp_jax.commands.parser import Parser, Subparsers, positive

if TYPE_CHECKING:
    from mtp_jax.api.async_llm import AsyncLLM
    from serve.settings import Settings

_KEY_VARIABLE = "MTP_JAX_API_KEY"
_SLOTS = 8
_DESCRIPTION = f"""\
Serve a model over HTTP with OpenAI's API. It listens on this computer alone unless --host says otherwise,
which needs an API key: --api-key, or {_KEY_VARIABLE} in the environment, which other users cannot see."""
# Of Settings, by the names that options have.
_SETTINGS = (
    "host",
    "port",
    "insecure_no_auth",
    "strict",
    "max_body_bytes",
    "max_connections",
    "request_seconds",
    "drain_seconds",
    "step_seconds",
    "spec_metrics",
)


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=_DESCRIPTION,
        usage="%(prog)s [MODEL] [options]",
    )
    add_engine(parser)
    parser.add_argument(
        "--per-request-spec-decode-metrics",
        dest="spec_metrics",
        choices=("none", "summary", "detailed"),
        help="add speculation metrics to completions and chats; in streams with the usage (default: none)",
    )
    parser.add_argument(
        "--phase-profile",
        action="store_true",
        help="trace each program in use for a few steps, once, to tell drafting from verification in "
        "/metrics; answers are slower for some seconds meanwhile",
    )
    _add_server(parser)
    parser.set_defaults(run=run)


def _add_server(parser: Parser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", metavar="ADDRESS", help="address to bind to (default: 127.0.0.1)")
    add("--port", type=int, metavar="N", help="port to bind to; 0: any free one (default: 8000)")
    add(
        "--api-key", action="append", default=[], metavar="KEY", help="a key that clients may use; repeatable"
    )
    add(
        "--insecure-no-auth",
        action="store_true",
        default=None,
        help="let other computers connect without a key",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="Host header to answer; repeatable (default: the loopback names, or any if bound to others)",
    )
    add(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: its folder's name)"
    )
    add(
        "--strict", action="store_true", default=None, help="refuse unknown fields instead of warning of them"
    )
    add(
        "--max-queued-requests",
        type=positive,
        default=256,
        metavar="N",
        help="most waiting requests (default: 256)",
    )
    add(
        "--max-queued-tokens",
        type=positive,
        default=2**20,
        metavar="N",
        help="most waiting prompt tokens (default: 1048576)",
    )
    add("--max-body-bytes", type=int, metavar="N", help="of a request (default: 8388608)")
    add("--max-connections", type=int, metavar="N", help="most requests in progress (default: 4096)")
    add(
        "--request-seconds",
        type=float,
        metavar="S",
        help="end requests after this long, or sooner by their own timeout (default: never)",
    )
    add("--drain-seconds", type=float, metavar="S", help="how long SIGTERM waits for requests (default: 30)")
    add("--step-seconds", type=float, metavar="S", help="exit when a step takes longer (default: 300)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Returns the exit status."""
    from serve.settings import Settings

    directory = model_dir(args)
    given: dict[str, Any] = {name: v for name in _SETTINGS if (v := getattr(args, name)) is not None}
    settings = Settings(
        directory.resolve().name if args.served_model_name is None else args.served_model_name,
        api_keys=(*args.api_key, *filter(None, [os.environ.get(_KEY_VARIABLE)])),
        allowed_hosts=tuple(args.allowed_host),
        base_model=args.model is None,  # the embedded one completes code
        **given,
    )
    report = reporter(args)
    with report.phase("import server"):
        from serve.run import listen, serve
    with listen(settings) as listener:
        llm = open_llm(args, report, _SLOTS)
        from mtp_jax.api.async_llm import AsyncLLM

        allm = AsyncLLM(llm, args.max_queued_requests, args.max_queued_tokens)
        address = f"http://{_bracketed(settings.host)}:{listener.getsockname()[1]}"
        _log(args.quiet)
        if not args.quiet:
            show.note(summary(allm, settings, address))

        def ready() -> None:
            if isinstance(report, Terminal):
                report.ready(f"{address}/v1")

        from mtp_jax.profiling.live import PhaseProfiler

        profiler = PhaseProfiler(llm.engine, ready=lambda: not allm.warming)
        with profiler if args.phase_profile else nullcontext():
            return serve(allm, settings, listener, report, ready)


def summary(allm: "AsyncLLM", settings: "Settings", address: str) -> str:
    """What is about to be served, a line per subject."""
    import jax

    engine, model = allm.llm.engine, allm.llm.config
    c, tokens = engine.config, engine.pages * engine.shards * engine.config.page_size
    first, rest = engine.warm_up_keys()
    size = sum(a.nbytes for a in jax.tree.leaves(engine.params)) // 10**6
    layers = model.num_nextn_predict_layers
    drafts = f"{layers} NextN layer{'s' * (layers != 1)}, {depth(allm.llm)}"
    keys = f"{len(settings.api_keys)} API key{'s' * (len(settings.api_keys) != 1)}"
    who = keys if settings.api_keys else "no API key"
    only = ", this computer only" if settings.is_loopback else ""
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    kept = f"kept in {folder}" if folder else "not kept"
    rows = {
        "model": f"{settings.model_name}: {model.num_hidden_layers} layers, {c.dtype}, {size:,} MB",
        "drafts": drafts,
        "cache": f"{tokens:,} tokens, {tokens / c.max_model_len:.1f} requests of {c.max_model_len:,}; "
        f"prefixes {'kept' if c.prefix_cache else 'not kept'}",
        "slots": f"{c.max_num_seqs}; up to {allm.admission.max_requests} requests wait",
        "programs": f"{len(first)} before serving, {len(rest)} smaller ones while it is idle; {kept}",
        "address": f"{address}, {who}{only}",
    }
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def _log(quiet: bool) -> None:
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("uvicorn", "jax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
