"""A command over several hosts: rank 0 runs it, the other ranks follow until it has ended."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mtp_jax.api.progress import Reporter, Terminal
from mtp_jax.commands import show
from mtp_jax.commands.options import add_options, chosen, given, llm_options
from mtp_jax.commands.parser import Parser
from mtp_jax.errors import ConfigError
from mtp_jax.hosts.options import Hosts
from mtp_jax.json_object import JsonObject
from mtp_jax.options import declared

if TYPE_CHECKING:
    from mtp_jax.hosts.group import Group


def add_hosts(parser: Parser, without: Collection[str] = ()) -> None:
    """Declare the options of ``Hosts``; ``without``: flags that the command has already."""
    own = [name for name in declared(Hosts) if name not in without]
    add_options(parser.add_argument_group("hosts"), Hosts, own)


def on_hosts(
    args: argparse.Namespace,
    report: Reporter,
    completions: int,
    lead: "Callable[[Group | None], int]",
    reads: Collection[str] = (),
) -> int:
    """Run ``lead`` on rank 0, with the group, or None without one; follow elsewhere. Returns the exit status.

    Raises ConfigError. completions: as for ``open_llm``. reads: names of options of ``Hosts`` that ``lead``
    reads itself, so that they have an effect on one host, too.
    """
    found = given(args, Hosts)
    hosts = chosen(args, Hosts)
    if hosts.hosts == 1:
        without = [name for name in found if name != "hosts" and name not in reads]
        if without:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in without)
            raise ConfigError(f"{names} without effect on one host; add --hosts 2 or more, or leave it out")
        return lead(None)
    with report.phase("import jax"):
        from mtp_jax.hosts.group import join
    with report.phase("join"):
        group = join(hosts)
    if isinstance(report, Terminal):
        show.note(f"hosts     {hosts.describe()}")
    with group:
        if group.leads:
            return lead(group)
        _follow(args.model, {**llm_options(args, report, completions), "group": group})
    sys.stderr.flush()
    os._exit(0)  # without waiting for programs that still compile in the background


def _follow(model: Path | None, options: JsonObject) -> None:
    from mtp_jax.api.follow import follow

    asked = False

    def leave_later(number: int, frame: FrameType | None) -> None:
        """Who stops all ranks at once would cut the requests off that rank 0 lets come to their end."""
        nonlocal asked
        del frame
        if asked:
            os._exit(128 + number)
        asked = True
        print("this rank ends with rank 0; another signal ends it at once", file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave_later)
    follow(model, **options)
