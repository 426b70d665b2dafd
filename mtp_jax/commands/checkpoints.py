"""`mtp-jax export-nextn` and `mtp-jax convert`: write checkpoints in other layouts."""

import argparse
from pathlib import Path

from mtp_jax.api.demo import path_of
from mtp_jax.api.progress import Terminal
from mtp_jax.commands import show
from mtp_jax.commands.options import add_head, draft_folder, model_dir
from mtp_jax.commands.parser import Parser, Subparsers, add_revision, mesh_shape


def register(subparsers: Subparsers) -> None:
    """Declare both subcommands."""
    export = subparsers.add_parser(
        "export-nextn",
        help="write a model's NextN layers to a directory of their own",
        description="Write a model's NextN layers, as they are, to a directory of their own, which "
        "--draft-model reads, and SGLang or xLLM.",
    )
    _add_model(export)
    export.add_argument("out", type=Path, help="an empty or a new directory")
    export.add_argument(
        "--layout", choices=("lmsys", "xllm"), default="lmsys", help="lmsys: SGLang's (default: lmsys)"
    )
    export.set_defaults(run=run_export)

    convert = subparsers.add_parser(
        "convert",
        help="write a model in the Orbax layout",
        description="Write a model with Orbax, in the engine's own shapes and dtype: every device then reads "
        "its own part.",
    )
    _add_model(convert)
    convert.add_argument("out", type=Path, help="an empty or a new directory")
    add_head(convert, "a drafter to take along")
    convert.add_argument(
        "--num-nextn-layers", type=int, metavar="N", help="NextN layers to take along (default: all)"
    )
    convert.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: bfloat16"
    )
    convert.add_argument(
        "--mesh", type=mesh_shape, metavar="DATAxMODEL", help="convert on several devices (default: on one)"
    )
    convert.set_defaults(run=run_convert)


def _add_model(parser: Parser) -> None:
    parser.add_argument(
        "model", type=path_of, help="directory with config.json and weights, a GGUF file, or --model DIR"
    )
    parser.model_first = True
    add_revision(parser)


def run_export(args: argparse.Namespace) -> int:
    """Write the NextN layers. Returns the exit status."""
    from mtp_jax.checkpoint import export_nextn

    with Terminal().phase("export"):
        export_nextn(model_dir(args), args.out, args.layout)
    show.write(f"{args.out}\n")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Write the Orbax checkpoint. Returns the exit status."""
    from mtp_jax.checkpoint import convert
    from mtp_jax.model.sharding import make_mesh

    mesh = make_mesh(*args.mesh) if args.mesh else None
    with Terminal().phase("convert", "B") as update:
        convert(
            model_dir(args),
            args.out,
            draft_folder(args),
            num_nextn_layers=args.num_nextn_layers,
            dtype=args.dtype,
            mesh=mesh,
            progress=update,
        )
    show.write(f"{args.out}\n")
    return 0
