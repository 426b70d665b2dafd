"""Load a checkpoint: each parameter is read, converted and placed on its devices before the next one."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import DTypeLike

from mtp_jax.checkpoint import fp8, nvfp4
from mtp_jax.checkpoint.formats import Kept, Stored, format_of, spec_names, staying, tensors_of
from mtp_jax.checkpoint.plan import LoadPlan
from mtp_jax.checkpoint.safetensors_file import DTYPES, Tensor
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import platform
from mtp_jax.model.family import family_of
from mtp_jax.model.narrow import Fp8, Narrow, with_bits
from mtp_jax.model.params import Params, Spec, dtype_of, type_of
from mtp_jax.model.sharding import check_divisible, param_sharding, ways

# Bytes read at a time: they fit the caches next to a core, so that their copy into the array costs little.
_PIECE_BYTES = 1 << 20
_MANY = 4

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    """A model in memory. ``config`` counts the NextN layers loaded, ``bytes_read`` the bytes read from
    files."""

    config: ModelConfig
    params: Params
    bytes_read: int


@dataclass(frozen=True)
class Loader:
    """Reads the tensors of a plan as parameters.

    Attributes:
        dtype: "float32" or "bfloat16", of everything but norms and routers.
        keep: names of the ways of storing (``formats.STORED``) in which weights stay in memory.
        mesh: devices that each read their part; None: one device.
        progress: called with (bytes read, bytes to read) after every array.
        layers: whether the trunk's layers are read; without, there are none.
        on_host: whether parameters become arrays of the host.
    """

    dtype: str = "float32"
    keep: Collection[str] = ()
    mesh: Mesh | None = None
    progress: OnProgress | None = None
    layers: bool = True
    on_host: bool = False

    def load(self, plan: LoadPlan) -> Loaded:
        """Read a plan, without copies of the trunk's tensors. Errors: see ``read``."""
        if self.dtype not in type_of:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; expected one of {', '.join(type_of)}")
        check_divisible(plan.config, self.mesh)
        return self.read(plan, frozenset(name for name in plan.duplicates if not is_copy(plan, name)))

    def read(self, plan: LoadPlan, own: frozenset[str]) -> Loaded:
        """Read a plan. own: duplicates that differ from the trunk's tensors, and are kept.

        Raises CheckpointError for damaged or contradicting tensors, ConfigError for blocks split by a mesh.
        """
        plan = plan.keeping(own)
        count = _Counter(plan.tensors, self.progress)
        count.add(*plan.duplicates)
        names = family_of(plan.config).names
        if names.head in own:
            raise CheckpointError(
                f"{plan.tensors[names.head]} differs from {names.embed}, but config.json says "
                "tie_word_embeddings = true; expected equal bytes, or false"
            )
        specs = plan.specs(own)
        _check_tables(specs, plan)
        leaves, tree = jax.tree.flatten(specs if self.layers else replace(specs, layers=()))
        arrays: list[Any] = []
        for spec in leaves:
            stays = staying(spec, plan.tensors, self.keep)
            if stays is not None:
                arrays.append(self._place_narrow(stays, spec, plan.tensors))
            else:
                arrays.append(self._place(spec, plan.tensors, dtype_of(spec, self.dtype)))
            count.add(*spec_names(spec).flat)
        return Loaded(plan.config, tree.unflatten(arrays), count.done)

    def _place(self, spec: Spec, tensors: Mapping[str, Tensor], kind: DTypeLike) -> jax.Array | np.ndarray:
        """Turns a parameter into an array at its place."""
        if self.mesh is None:
            whole = read_slice(spec, tensors, kind, (slice(None),) * len(spec.shape))
            return whole if self.on_host else jax.device_put(whole)
        pieces: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}

        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or ()
            key = tuple(s.indices(n) for s, n in zip(index, spec.shape, strict=True))
            if key not in pieces:
                pieces[key] = read_slice(spec, tensors, kind, index)
            return pieces[key]

        return jax.make_array_from_callback(spec.shape, param_sharding(spec, self.mesh), piece)

    def _place_narrow(self, stored: Stored, spec: Spec, tensors: Mapping[str, Tensor]) -> Narrow:
        arrays = stored.arrays(spec, tensors)
        check_blocks(stored, spec, arrays, self.mesh)
        for name in spec_names(spec).flat:
            stored.check(tensors, str(name))
        kept = stored.kept(*(self._place(a.spec, tensors, a.dtype) for a in arrays))
        if self.mesh is not None or platform() != "cpu":
            return kept
        if isinstance(kept, Fp8) and fp8.has_nan(np.asarray(kept.values)):
            name = spec_names(spec).flat[0]
            raise CheckpointError(f"{name}: NaN among its values; expected numbers: the file is damaged")
        return with_bits(kept)


def check_blocks(stored: Stored, spec: Spec, arrays: Sequence[Kept], mesh: Mesh | None) -> None:
    """Raise ConfigError for a parameter whose blocks a mesh would split. arrays: as it stays in memory."""
    axes = arrays[-1].spec.axes[-2:]
    for size, unit, axis in zip(spec.tensor_shape, stored.block(arrays), axes, strict=True):
        devices = ways(axis, mesh)
        if devices > 1 and size % (unit * devices):
            raise ConfigError(
                f"{spec_names(spec).flat[0]}: {size} of {axis} do not divide over {devices} devices in "
                f"{stored.name} blocks of {unit}; choose another mesh, or narrow='dequantise'"
            )


