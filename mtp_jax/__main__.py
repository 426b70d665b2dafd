"""`python -m mtp_jax`."""

import sys

from mtp_jax.cli import main

sys.exit(main())
