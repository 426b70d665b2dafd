"""`mtp-jax serve`: the model behind an OpenAI-compatible HTTP API."""

import argparse
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from mtp_jax.api.admission import QueueLimits
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Reporter, Terminal
from mtp_jax.api.sampling_defaults import described
from mtp_jax.commands import show
from mtp_jax.commands.hosts import add_hosts, on_hosts
from mtp_jax.commands.options import (
    add_engine,
    add_groups,
    add_options,
    checked_options,
    chosen,
    depth,
    drafter,
    of_weights,
    open_llm,
    reporter,
)
from mtp_jax.commands.parser import Subparsers, rates
from mtp_jax.commands.server_options import KEY_VARIABLE, SLOTS, address_of, settings_of
from mtp_jax.errors import amount
from mtp_jax.options import declared
from mtp_jax.wire.tls import TlsFiles
from serve.base.settings import ACCESS, LIMITS, Settings
from serve.watch.access_log import set_up

if TYPE_CHECKING:
    from mtp_jax.api.async_llm import AsyncLLM
    from mtp_jax.hosts.group import Group

    Attach = Callable[[AsyncLLM], Mapping[str, str]]

_DESCRIPTION = f"""\
Serve a model over HTTP with OpenAI's API. It listens on this computer alone unless --host says otherwise,
which needs an API key: --api-key, or {KEY_VARIABLE} in the environment, which other users cannot see."""


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=_DESCRIPTION,
        usage="%(prog)s [MODEL] [options]",
    )
    add_engine(parser, quiet="show warnings and errors alone")
    simulated = parser.add_argument_group("instead of a model")
    simulated.add_argument(
        "--simulate",
        type=rates,
        default=argparse.SUPPRESS,
        metavar="RATES",
        help="answer with words of a hash instead of the model's, with its tokenizer and chat template and "
        "without its weights, for tests of clients and routers; RATES such as 0.85,0.7,0.5: how often each "
        "position's draft is kept if those before it are. Every answer is marked SIMULATED",
    )
    about = declared(LLMOptions)["simulated_step"]
    simulated.add_argument(
        "--simulated-step",
        type=float,
        default=about.default,
        metavar=about.metavar,
        help=f"{about.help} (default: {about.shown_default})",
    )
    add_groups(parser, Settings, (ACCESS, LIMITS), "server", {"model_names": "its folder's name"})
    add_options(parser.add_argument_group("queue"), QueueLimits)
    add_hosts(parser, declared(TlsFiles))
    parser.set_defaults(run=run)


def run(
    args: argparse.Namespace, attach: "Attach | None" = None, reads_of_hosts: Collection[str] = ()
) -> int:
    """Serve until a signal, or follow rank 0. Returns the exit status.

    attach: is given the engine before it starts, to hang in hooks; returns rows of the summary.
    reads_of_hosts: names of options of ``Hosts`` that ``attach`` reads, too.
    """
    report = reporter(args)
    reads = [*reads_of_hosts, *declared(TlsFiles)]
    return on_hosts(args, report, SLOTS, lambda group: _serve(args, report, group, attach), reads)


def _serve(args: argparse.Namespace, report: Reporter, group: "Group | None", attach: "Attach | None") -> int:
    settings = settings_of(args)
    limits = chosen(args, QueueLimits)
    checked_options(args, SLOTS)  # raises its errors before the slow import
    with report.phase("import server"):
        from serve.http.run import listen, serve
    with listen(settings) as listener:
        llm = open_llm(args, report, SLOTS, group)
        from mtp_jax.api.async_llm import AsyncLLM

        allm = AsyncLLM(llm, limits.max_queued_requests, limits.max_queued_tokens)
        attached = attach(allm) if attach else {}
        address = address_of(settings, listener.getsockname()[1])
        set_up(args.quiet, settings.access_log)
        if not args.quiet:
            show.note(summary(allm, settings, address, attached))

        def ready() -> None:
            if isinstance(report, Terminal):
                report.ready(f"{address}/v1")

        return serve(allm, settings, listener, report, ready)


def summary(
    allm: "AsyncLLM", settings: Settings, address: str, more: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The model and its settings, a line per subject; ``more``: further lines by subject."""
    from mtp_jax.api.compile_cache import compile_cache

    llm, about = allm.llm, allm.about
    c, model = about.engine, about.model
    tokens, (first, rest) = allm.stats().pages_total * c.page_size, llm.engine.warm_up_keys()
    size = llm.weight_bytes // 10**6
    own = f" of {llm.folders[1]}" if len(llm.folders) > 1 else ""
    drafts = f"{drafter(llm)}{own}, {depth(llm)}"
    keys = amount(len(settings.api_keys), "API key")
    who = keys if settings.api_keys else "no API key"
    only = ", this computer only" if settings.is_loopback else ""
    plain = ", NOT ENCRYPTED (--tls-cert, or a proxy)" if settings.is_plain(settings.host) else ""
    kept = f"kept in {folder}" if (folder := compile_cache()) else "not kept"
    kept = f"from {llm.built}, with its options" if llm.built else kept
    kept_prefixes = "kept" if c.prefix_cache else "not kept"
    if c.host_cache_gib:
        kept_prefixes += f", and up to {c.host_cache_gib:g} GiB more in the host's memory"
    if c.files:
        kept_prefixes += f", {c.file_cache_gib:g} GiB in files of {c.files.folder}"
    what = f"{amount(model.num_hidden_layers, 'layer')}, {c.dtype}, {size:,} MB{of_weights(llm)}"
    rows = {
        "model": f"{', '.join(settings.names)}: {'SIMULATED, no weights' if about.simulated else what}",
        "drafts": drafts,
        "sampling": described(llm.sampling_defaults),
        "cache": f"room for {tokens:,} tokens: {tokens / c.max_model_len:.1f} requests of the longest, "
        f"{c.max_model_len:,} tokens; prefixes {kept_prefixes}",
        "sizes": llm.size.why,
        "slots": f"{c.max_num_seqs}; up to {allm.admission.max_requests} requests wait",
        "programs": f"{len(first)} before serving, {len(rest)} smaller ones while it is idle; {kept}",
        "address": f"{address} once it is ready; {who}{only}{plain}",
    }
    if about.simulated:
        del rows["programs"]  # there are no programs
    return "\n".join(f"{name:<10}{text}" for name, text in (rows | dict(more)).items())
