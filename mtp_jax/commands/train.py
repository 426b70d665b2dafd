"""`mtp-jax train`: run or resume a training recipe."""

import argparse
import importlib
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
    try:
        importlib.import_module("matplotlib")  # for the first checkpoint, minutes later
        from mtp_jax.train.loop import train
        from mtp_jax.train.recipe import Recipe
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"training needs {error.name}; install it with: pip install 'mtp-jax[train]'"
        ) from error
    show.write(f"{train(Recipe.from_file(args.config), args.out, packages_dir=args.packages)}\n")
    return 0
