"""Kernels for NVIDIA Hopper GPUs in Pallas Mosaic GPU; they stand on jax and numpy alone.

One folder per operation, the same files in each:

    api.py         the function that a model calls; ``implementation`` names who computes it
    reference.py   the operation in plain jnp: the oracle, and the implementation without such a GPU
    mosaic_gpu.py  the kernel
    cases.py       ``shapes()`` that it is checked, compiled and timed at, and the ``case()`` of each
    bench.py       baselines on a GPU, to compare times with; where there is none, XLA compiles the reference

``checking`` declares what a case is; ``python -m kernels_pallas.check`` runs the cases on a Hopper machine.
"""
