"""A parameter as it is declared, without jax: its shape, dtype, logical axes, initialiser, tensors.

Trees of them are in ``specs``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, dataclass_transform

from mtp_jax.model.hf_quantization import FP8_BLOCK

RULES: dict[str | None, tuple[str, ...] | str | None] = {
    None: None,
    "slots": "data",
    "pages": "data",
    "heads": "model",
    "mlp": "model",
    "vocab": "model",
    "experts": ("data", "model"),
}
"""The axes of a mesh that a logical axis is split over."""

Names = str | tuple[Any, ...]
"""A checkpoint tensor, or nested tuples of tensors."""

Tree = TypeVar("Tree")
"""A tree of parameters, of arrays, or of a description of each."""

_ITEMSIZE = {"float32": 4, "int32": 4, "bfloat16": 2}


def ways(axis: str | None, mesh: Mapping[str, int]) -> int:
    """Number of parts that a dimension with this logical axis is split into; mesh: sizes of its axes."""
    over = RULES[axis]
    names = (over,) if isinstance(over, str) else over or ()
    return math.prod(mesh[name] for name in names)


@dataclass(frozen=True)
class Spec:
    """One parameter array.

    Attributes:
        shape: shape of the array.
        axes: logical axis of each dimension (``RULES`` maps them to mesh axes).
        names: checkpoint tensors, nested like the leading dimensions that stack them; a plain string if one
            tensor is the whole array.
        tensor_shape: shape of each such tensor in the checkpoint.
        init: "normal" (1/sqrt(fan_in)), "embedding", "ones" or "zeros".
        float32: kept in float32 under any dtype of the model.
        ids: kept in int32, as it holds no weights but token ids.
        rows: part ``[start, stop)`` of every head's rows, of a tensor that holds ``heads`` groups of rows.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    names: Names
    tensor_shape: tuple[int, ...]
    init: str = "normal"
    float32: bool = False
    ids: bool = False
    rows: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def projects(self) -> bool:
        """Whether its tensors may be narrow."""
        name = self.names
        while not isinstance(name, str):
            name = name[0]
        return may_be_narrow(name)

    def dtype(self, dtype: str) -> str:
        """The dtype of the array in a model of ``dtype``."""
        return "int32" if self.ids else "float32" if self.float32 else dtype

    def nbytes(self, dtype: str) -> int:
        """Bytes of the array in a model of ``dtype``: "float32" or "bfloat16"."""
        return self.size * _ITEMSIZE[self.dtype(dtype)]

    def parts(self, mesh: Mapping[str, int]) -> int:
        """Number of parts that a mesh splits the array into; mesh: sizes of its axes."""
        return math.prod(ways(axis, mesh) for axis in self.axes)


_T = TypeVar("_T")
_TREES: list[type] = []
_WATCHERS: list[Callable[[type], object]] = []


@dataclass_transform(frozen_default=True)
def parameters(cls: type[_T]) -> type[_T]:
    """Declare a part of a tree of parameters: a frozen dataclass, which ``params`` registers with jax."""
    made = dataclass(frozen=True)(cls)
    _TREES.append(made)
    for see in _WATCHERS:
        see(made)
    return made


def watch_trees(see: Callable[[type], object]) -> None:
    """Call ``see`` with every class of ``parameters``, now or when it is declared."""
    _WATCHERS.append(see)
    for tree in _TREES:
        see(tree)


def leaves(tree: object) -> Iterator[Spec]:
    """Every spec of a tree of specs, or of several in a tuple, in the order of ``jax.tree.leaves``."""
    if isinstance(tree, Spec):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from leaves(part)
    elif is_dataclass(tree):
        for f in fields(tree):
            yield from leaves(getattr(tree, f.name))


def count(tree: object) -> int:
    """Number of parameters in a tree of specs."""
    return sum(spec.size for spec in leaves(tree))


_PROJECTIONS = (
    *("_proj.weight", "_proj_with_mqa.weight", ".wq_a.weight", ".wq_b.weight", ".indexer.wk.weight"),
    *(".attn.wkv.weight", ".wo_a.weight", ".wo_b.weight", ".w1.weight", ".w2.weight", ".w3.weight"),
)


def may_be_narrow(name: str) -> bool:
    """Whether a tensor may be narrow: projections, but not tables, norms, routers, compressors or eh_proj."""
    return name.endswith(_PROJECTIONS) and not name.endswith(("eh_proj.weight", ".weights_proj.weight"))


def scale_name(weight: str) -> str:
    """Name of the tensor with an FP8 or FP4 weight's scales; DeepSeek-V4's release has a name of its own."""
    if weight.startswith(("layers.", "mtp.")):
        return f"{weight.removesuffix('weight')}scale"
    return f"{weight}_scale_inv"


def scale_spec(spec: Spec) -> Spec:
    """The spec of the scales of an FP8 weight.

    ``rows`` of a spec, if it has any, must lie in blocks that no other head has a part of.
    """
    stacked = _stacked(spec.names)
    blocks = tuple(-(-n // FP8_BLOCK) for n in spec.tensor_shape)
    names = _renamed(spec.names, scale_name)
    inner = spec.axes[stacked:]
    if spec.rows is not None:
        rows = spec.rows[0] // FP8_BLOCK, -(-spec.rows[1] // FP8_BLOCK)
        shape = spec.shape[0], rows[1] - rows[0], blocks[1]
        return Spec(shape, spec.axes, names, blocks, float32=True, rows=rows)
    if len(inner) == 3:  # rows or columns are split into groups; blocks follow the groups
        inner = (inner[0], inner[2]) if spec.shape[-1] == spec.tensor_shape[1] else (inner[0], inner[1])

    shape, axes = (*spec.shape[:stacked], *blocks), (*spec.axes[:stacked], *inner)
    return Spec(shape, axes, names, blocks, float32=True)


def columns_spec(spec: Spec, rename: Callable[[str], str], columns: int) -> Spec:
    """The spec of an array with the rows of a weight and ``columns`` columns, split as the weight is.

    rename: names of its tensors by the names of the weight's. The last two axes of ``spec`` must belong to
    its tensors.
    """
    shape, tensor_shape = (*spec.shape[:-1], columns), (spec.tensor_shape[0], columns)
    return Spec(shape, spec.axes, _renamed(spec.names, rename), tensor_shape)


def _renamed(names: Names, rename: Callable[[str], str]) -> Names:
    return rename(names) if isinstance(names, str) else tuple(_renamed(n, rename) for n in names)


def _stacked(names: Names) -> int:
    """Number of leading dimensions of a parameter along which tensors of the checkpoint are stacked."""
    return 0 if isinstance(names, str) else 1 + _stacked(names[0])
