"""Kernels for NVIDIA Hopper GPUs in Pallas Mosaic GPU; they need only jax and numpy.

One folder per operation, the same files in each:

    api.py         the function that a model calls; ``implementation`` chooses kernel or reference
    reference.py   the operation in plain jnp: the oracle, and the implementation without such a GPU
    mosaic_gpu.py  the kernel

``measured`` has their times on GPUs. A clone has tools, too, which a wheel leaves out: ``check`` defines
cases and runs them on a Hopper GPU, ``deviceless`` compiles them without one.
"""

# One folder each.
KERNELS: tuple[str, ...] = (
    "mla_decode",
    "mla_prefill",
    "mla_low_rank",
    "mla_absorb",
    "mla_values",
    "rms_norm",
    "router",
    "expert_layout",
    "grouped_matmul",
    "fp8_matmul",
    "index_scores",
    "top_k",
    "hyper",
)

# Forms of a kernel whose speed no time of its other forms tells; so the names of their cases begin.
FORMS: tuple[str, ...] = ("grouped_matmul/fp4",)
