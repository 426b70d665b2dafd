"""`mtp-jax train`: run or resume a training recipe."""

import argparse
from pathlib import Path

from mtp_jax.commands import show
from mtp_jax.commands.parser import Subparsers
from mtp_jax.errors import ConfigError


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "train",
        help="train a small model with its NextN layer",
        description="Run a training recipe, or resume it where it was interrupted.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="the recipe, a TOML file; the paths in it are relative to its folder",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="checkpoints, losses, the model"
    )
    parser.add_argument(
        "--packages", type=Path, metavar="DIR", help="the wheels of the packages that the recipe names"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train. Returns the exit status."""
    from mtp_jax.lab.train.recipe import Recipe

    recipe = Recipe.from_file(args.config)
    try:
        from mtp_jax.lab.train.loop import train
    except ModuleNotFoundError as error:
        missing = error.name
        raise ConfigError(f"training needs {missing}; install it with: pip install {missing}") from error
    show.write(f"{train(recipe, args.out, packages_dir=args.packages)}\n")
    return 0
