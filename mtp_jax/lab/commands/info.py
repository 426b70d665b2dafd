"""`mtp-jax info`: contents and needs of a checkpoint, from its headers, or from a config.json, alone."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from mtp_jax.commands import show
from mtp_jax.commands.options import add_head, draft_folder, model_dir
from mtp_jax.commands.parser import Subparsers, add_model, add_value, positive, positive_number
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.planning.hardware import GPUS, gpu_named
from mtp_jax.lab.planning.weights import drafts
from mtp_jax.model.draft_vocab import FILE, listed
from mtp_jax.model.family import config_json
from mtp_jax.model.room import MEMORY_FRACTION, OVERHEAD, Room
from mtp_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mtp_jax.checkpoint import Summary

_GIB = 2**30
# Arguments that --machine has no use for, with their defaults.
_OF_CHECKPOINTS = {
    **dict.fromkeys(("model", "draft_model", "num_nextn_layers", "gpu", "memory_fraction")),
    "gpus": 1,
}


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "info",
        help="describe a checkpoint",
        description="Describe a checkpoint. No weights are read; a config.json alone will do.",
    )
    add_model(parser, "directory (default: the demo model)")
    add_head(parser, "NextN layers or a head in a directory of their own")
    add_value(parser, "--num-nextn-layers", None, "NextN layers to count (default: all)", int, "N")
    add_value(parser, "--gpus", 1, "tell the memory of each of N GPUs", positive, "N")
    named = f"tell the cache that each has room for: {', '.join(GPUS)}"
    add_value(parser, "--gpu", None, named, str, "NAME")
    used = f"share of the GPU's memory that is used (default: {MEMORY_FRACTION:g})"
    add_value(parser, "--memory-fraction", None, used, positive_number, "F")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--machine",
        action="store_true",
        help="describe this machine instead: versions, instructions, forms of programs, measured peaks; "
        "a report of a defect needs them",
    )
    parser.set_defaults(weights=False, run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary. Returns the exit status."""
    if args.machine:
        return _machine(args)
    from mtp_jax.checkpoint import summarise
    from mtp_jax.checkpoint.summary import by_dtype

    directory = model_dir(args)
    summary = summarise(directory, draft_folder(args), args.num_nextn_layers, args.gpus)
    tokenizer, room = Tokenizer.from_dir(directory), _room(args, summary)
    if args.json:
        found = _object(summary, tokenizer, room) | {"draft_vocab": _draft_vocab(args, summary)}
        show.write(json.dumps(found, indent=2) + "\n")
        return 0
    per_gib = ", ".join(f"{_GIB // n:,} tokens as {k}" for k, n in summary.cache_bytes_per_token.items())
    has = "none"
    if tokenizer:
        has = f"{tokenizer.vocab_size:,} ids, {'a' if tokenizer.has_chat_template else 'no'} chat template"
    rows = {"cache per GiB": per_gib, "tokenizer": has}
    if tokens := _draft_vocab(args, summary):
        rows["draft vocabulary"] = f"{len(tokens):,} of {summary.config.vocab_size:,} tokens ({FILE})"
    if args.gpus > 1:
        each = by_dtype(summary.weight_bytes_per_device)
        rows[f"each of {args.gpus} GPUs"] = f"{each}; the cache is whole on each (--mesh 1x{args.gpus})"
    if room:
        tokens = ", ".join(f"{n:,} tokens as {k}" for k, n in _tokens(summary, room).items())
        rows[f"cache on {args.gpu.upper()}"] = f"{tokens}: {room}, with weights in {_narrowest(summary)}"
    show.write(f"{directory}\n{summary.text()}\n")
    show.write("".join(f"{name:<20}{value}\n" for name, value in rows.items()))
    return 0


def _machine(args: argparse.Namespace) -> int:
    beside = [name for name, default in _OF_CHECKPOINTS.items() if getattr(args, name) != default]
    beside += [name for name in ("draft_captures", "drafter") if name in args]
    if beside:
        raise ConfigError(f"--machine describes this machine, no checkpoint; leave out: {', '.join(beside)}")
    from mtp_jax.lab.bench.figures import figures, lines

    found = figures()
    show.write(json.dumps(found, indent=2) + "\n" if args.json else lines(found))
    return 0


def _draft_vocab(args: argparse.Namespace, s: "Summary") -> tuple[int, ...] | None:
    """The tokens that drafts choose among; None: all, or a head with an output table of its own."""
    if not s.config.drafts or any(p.head is not None for p in drafts(s.config)):
        return None
    folders = [model_dir(args), *filter(None, [args.draft_model])]
    return listed(None, folders, s.config.vocab_size)


def _room(args: argparse.Namespace, s: "Summary") -> Room | None:
    """Room for the cache on each GPU, if a GPU is named, with the same sum as ``plan``."""
    if args.gpu is None:
        if args.memory_fraction is not None:
            raise ConfigError(f"--memory-fraction {args.memory_fraction:g} is of a GPU; name one with --gpu")
        return None
    fraction = MEMORY_FRACTION if args.memory_fraction is None else args.memory_fraction
    if fraction > 1:
        raise ConfigError(f"memory_fraction = {fraction:g}; expected above 0, at most 1")
    weights = s.weight_bytes_per_device[_narrowest(s)]
    return Room(gpu_named(args.gpu).memory, fraction, float(weights), OVERHEAD)


def _narrowest(s: "Summary") -> str:
    """The smallest form of the weights: the checkpoint's own, if it is quantised, else bfloat16."""
    return min(s.weight_bytes, key=s.weight_bytes.__getitem__)


def _tokens(s: "Summary", room: Room) -> dict[str, int]:
    return {kind: room.holds(size) for kind, size in s.cache_bytes_per_token.items() if kind != "float32"}


def _object(s: "Summary", tokenizer: Tokenizer | None, room: Room | None) -> JsonObject:
    return asdict(s) | {
        "config": config_json(s.config),
        "cache_tokens_per_gib": {k: _GIB // n for k, n in s.cache_bytes_per_token.items()},
        "cache_tokens_per_gpu": room and _tokens(s, room),
        "tokenizer": tokenizer
        and {"ids": tokenizer.vocab_size, "chat_template": tokenizer.has_chat_template},
    }
