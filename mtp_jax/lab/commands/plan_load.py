"""`mtp-jax plan --load`: latencies, speed and cost of a deployment under a load, in virtual time."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

from mtp_jax.api.admission import QueueLimits
from mtp_jax.api.options import LLMOptions
from mtp_jax.commands import show
from mtp_jax.commands.options import add_options, chosen, flag_of
from mtp_jax.commands.parser import Parser, positive
from mtp_jax.engine.defaults import Target
from mtp_jax.errors import ConfigError
from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.launch_time import LaunchTimes, Software
from mtp_jax.options import declared

_ENGINE = (
    "num_speculative_tokens",
    "adaptive_depth",
    "max_num_seqs",
    "max_model_len",
    "page_size",
    "prefill_chunk",
    "prefix_cache",
)
_DECLARED = {**{name: declared(LLMOptions)[name] for name in _ENGINE}, **declared(QueueLimits)}
_FLAGS = {name: flag_of(name, about) for name, about in _DECLARED.items()} | {
    "software": "--software",
    "seed": "--seed",
    "concurrency": "--concurrency",
}
_OF_TABLE = ("requests", "depths", "context")


def add_load(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group(
        "a load in virtual time", "The engine's own options, as `serve` has them."
    )
    group.add_argument(
        "--load",
        type=Path,
        metavar="FILE",
        help="arrivals and lengths, as JSON lines or CSV: serve them with the engine's scheduler and depth "
        "control, with drafts and without, each launch as long as it is estimated",
    )
    group.add_argument(
        "--software",
        choices=get_args(Software),
        default=argparse.SUPPRESS,
        help="the end of the band by which launches are timed (default: middle)",
    )
    help = "of accepted drafts, and of prompts (default: 0)"
    group.add_argument("--seed", type=int, default=argparse.SUPPRESS, metavar="N", help=help)
    group.add_argument(
        "--concurrency",
        type=positive,
        default=argparse.SUPPRESS,
        metavar="N",
        help="requests at a time: the next arrives as one ends (default: each arrives at its time)",
    )
    add_options(group, LLMOptions, _ENGINE)
    add_options(group, QueueLimits)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that have no effect, with --load or without."""
    if args.load is None:
        if given := [flag for name, flag in _FLAGS.items() if name in args and name != "page_size"]:
            raise ConfigError(f"{given[0]} has no effect without --load FILE; give both or neither")
    elif given := [name for name in _OF_TABLE if getattr(args, name) is not None]:
        raise ConfigError(f"--{given[0]} has no effect with --load, whose file says it; leave it out")


def run(args: argparse.Namespace, base: Deployment, name: str) -> int:
    """Serve the load with drafts and without, and print the figures. Returns the exit status."""
    from mtp_jax.lab.forecast import load, plot
    from mtp_jax.lab.forecast.replay import Service, fitted, replay
    from mtp_jax.lab.forecast.report import Forecast, described
    from mtp_jax.lab.planning.plot import load_pyplot

    base = replace(base, micro_batches=1 if args.micro_batches == "auto" else int(args.micro_batches))
    own = {option: getattr(args, option) for option in _ENGINE if option in args}
    own.setdefault("adaptive_depth", True)
    if not base.cfg.num_nextn_predict_layers:
        own.setdefault("num_speculative_tokens", 0)
    seed: int = getattr(args, "seed", 0)
    software: Software = getattr(args, "software", "middle")
    users: int | None = getattr(args, "concurrency", None)
    options = LLMOptions(**own, micro_batches=base.micro_batches, seed=seed)
    target = Target(False, base.cfg.attention.kernel_reach, base.data * base.micro_batches)
    config = options.engine(base.cfg, target)
    if args.output:
        load_pyplot()  # which may not be there
    arrivals, outcomes, limits = load.read(args.load), {}, chosen(args, QueueLimits)
    drafts = config.num_speculative_tokens
    most = f"{'0 to ' * config.adaptive_depth}{drafts} drafts"
    configs = {f"with MTP, {most}": config} if drafts else {}
    configs = {**configs, "without MTP": config.without_drafts()}
    fits = {run: fitted(config, base, options) for run, config in configs.items()}
    for run, config in fits.items():
        times = LaunchTimes(base, software)
        service = Service(base.cfg, config, times, args.accept_rates, base.data, limits, seed, users)
        outcomes[run] = replay(service, arrivals)
    config = next(iter(fits.values()))
    title = (
        f"{name} on {base.gpus} x {base.gpu.name.upper()}, mesh {base.data}x{base.model}, {base.exchange}: "
        f"predicted with {software} software, not measured",
        f"{args.load.name}: {described(arrivals, users)}",
        f"{config.max_num_seqs} slots of {config.max_model_len:,} tokens at most, chunks of "
        f"{config.prefill_chunk:,}; seed {seed}",
    )
    forecast = Forecast(title, base, outcomes, args.price)
    if args.output:
        plot.draw(forecast, args.output)
    if args.json:
        show.write(json.dumps({"model": name} | forecast.to_dict(), indent=2) + "\n")
    else:
        show.write(f"{forecast}\n")
    return 0