def _check_tables(specs: Params, plan: LoadPlan) -> None:
    """Check the tables of experts by token. Raises CheckpointError for a number that is no expert's."""
    experts = plan.config.n_routed_experts
    for layer in specs.layers:
        if not (moe := layer.moe) or moe.by_token is None:
            continue
        tensor = plan.tensors[moe.by_token.names]
        ids = tensor.array()
        wrong = np.argwhere((ids < 0) | (ids >= experts))
        if len(wrong):
            token, at = wrong[0]
            raise CheckpointError(
                f"{tensor} gives token {token} expert {ids[token, at]}; expected 0 to {experts - 1} "
                f"(n_routed_experts = {experts})"
            )


class _Counter:
    """Bytes read so far; every tensor counts once."""

    def __init__(self, tensors: Mapping[str, Tensor], progress: OnProgress | None):
        self.tensors, self.progress, self.seen, self.done = tensors, progress, set(), 0
        self.total = sum(t.nbytes for t in tensors.values())

    def add(self, *names: str) -> None:
        new = {n for name in names for n in tensors_of(name) if n in self.tensors} - self.seen
        self.seen |= new
        self.done += sum(self.tensors[n].nbytes for n in new)
        if self.progress:
            self.progress(self.done, self.total)


def is_copy(plan: LoadPlan, name: str) -> bool:
    """Whether a possible duplicate holds the same values as the trunk's tensor, compared in pieces."""
    a, b = plan.tensors[name], plan.tensors[plan.duplicates[name]]
    kind = np.uint8 if a.dtype == b.dtype else np.float32

    def values(tensor: Tensor, rows: range) -> np.ndarray:
        found = tensor.array(rows)
        return found.view(kind) if kind == np.uint8 else found.astype(kind)

    pieces = _pieces(range(a.shape[0]), a.nbytes // a.shape[0])
    return all(np.array_equal(values(a, rows), values(b, rows)) for rows in pieces)


def _pieces(rows: range, row_bytes: int) -> Iterator[range]:
    """Ranges of rows, each read at once."""
    count = max(1, _PIECE_BYTES // max(row_bytes, 1))
    return (rows[i : i + count] for i in range(0, len(rows), count))


def read_slice(
    spec: Spec, tensors: Mapping[str, Tensor], kind: DTypeLike, index: tuple[slice, ...]
) -> np.ndarray:
    """The part ``index`` of a parameter as a new array of dtype ``kind``; only its bytes are read.

    uint8 means the bytes of a tensor, whose values take one each.
    Where a parameter splits a tensor's dimension (heads x head dim), ``index`` must take whole groups.
    """
    bounds = [s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True)]
    names = spec_names(spec)
    lead, rest = bounds[: names.ndim], bounds[names.ndim :]
    chosen = np.asarray(names[tuple(slice(begin, end) for begin, end in lead)], dtype=object)
    out = np.empty([b - a for a, b in bounds], kind)

    def fill(at: tuple[int, ...]) -> None:
        _fill(out[at], spec, spec.shape[names.ndim :], rest, tensors, str(chosen[at]))

    if chosen.size < _MANY:
        for at in np.ndindex(chosen.shape):
            fill(at)
    else:  # experts, nearly all of a model: numpy reads and converts them without the interpreter's lock
        with ThreadPoolExecutor() as pool:
            list(pool.map(fill, np.ndindex(chosen.shape)))
    return out


def _fill(
    out: np.ndarray,
    spec: Spec,
    shape: tuple[int, ...],
    bounds: list[tuple[int, int]],
    tensors: Mapping[str, Tensor],
    name: str,
) -> None:
    """Fill ``out`` with the part ``bounds`` of one tensor seen as ``shape``."""
    if name.endswith((nvfp4.TIMES, nvfp4.OVER)):
        out[...] = nvfp4.whole(tensors, name)
        return
    in_bytes = out.dtype == np.uint8
    as_it_is = in_bytes or (name in tensors and DTYPES[tensors[name].dtype] == out.dtype)
    stored = None if as_it_is else format_of(tensors, name)
    if stored is not None:
        stored.check(tensors, name)

    def copy(to: np.ndarray, rows: range, columns: range) -> None:
        for some in _pieces(rows, to[:1].nbytes):
            into = to[some.start - rows.start : some.stop - rows.start]
            if stored is not None:
                stored.read(tensors, name, some, columns, into)
            else:
                source = tensors[name].array(some)[:, columns.start : columns.stop]
                np.copyto(into, source.view(np.uint8) if in_bytes else source, casting="unsafe")

    if len(spec.tensor_shape) != 2:  # split along the first axis at most
        np.copyto(out, tensors[name].array(range(*bounds[0])), casting="unsafe")
    elif len(shape) == 2:
        copy(out, range(*bounds[0]), range(*bounds[1]))
    elif spec.rows is None and math.prod(shape[1:]) == spec.tensor_shape[1]:  # columns are split into groups
        width = shape[2]
        columns = range(bounds[1][0] * width, bounds[1][1] * width)
        copy(out.reshape(out.shape[0], -1), range(*bounds[0]), columns)
    else:  # rows are split into groups; a parameter may be a part of each
        height, (first, _) = spec.tensor_shape[0] // shape[0], spec.rows or (0, 0)
        for i, group in enumerate(range(*bounds[0])):
            start = group * height + first
            copy(out[i], range(start, start + shape[1]), range(*bounds[2]))
