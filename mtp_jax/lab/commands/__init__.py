"""Subcommands of the laboratory, found as entry points: see ``mtp_jax.commands.cli``."""
