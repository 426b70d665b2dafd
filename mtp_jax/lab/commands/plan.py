"""`mtp-jax plan`: needs and speed of a deployment, from a config.json alone."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.commands import show
from mtp_jax.commands.options import add_head, draft_folder
from mtp_jax.commands.parser import (
    Parser,
    Subparsers,
    add_model,
    add_value,
    counts,
    integers,
    mesh_shape,
    positive,
    positive_number,
    rates,
)
from mtp_jax.decode.law import GOLDEN, golden_rates
from mtp_jax.errors import ConfigError
from mtp_jax.lab.commands import plan_load
from mtp_jax.lab.planning.declared import declared
from mtp_jax.lab.planning.hardware import GPUS
from mtp_jax.lab.planning.releases import KNOWN
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.room import MEMORY_FRACTION

if TYPE_CHECKING:
    from mtp_jax.lab.planning.deployment import Deployment

_DESCRIPTION = """\
Estimate memory, step time, tokens per second and cost of a model on GPUs, before renting any. Of the model
only config.json is read. Times are bands, from usual to lean software. They follow from shapes and from what
others published; none was measured with this engine (docs/planning.md)."""
# Share of drafts accepted by position, if earlier drafts were: DeepSeek's report has 0.85 to 0.9 for the
# first (arXiv 2412.19437, section 5.4.3); with the later shares a depth of 3 emits the 2.8 tokens per step
# that NVIDIA publishes for DeepSeek-R1.
_RATES = (0.86, 0.7, 0.55)
_DEPTHS = [0, 1, 3]
_CONTEXT = 4096
# GPUs up to which a gather sends little more than an all-to-all: with DeepSeek-V3's routing 2.2 times the
# bytes for 8, and 9 times for 64.
_GATHERING = 8


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("plan", help="estimate a deployment", description=_DESCRIPTION)
    add_model(parser, f"a directory with config.json, or the file, or one of {', '.join(KNOWN)}")
    add_head(parser, "a draft head in a directory of its own, of which no weights are read")
    parser.add_argument(
        "--check", action="store_true", help="show published speeds beside the estimate, without a model"
    )
    _add_hardware(parser)
    _add_load(parser)
    plan_load.add_load(parser)
    shown = parser.add_argument_group("output")
    help = "dollars per GPU and hour: adds $ per million tokens"
    add_value(shown, "--price", None, help, positive_number, "X")
    shown.add_argument("--json", action="store_true", help="print a JSON object")
    shown.add_argument(
        "--output",
        type=Path,
        metavar="PNG",
        help="draw tokens/s of a GPU against tokens/s of a user, or with --load the times of requests",
    )
    parser.set_defaults(weights=False, run=run)


def _add_hardware(parser: Parser) -> None:
    group = parser.add_argument_group("hardware")
    add_value(group, "--gpu", "h200", ", ".join(GPUS), str, "NAME")
    add_value(group, "--gpus", 8, "how many in all", positive, "N")
    used = "share of their memory that is used"
    add_value(group, "--memory-fraction", MEMORY_FRACTION, used, positive_number, "F")
    domains = "NVLink domains that they are spread over (default: as few as hold them)"
    add_value(group, "--hosts", None, domains, positive, "M")
    groups = "groups with requests of their own, and GPUs of each, which divide heads (default: Nx1)"
    add_value(group, "--mesh", None, groups, mesh_shape, "DATAxMODEL")
    group.add_argument(
        "--exchange",
        choices=("auto", "gather", "all-to-all", "per-expert"),
        default="auto",
        help="how rows reach their experts (default: auto: gather on up to 8 GPUs of one host, else "
        "all-to-all)",
    )
    group.add_argument(
        "--micro-batches",
        choices=("auto", "1", "2"),
        default="auto",
        help="2: one half computes while the other is exchanged (default: auto: what is faster)",
    )


def _add_load(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    add_value(group, "--context", None, f"cached tokens per request (default: {_CONTEXT})", positive, "N")
    many = "how many at a time, on all GPUs together (default: 1, 4, 16 ... and what fits)"
    add_value(group, "--requests", None, many, counts, "N,...")
    depths = "drafts per step (default: 0,1,3; 0 for a model without NextN layers)"
    add_value(group, "--depths", None, depths, integers, "K,...")
    accepted = "how often each position's draft is accepted if those before it are, or a golden length's name"
    add_value(group, "--accept-rates", _RATES, accepted, _accept_rates, "P,...|NAME")
    among = "tokens that drafts choose among (default: the whole vocabulary)"
    add_value(group, "--draft-vocab", None, among, positive, "N")
    group.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="auto: bfloat16 (default: auto)"
    )


def _accept_rates(text: str) -> tuple[float, ...]:
    """The option's value: rates, or the rates of a golden length, by its name."""
    return golden_rates(text) if text in GOLDEN else rates(text)


