"""Measurements: ``python -m mtp_jax.bench depth|acceptance|window|host|startup`` (docs/benchmarks.md).

Nothing here judges a time. Variants are compared inside one process, in alternating runs, by the median of
ratios.
"""
