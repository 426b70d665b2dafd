"""Parameters: the trees of ``specs`` as pytrees of jax, with an array in the place of every ``Spec``.

Layers are a tuple of per-layer trees; a runner on a CPU has stacks of layers alike instead (``stack``).
Code with jax imports the trees from this module, which registers them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layer_specs import Attention, GqaAttention, Layer, Mlp, Moe
from mtp_jax.model.nextn_specs import NextN
from mtp_jax.model.spec import Spec, Tree, watch_trees
from mtp_jax.model.specs import DraftRows, Params, param_specs
from mtp_jax.model.v4_specs import CompressedAttention, Compressor, Hyper, HyperHead

__all__ = [
    "Attention", "CompressedAttention", "Compressor", "DraftRows", "GqaAttention", "Hyper", "HyperHead",
    "Layer", "Mlp", "Moe", "NextN", "Params", "Spec", "dtype_of", "init_params", "init_tree", "param_specs",
    "shapes", "type_of",
]  # fmt: skip

# `flax.struct` declares every other pytree; these classes are declared without jax, and flax imports it.
watch_trees(jax.tree_util.register_dataclass)


type_of = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def dtype_of(spec: Spec, dtype: str) -> np.dtype:
    """The jax dtype an array of this spec has in a model of ``dtype``."""
    return np.dtype(np.int32 if spec.ids else type_of[spec.dtype(dtype)])


def init_params(cfg: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Random parameters: N(0, 1/fan_in) for matrices, N(0, 0.02^2) for embeddings, one for norms."""
    return init_tree(param_specs(cfg), key, dtype)


def init_tree(specs: Tree, key: jax.Array, dtype: str = "float32") -> Tree:
    """``init_params`` of a tree of specs."""
    leaves, tree = jax.tree.flatten(specs)

    def init(i: int, spec: Spec) -> jax.Array:
        kind = dtype_of(spec, dtype)
        if spec.init in ("ones", "zeros"):
            return jnp.full(spec.shape, float(spec.init == "ones"), kind)
        std = 0.02 if spec.init == "embedding" else 1 / math.sqrt(spec.tensor_shape[-1])
        return (jax.random.normal(jax.random.fold_in(key, i), spec.shape) * std).astype(kind)

    return tree.unflatten([init(i, s) for i, s in enumerate(leaves)])


def shapes(tree: Tree) -> Tree:
    """The shapes, dtypes and, where they were chosen, shardings of a tree of arrays, or of their shapes."""

    def shape_of(a: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        chosen = isinstance(a, jax.ShapeDtypeStruct) or a.committed
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if chosen else None)

    return jax.tree.map(shape_of, tree)
