"""`python -m mtp_jax.train --config recipe.toml --out DIR`: run or resume a training recipe."""

import argparse
import sys

from mtp_jax.errors import MtpJaxError
from mtp_jax.train.loop import train
from mtp_jax.train.recipe import Recipe


def main() -> int:
    """Parse the arguments and train; 0 on success, 1 with a message on an error the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m mtp_jax.train", description=__doc__)
    parser.add_argument("--config", required=True, help="recipe, a TOML file")
    parser.add_argument("--out", required=True, help="output directory; an interrupted run there is resumed")
    args = parser.parse_args()
    try:
        print(train(Recipe.from_file(args.config), args.out))
    except MtpJaxError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