def run(args: argparse.Namespace) -> int:
    """Print the plan, the comparison, or a load's times. Returns the exit status."""
    plan_load.check(args)
    if args.check:
        if other := args.model or (args.load and "--load"):
            raise ConfigError(f"--check compares DeepSeek-V3 and V4 with published speeds; leave out {other}")
        from mtp_jax.lab.planning.check import text

        show.write(text() + "\n")
        return 0
    if args.model is None:
        raise ConfigError(
            f"name a model's directory or its config.json, or one of {', '.join(KNOWN)}, whose is known; "
            "or --check"
        )
    from mtp_jax.lab.planning import plot, table, text

    trunk_alone = args.depths == [0] or getattr(args, "num_speculative_tokens", None) == 0
    option = "--depths" if args.load is None else "--num-speculative-tokens"
    name, cfg = declared(args.model, trunk_alone, option)
    cfg = _with_head(args, cfg)
    if args.load is not None:
        return plan_load.run(args, _deployment(args, cfg), name)
    depths = args.depths or (_DEPTHS if cfg.drafts else [0])
    batches = None if args.micro_batches == "auto" else int(args.micro_batches)
    plan = table.make(_deployment(args, cfg), args.requests, depths, args.accept_rates, batches, args.price)
    if args.output:
        d = plan.base
        plot.draw(plan, f"{name} on {d.gpus} x {d.gpu.name.upper()}, estimated", args.output)
    if args.json:
        show.write(json.dumps({"model": name} | plan.to_dict(), indent=2) + "\n")
    else:
        show.write(text.text(plan, name) + "\n")
    return 0


def _with_head(args: argparse.Namespace, cfg: ModelConfig) -> ModelConfig:
    """The model with the head of ``--draft-model``, if it is given. Raises ConfigError, CheckpointError."""
    beside = draft_folder(args)
    if beside is None:
        if "drafter" in args:
            raise ConfigError("drafter is of a head; name its directory with --draft-model")
        return cfg
    from mtp_jax.checkpoint.draft import open_draft
    from mtp_jax.checkpoint.folder import open_folder

    head = open_draft(open_folder(beside.path), cfg, beside.captures).head
    if head is None:
        raise ConfigError(f"{beside.path} has NextN layers, which config.json declares; leave it out")
    return replace(cfg.with_nextn(()), drafter=head)


def _deployment(args: argparse.Namespace, cfg: ModelConfig) -> "Deployment":
    """The deployment that the options describe. Raises ConfigError."""
    from mtp_jax.lab.planning.deployment import Deployment, hosts_for
    from mtp_jax.lab.planning.hardware import gpu_named
    from mtp_jax.lab.planning.weights import Storage

    gpu, (data, model) = gpu_named(args.gpu), args.mesh or (args.gpus, 1)
    if data * model != args.gpus:
        raise ConfigError(
            f"--mesh {data}x{model} is {data * model} GPUs, --gpus {args.gpus}; give both alike"
        )
    hosts = args.hosts or hosts_for(gpu, args.gpus)
    auto = "gather" if hosts == 1 and args.gpus <= _GATHERING else "all-to-all"
    return Deployment(
        cfg,
        Storage.of(cfg),
        gpu,
        data,
        model,
        hosts,
        context=args.context or _CONTEXT,
        cache="bfloat16" if args.kv_cache_dtype == "auto" else "fp8",
        exchange=auto if args.exchange == "auto" else args.exchange,
        memory_fraction=args.memory_fraction,
        page_size=getattr(args, "page_size", None),
        draft_vocab=args.draft_vocab,
    )
