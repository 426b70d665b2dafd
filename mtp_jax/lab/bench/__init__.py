"""Measurements: ``mtp-jax bench NAME`` (docs/benchmarks.md).

No measurement judges a time. Variants are compared inside one process, in alternating runs, by the median of
ratios.
"""
