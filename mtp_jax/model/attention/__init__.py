"""Attention by kinds (MLA, sparse or not, and grouped-query) over sources of rows (``source``).

``Latent`` and ``Gqa`` have a kind's equations in plain XLA, and are the oracles of the kinds that a device
does fast: ``CpuLatent`` on a CPU, ``HopperLatent`` by kernels on a Hopper GPU. A backend brings one of each.
"""
