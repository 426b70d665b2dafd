"""Kernels for NVIDIA Hopper GPUs in Pallas Mosaic GPU; they stand on jax and numpy alone.

One folder per operation, the same files in each:

    api.py         the function that a model calls; ``implementation`` names who computes it
    reference.py   the operation in plain jnp: oracle, and what runs where there is no such GPU
    mosaic_gpu.py  the kernel
    cases.py       ``cases()``: the shapes it is checked, compiled and timed at
    bench.py       what else computes the same thing on a GPU, to compare times with

``checking`` declares what a case is; ``python -m kernels_pallas.check`` runs the cases on a Hopper machine.
"""
