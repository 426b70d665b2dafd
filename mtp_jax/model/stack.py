"""Trees of the same shapes as one tree whose arrays have one axis more: a loop over layers reads it in place.

A backend chooses the layers to stack (``Backend.arranged``); all other code sees layers one by one.
"""

from collections.abc import Iterable, Sequence
from typing import Generic

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Int, PyTree

from mtp_jax.model.narrow import InStack, Narrow, index, is_narrow, readable, with_bits, without_bits
from mtp_jax.model.spec import Tree

# XLA on a CPU uses a host array without a copy if it begins at a multiple of this number of bytes.
_ALIGNMENT = 64


@struct.dataclass
class Stack(Generic[Tree]):
    """n trees of the same structure, shapes and dtypes.

    Attributes:
        tree: every array with a first axis of n.
    """

    tree: Tree

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.tree)[0])

    @property
    def size(self) -> int:
        """Length of the first axis of each tree."""
        return jax.tree.leaves(self.tree)[0].shape[1]

    @property
    def flat(self) -> Tree:
        """One tree, in whose arrays the first axes of all trees are one behind the other."""
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), self.tree)

    def with_flat(self, flat: Tree) -> "Stack[Tree]":
        """A stack of the same sizes with other contents of ``flat``."""
        return Stack(jax.tree.map(lambda a: a.reshape(-1, self.size, *a.shape[1:]), flat))


def each(groups: Iterable[Tree | Stack[Tree]]) -> list[tuple[Tree, tuple[int, ...]]]:
    """Trees and stacks, tree by tree: (the group's own tree, the first index of its arrays)."""
    found = []
    for group in groups:
        if isinstance(group, Stack):
            found += [(group.tree, (i,)) for i in range(len(group))]
        else:
            found.append((group, ()))
    return found


def one_of(stack: Stack[Tree], i: Int[Array, ""]) -> Tree:
    """Tree ``i`` of a stack. Weights that loops can read are read in place, arrays are sliced."""

    def weight(w: Array | Narrow) -> Array | Narrow:
        return InStack(w, i) if readable(w) and not isinstance(w, InStack) else index(w, i)

    return jax.tree.map(weight, stack.tree, is_leaf=is_narrow)


def alike(trees: Sequence[Tree]) -> list[list[Tree]]:
    """Groups of neighbouring trees of the same structure, shapes and dtypes."""

    def form(tree: Tree) -> tuple[object, list[tuple[tuple[int, ...], np.dtype]]]:
        return jax.tree.structure(tree), [(a.shape, a.dtype) for a in jax.tree.leaves(tree)]

    groups: list[list[Tree]] = []
    for tree in trees:
        if groups and form(groups[-1][-1]) == form(tree):
            groups[-1].append(tree)
        else:
            groups.append([tree])
    return groups


def stacked(trees: list[Tree], consume: bool = False) -> Stack[Tree]:
    """A stack of trees on a CPU: the memory of the trees if they are ``parts`` of a stack, else a copy.

    Trees of ``jax.ShapeDtypeStruct`` give a stack of ``jax.ShapeDtypeStruct``: no memory is taken.

    consume: empty the list; if the caller keeps no reference, only one weight is in memory twice at a time.
    """
    form = jax.tree.structure(trees[0], is_leaf=is_narrow)
    leaves = [jax.tree.leaves(tree, is_leaf=is_narrow) for tree in trees]
    if consume:
        trees.clear()
    whole = []
    for k in range(form.num_leaves):
        whole.append(_stacked([own[k] for own in leaves]))
        if consume:
            for own in leaves:
                own[k] = None
    return Stack(form.unflatten(whole))


def parts(stack: Stack[Tree]) -> list[Tree]:
    """The trees of a stack as views of its memory, without a copy, on a CPU."""

    def part(w: PyTree, i: int) -> PyTree:
        return _kept(w, jax.tree.map(lambda a: np.asarray(a)[i], without_bits(w)))

    return [jax.tree.map(lambda w, i=i: part(w, i), stack.tree, is_leaf=is_narrow) for i in range(len(stack))]


def _stacked(weights: Sequence[Tree]) -> Tree:
    """A weight of every layer."""
    if isinstance(jax.tree.leaves(weights[0])[0], jax.ShapeDtypeStruct):
        n = len(weights)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape), a.dtype), weights[0])
    bare = [without_bits(w) for w in weights]
    return _kept(weights[0], jax.tree.map(lambda *arrays: _together([*map(np.asarray, arrays)]), *bare))


def _kept(like: PyTree, bare: PyTree) -> PyTree:
    """A weight of host arrays on the device, in the same memory, and with bits if ``like`` has them."""
    placed = jax.tree.map(lambda a: jax.device_put(a, may_alias=True), bare)
    return placed if without_bits(like) is like else with_bits(placed)


def _together(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one shape as one array, aligned so that XLA uses it without a copy."""
    first, size = arrays[0], arrays[0].nbytes
    if all(a.ctypes.data == first.ctypes.data + i * size for i, a in enumerate(arrays)):
        return np.lib.stride_tricks.as_strided(
            first, (len(arrays), *first.shape), (size, *first.strides), writeable=False
        )
    memory = np.empty(len(arrays) * size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    out = memory[start : start + len(arrays) * size].view(first.dtype).reshape(len(arrays), *first.shape)
    for to, array in zip(out, arrays, strict=True):
        np.copyto(to, array)
    return out
