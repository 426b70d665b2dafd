"""Measurements: ``mtp-jax bench NAME`` (docs/benchmarks.md).

Nothing here judges a time. Variants are compared inside one process, in alternating runs, by the median of
ratios.
"""
