"""`python -m mtp_jax`."""

from mtp_jax.cli import entry

entry()
