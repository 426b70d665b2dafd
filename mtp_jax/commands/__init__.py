"""The subcommands of `mtp-jax`, a file each: ``register`` declares the options, ``run`` does the work.

Only ``run`` imports modules that need jax, so that help and wrong options are answered at once.
"""
