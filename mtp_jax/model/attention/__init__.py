"""Attention by kinds (MLA, sparse or not, and grouped-query) over sources of rows (``source``).

``Latent`` and ``Gqa`` have a kind's equations in plain XLA, and are the oracles of the faster forms:
``CpuLatent`` for a CPU, ``HopperLatent`` by kernels for a Hopper GPU. A backend has one form of each.
"""
