"""Kernels for NVIDIA Hopper GPUs in Pallas Mosaic GPU; they need only jax and numpy.

One folder per operation, the same files in each:

    api.py         the function that a model calls; ``implementation`` chooses kernel or reference
    reference.py   the operation in plain jnp: the oracle, and the implementation without such a GPU
    mosaic_gpu.py  the kernel
    cases.py       ``shapes()`` at which it is checked, compiled and timed, and the ``case()`` of each
    bench.py       baselines on a GPU, to compare times with; where there is none, XLA compiles the reference

``checking`` defines a case; ``python -m kernels_pallas.check`` runs the cases on a Hopper machine.
"""
