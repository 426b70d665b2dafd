"""`mtp-jax tune-head`: tune a draft head for a model that stays as it is."""

import argparse
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.api.options import LLMOptions
from mtp_jax.commands import show
from mtp_jax.commands.options import add_options, chosen, given, model_dir, open_llm, reporter
from mtp_jax.commands.parser import Subparsers, add_model
from mtp_jax.engine.config import SPECULATION
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.heads.outside import taken_kind
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.train.tune_options import TuneOptions
from mtp_jax.model.family import config_of_file
from mtp_jax.options import declared

if TYPE_CHECKING:
    from mtp_jax.api.llm import LLM

_SLOTS, _MAX_TOKENS = 8, 512
# Options of requests that wait beside each other, and of experts that move meanwhile.
_OF_SERVERS = ("page_size", "prefix_cache", "host_cache_gib")
_OF_SERVERS += ("micro_batches", "redundant_experts", "expert_rebalance")
_OF_HEADS = ("draft_vocab",)  # of the head that learns, not of the engine that answers
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
_DESCRIPTION = """\
Tune the model's NextN layers, the head of --draft-model, or a --fresh head, on the model's own answers.
Lines of FILE: {"messages": [...]}, {"prompt": "..."} or {"text": "..."}, or lines as `batch` reads them. The
result is DIR/head, for --draft-model. Run it again to go on with an interrupted run."""


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "tune-head", help="tune a draft head for a model", description=_DESCRIPTION
    )
    add_model(parser, "directory with config.json and weights (default: the demo model)")
    parser.add_config()
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--prompts", type=Path, metavar="FILE", help="the texts, JSON lines")
    add_options(texts, TuneOptions, ["own_prompts"])
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="hidden states, checkpoints, losses, the head"
    )
    others = [name for name in declared(TuneOptions) if name != "own_prompts"]
    add_options(parser.add_argument_group("tuning"), TuneOptions, others)
    own = {"max_tokens": f"{_MAX_TOKENS}", "temperature": "the model's own, else 1"}
    add_options(parser.add_argument_group("answers"), SamplingParams, _SAMPLING, own)
    own = {"max_num_seqs": f"{_SLOTS}"}
    add_options(parser.add_argument_group("engine"), LLMOptions, _engine(), own)
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but the result")
    parser.set_defaults(run=run)


def _engine() -> list[str]:
    """Options of the engine that answers, with drafts of one depth that are verified one way."""
    speculation = {name for name, about in declared(LLMOptions).items() if about.subject == SPECULATION}
    without = {*_OF_SERVERS, *speculation} - {"num_speculative_tokens"}
    return [name for name in declared(LLMOptions) if name not in without]


def run(args: argparse.Namespace) -> int:
    """Tune. Returns the exit status."""
    options, directory = chosen(args, TuneOptions), model_dir(args)
    model = chosen(args, LLMOptions, without=_OF_HEADS, model=directory)
    taken_kind(model.drafter)
    if not model.drafts:
        raise ConfigError("num_speculative_tokens = 0; expected 1 or more: the drafts to tune")
    try:
        from mtp_jax.lab.train.tune import Given, tune
    except ModuleNotFoundError as error:
        missing = error.name
        raise ConfigError(f"tuning needs {missing}; install it with: pip install {missing}") from error
    from mtp_jax.checkpoint.digest import folder_digest
    from mtp_jax.lab.train.prompts import digest
    from mtp_jax.model.sharding import make_mesh

    report, draft_model = reporter(args), model.draft_model
    sampling = {"max_tokens": _MAX_TOKENS} | given(args, SamplingParams)
    prompts = args.prompts or args.out / "prompts.jsonl"
    facts = {
        "prompts": digest(args.prompts) if args.prompts else f"{options.own_prompts} of seed {options.seed}",
        "model": folder_digest(directory),
        "head": folder_digest(Path(draft_model)) if draft_model else options.fresh,
    }

    def opened(head: Path | None) -> "LLM":
        own = copy(args)
        own.model = directory
        for name in _OF_HEADS:
            vars(own).pop(name, None)
        if head is not None:
            own.draft_model = head
            vars(own).pop("num_nextn_layers", None)
        if head or draft_model or config_of_file(directory / "config.json").drafts:
            own.adaptive_depth = False
        else:  # answers of the model alone
            own.num_speculative_tokens = 0
        return open_llm(own, report, _SLOTS)

    mesh = make_mesh(*args.mesh) if "mesh" in args else None
    files = Given(options, replace(model, mesh=mesh), prompts, args.out, facts, sampling)
    found = tune(files, opened, report)
    show.write(_table(found) + f"{args.out / 'head'}\n")
    return 0


def _table(found: JsonObject) -> str:
    """Acceptance before and after, for people."""
    rows = [f"{'held out':<16}{'before':<32}after\n"]
    for name, after in found["after"].items():
        before = found["before"] and found["before"][name]
        rows.append(f"{name:<16}{_acceptance(before):<32}{_acceptance(after)}\n")
    return "".join(rows)


def _acceptance(found: JsonObject | None) -> str:
    if found is None:
        return "no drafts"
    return f"{found['length']:.3f} ({' '.join(f'{share:.0%}' for share in found['accepted'])})"
