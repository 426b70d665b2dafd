"""Storage of weights in files: as plain arrays, or in one of ``FORMATS``, narrower than computation."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mtp_jax.checkpoint import fp4, fp8, int4, nvfp4
from mtp_jax.checkpoint.safetensors_file import DTYPES, Tensor
from mtp_jax.errors import CheckpointError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import family_of
from mtp_jax.model.hf_quantization import FP4_GROUP, FP8_BLOCK, INT4_PER_WORD, NVFP4_GROUP
from mtp_jax.model.narrow import MOST_UE8M0, Bf16, Fp4, Fp8, Int4, Narrow, Nvfp4
from mtp_jax.model.spec import Spec, columns_spec, scale_name, scale_spec

PLAIN = ("F32", "BF16", "F16")
IDS = ("I64", "I32")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class StoredPart:
    """One of the tensors that together store a weight.

    Attributes:
        name: its name.
        dtypes: its allowed dtypes, in safetensors' words.
        shape: its shape.
        why: the source of its shape, for errors.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Kept:
    """One of the arrays of a parameter that stays narrow in memory."""

    spec: Spec
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.spec.size * self.dtype.itemsize


class Stored(Protocol):
    """A way of storing weights that memory can keep, too."""

    @property
    def name(self) -> str:
        """Its name in errors and tables."""
        ...

    @property
    def kept(self) -> type[Narrow]:
        """The class of such a weight in memory; made of the arrays that ``arrays`` lists, in its order."""
        ...

    def holds(self, tensors: Tensors, name: str) -> bool:
        """Whether a weight, by its name in the release, is stored this way."""
        ...

    def check(self, tensors: Tensors, name: str) -> None:
        """Raises CheckpointError for impossible values."""
        ...

    def can_stay(self, spec: Spec) -> bool:
        """Whether a parameter that is stored this way can stay so in memory."""
        ...

    def arrays(self, spec: Spec, tensors: Tensors) -> tuple[Kept, ...]:
        """The arrays that make up such a parameter."""
        ...

    def block(self, arrays: Sequence[Kept]) -> tuple[int, int]:
        """Rows and columns of a block of the weight that must lie whole on one device. arrays: ``arrays``."""
        ...


class Format(Stored, Protocol):
    """A format of quantised weights, which config.json announces."""

    @property
    def mark(self) -> str:
        """The mark of its tensors, for errors: a clause about one of its tensors."""
        ...

    def announced(self, cfg: ModelConfig) -> bool:
        """Whether config.json announces such weights."""
        ...

    def parts(self, cfg: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """The tensors that a weight of this name and shape consists of."""
        ...

    def misfit(self, cfg: ModelConfig, shape: tuple[int, ...]) -> str | None:
        """The reason why a weight of this shape cannot be stored this way; None if it can."""
        ...

    def read(self, tensors: Tensors, name: str, rows: range, columns: range, out: np.ndarray) -> None:
        """Write a rectangle of the weight, dequantised, into ``out``."""
        ...


class _InBf16:
    """Matrices in plain bfloat16, of a model that computes in float32."""

    name, kept = "bf16", Bf16

    def holds(self, tensors: Tensors, name: str) -> bool:
        return name in tensors and tensors[name].dtype == "BF16"

    def check(self, tensors: Tensors, name: str) -> None:
        pass

    def can_stay(self, spec: Spec) -> bool:
        return not spec.float32 and len(spec.tensor_shape) == 2

    def arrays(self, spec: Spec, tensors: Tensors) -> tuple[Kept, ...]:
        return (Kept(spec, DTYPES["BF16"]),)

    def block(self, arrays: Sequence[Kept]) -> tuple[int, int]:
        return 1, 1


class _InFp8:
    """e4m3 with a scale per 128x128 block."""

    name, kept = "fp8", Fp8
    mark = "has dtype F8_E4M3"

    def announced(self, cfg: ModelConfig) -> bool:
        return cfg.fp8

    def holds(self, tensors: Tensors, name: str) -> bool:
        return name in tensors and tensors[name].dtype == "F8_E4M3"

    def parts(self, cfg: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        why = f": one scale per 128x128 block of {list(shape)}"
        scales = family_of(cfg).scales
        return (
            StoredPart(name, ("F8_E4M3",), shape, " from config.json"),
            StoredPart(scale_name(name), scales, fp8.scale_shape(shape), why),
        )

    def misfit(self, cfg: ModelConfig, shape: tuple[int, ...]) -> str | None:
        return None

    def check(self, tensors: Tensors, name: str) -> None:
        _check_finite(tensors[scale_name(name)])

    def read(self, tensors: Tensors, name: str, rows: range, columns: range, out: np.ndarray) -> None:
        blocks = fp8.blocks(rows)
        scale = tensors[scale_name(name)].array(blocks).astype(np.float32)
        fp8.dequantise(tensors[name].array(rows), scale, rows.start % FP8_BLOCK, columns, out)

    def can_stay(self, spec: Spec) -> bool:
        return spec.rows is None

    def arrays(self, spec: Spec, tensors: Tensors) -> tuple[Kept, ...]:
        return Kept(spec, DTYPES["F8_E4M3"]), Kept(scale_spec(spec), DTYPES["F32"])

    def block(self, arrays: Sequence[Kept]) -> tuple[int, int]:
        return FP8_BLOCK, FP8_BLOCK


class _InFp8ByHead(_InFp8):
    """A part of every head's rows of an e4m3 weight, where heads end with blocks; for a CPU alone."""

    name = "fp8 by head"

    def can_stay(self, spec: Spec) -> bool:
        if spec.rows is None or spec.tensor_shape[0] // spec.shape[0] % FP8_BLOCK:
            return False
        start, stop = spec.rows
        return start % FP8_BLOCK == 0 or stop <= -(-start // FP8_BLOCK) * FP8_BLOCK


class _InInt4:
    """compressed-tensors' pack-quantized format."""

    name, kept = "int4", Int4
    mark = "is called weight_packed"

    def announced(self, cfg: ModelConfig) -> bool:
        return cfg.int4_group is not None

    def holds(self, tensors: Tensors, name: str) -> bool:
        return name + int4.PACKED in tensors

    def parts(self, cfg: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        (rows, inputs), group = shape, cfg.int4_group or 1
        of, words, groups = list(shape), inputs // INT4_PER_WORD, inputs // group
        return (
            StoredPart(name + int4.PACKED, ("I32",), (rows, words), f": eight values a word of {of}"),
            StoredPart(name + int4.SCALE, PLAIN, (rows, groups), f": one scale per {group} inputs of {of}"),
            StoredPart(name + int4.SHAPE, ("I64", "I32"), (2,), ": the shape of the weight"),
        )

    def misfit(self, cfg: ModelConfig, shape: tuple[int, ...]) -> str | None:
        unit = math.lcm(INT4_PER_WORD, cfg.int4_group or 1)
        if shape[1] % unit == 0:
            return None
        return f"{shape[1]} inputs are no multiple of {unit}, for {cfg.int4_group} in a group and 8 in a word"

    def check(self, tensors: Tensors, name: str) -> None:
        words, scale, shape = (tensors[name + s] for s in (int4.PACKED, int4.SCALE, int4.SHAPE))
        want = [words.shape[0], words.shape[1] * INT4_PER_WORD]
        if shape.array().tolist() != want:
            raise CheckpointError(f"{shape} is {shape.array().tolist()}; expected {want} from {words.name}")
        _check_finite(scale)

    def read(self, tensors: Tensors, name: str, rows: range, columns: range, out: np.ndarray) -> None:
        words, scale = tensors[name + int4.PACKED].array(rows), tensors[name + int4.SCALE].array(rows)
        int4.dequantise(words, scale, columns, out)

    def can_stay(self, spec: Spec) -> bool:
        return spec.rows is None and spec.shape[-2:] == spec.tensor_shape

    def arrays(self, spec: Spec, tensors: Tensors) -> tuple[Kept, ...]:
        scales = [tensors[f"{name}{int4.SCALE}"] for name in spec_names(spec).flat]
        kinds = {scale.dtype for scale in scales}
        kind = DTYPES[kinds.pop() if len(kinds) == 1 else "F32"]
        return self.declared(spec, spec.tensor_shape[1] // scales[0].shape[1], kind)

    def declared(self, spec: Spec, group: int, kind: np.dtype) -> tuple[Kept, ...]:
        """``arrays`` without tensors, from the size of groups that config.json gives."""
        inputs = spec.tensor_shape[1]
        words = columns_spec(spec, _ending(int4.PACKED), inputs // INT4_PER_WORD)
        scales = columns_spec(spec, _ending(int4.SCALE), inputs // group)
        return Kept(words, DTYPES["I32"]), Kept(scales, kind)

    def block(self, arrays: Sequence[Kept]) -> tuple[int, int]:
        words, scale = (a.spec.tensor_shape[1] for a in arrays)
        return 1, math.lcm(INT4_PER_WORD, words * INT4_PER_WORD // scale)


class _InFp4:
    """e2m1 with a power of two per 32 inputs. Arrays in memory have the bytes of files."""

    name, kept = "fp4", Fp4
    mark = "has dtype I8"

    def announced(self, cfg: ModelConfig) -> bool:
        return cfg.fp4

    def holds(self, tensors: Tensors, name: str) -> bool:
        return name in tensors and tensors[name].dtype == "I8"

    def parts(self, cfg: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        (rows, inputs), of = shape, list(shape)
        groups = inputs // FP4_GROUP
        return (
            StoredPart(name, ("I8",), (rows, inputs // 2), f": two values a byte of {of}"),
            StoredPart(
                scale_name(name), ("F8_E8M0",), (rows, groups), f": one scale per {FP4_GROUP} inputs of {of}"
            ),
        )

    def misfit(self, cfg: ModelConfig, shape: tuple[int, ...]) -> str | None:
        if shape[1] % FP4_GROUP == 0:
            return None
        return f"{shape[1]} inputs are no multiple of {FP4_GROUP}, which share a scale"

    def check(self, tensors: Tensors, name: str) -> None:
        scale = tensors[scale_name(name)]
        if scale.array().view(np.uint8).max(initial=0) > MOST_UE8M0:
            raise CheckpointError(
                f"{scale} has NaN, or scales above 2^{MOST_UE8M0 - 127}; expected smaller ones: the file is "
                "damaged"
            )

    def read(self, tensors: Tensors, name: str, rows: range, columns: range, out: np.ndarray) -> None:
        codes, scale = tensors[name].array(rows), tensors[scale_name(name)].array(rows)
        fp4.dequantise(codes, scale, columns, out)

    def can_stay(self, spec: Spec) -> bool:
        return spec.rows is None and spec.shape[-2:] == spec.tensor_shape

    def arrays(self, spec: Spec, tensors: Tensors) -> tuple[Kept, ...]:
        inputs = spec.tensor_shape[1]
        codes = columns_spec(spec, str, inputs // 2)
        scales = columns_spec(spec, scale_name, inputs // FP4_GROUP)
        return Kept(codes, DTYPES["U8"]), Kept(scales, DTYPES["U8"])

    def block(self, arrays: Sequence[Kept]) -> tuple[int, int]:
        return 1, FP4_GROUP


class _InNvfp4:
    """e2m1 with an e4m3 scale per 16 inputs and one of the whole weight, in either layout of `nvfp4`."""

    name, kept = "nvfp4", Nvfp4
    mark = "has dtype U8"

    def announced(self, cfg: ModelConfig) -> bool:
        return cfg.nvfp4 is not None

    def holds(self, tensors: Tensors, name: str) -> bool:
        return name in tensors and tensors[name].dtype == "U8"

    def parts(self, cfg: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        (rows, inputs), of = shape, list(shape)
        whole = nvfp4.TIMES if cfg.nvfp4 == "modelopt" else nvfp4.OVER
        why, groups = f": one scale per {NVFP4_GROUP} inputs of {of}", inputs // NVFP4_GROUP
        return (
            StoredPart(name, ("U8",), (rows, inputs // 2), f": two values a byte of {of}"),
            StoredPart(name + nvfp4.SCALE, ("F8_E4M3",), (rows, groups), why),
            StoredPart(name + whole, ("F32",), (1,), ": one number for the whole weight"),
        )

    def misfit(self, cfg: ModelConfig, shape: tuple[int, ...]) -> str | None:
        if shape[1] % NVFP4_GROUP == 0:
            return None
        return f"{shape[1]} inputs are no multiple of {NVFP4_GROUP}, which share a scale"

    def check(self, tensors: Tensors, name: str) -> None:
        for end in (nvfp4.SCALE, nvfp4.TIMES, nvfp4.OVER):
            if name + end in tensors:
                _check_finite(tensors[name + end])
        if name + nvfp4.OVER in tensors and not tensors[name + nvfp4.OVER].array()[0]:
            raise CheckpointError(f"{tensors[name + nvfp4.OVER]} is 0, which divides; the file is damaged")

    def read(self, tensors: Tensors, name: str, rows: range, columns: range, out: np.ndarray) -> None:
        codes, scale = tensors[name].array(rows), tensors[name + nvfp4.SCALE].array(rows)
        times, over = (nvfp4.whole(tensors, name + end) for end in (nvfp4.TIMES, nvfp4.OVER))
        nvfp4.dequantise(codes, scale, times, over, columns, out)

    def can_stay(self, spec: Spec) -> bool:
        return spec.rows is None and spec.shape[-2:] == spec.tensor_shape

    def arrays(self, spec: Spec, tensors: Tensors) -> tuple[Kept, ...]:
        inputs = spec.tensor_shape[1]
        codes = columns_spec(spec, str, inputs // 2)
        times, over = (columns_spec(spec, _ending(end), 1) for end in (nvfp4.TIMES, nvfp4.OVER))
        rows = [replace(of, axes=(*of.axes[:-1], None)) for of in (times, over)]
        scale = columns_spec(spec, _ending(nvfp4.SCALE), inputs // NVFP4_GROUP)
        wholes = [Kept(of, DTYPES["F32"]) for of in rows]
        return Kept(codes, DTYPES["U8"]), *wholes, Kept(scale, DTYPES["U8"])

    def block(self, arrays: Sequence[Kept]) -> tuple[int, int]:
        return 1, NVFP4_GROUP


FP8, INT4, FP4, NVFP4, BF16 = _InFp8(), _InInt4(), _InFp4(), _InNvfp4(), _InBf16()
FP8_BY_HEAD = _InFp8ByHead()
FORMATS: tuple[Format, ...] = (FP8, INT4, FP4, NVFP4)
STORED: tuple[Stored, ...] = (*FORMATS, BF16, FP8_BY_HEAD)
# A quarter of bfloat16's bytes: they stay so in memory on every device.
FOUR_BITS = frozenset((INT4.name, FP4.name, NVFP4.name))


def tensors_of(name: str) -> tuple[str, ...]:
    """Names of all tensors that may belong to a weight."""
    ends = int4.PACKED, int4.SCALE, int4.SHAPE, nvfp4.TIMES, nvfp4.OVER
    return name, scale_name(name), *(name + end for end in ends)


def by_tensors(cfg: ModelConfig, tensors: Tensors) -> ModelConfig:
    """A config whose files decide whether experts are in FP4, where it announces narrow weights."""
    if "I8" not in family_of(cfg).narrow or not (cfg.fp8 or cfg.fp4):
        return cfg
    return replace(cfg, fp4=any(t.dtype == "I8" for t in tensors.values()))


def format_of(tensors: Tensors, name: str) -> Format | None:
    """The format of a weight; None: it is a plain array, or absent."""
    return next((f for f in FORMATS if f.holds(tensors, name)), None)


def staying(spec: Spec, tensors: Tensors, keep: Collection[str]) -> Stored | None:
    """The way of storing, among ``keep``, in which a parameter stays in memory; None: it becomes an array."""
    names = [str(name) for name in spec_names(spec).flat]
    found = (s for s in STORED if s.name in keep and s.can_stay(spec))
    return next((s for s in found if all(s.holds(tensors, n) for n in names)), None)


def declared(cfg: ModelConfig, spec: Spec) -> tuple[Stored, tuple[Kept, ...]] | None:
    """The way of storing a parameter that config.json announces, and its arrays, without any file.

    All weights that may be FP8 are, if FP8 is announced; if int4, FP4 or NVFP4, the experts are. None: a
    plain array of another dtype than bfloat16, or a weight that cannot stay as it is stored.
    """
    if cfg.int4_group is not None and spec.axes[0] == "experts":
        return INT4, INT4.declared(spec, cfg.int4_group, DTYPES["BF16"])
    if cfg.fp4 and spec.axes[0] == "experts":
        return FP4, FP4.arrays(spec, {})
    if cfg.nvfp4 and spec.axes[0] == "experts":
        return NVFP4, NVFP4.arrays(spec, {})
    if cfg.fp8 and spec.projects:
        whole = next((s for s in (FP8, FP8_BY_HEAD) if s.can_stay(spec)), None)
        return None if whole is None else (whole, whole.arrays(spec, {}))
    in_bf16 = cfg.dtype == "bfloat16" and not spec.ids and BF16.can_stay(spec)
    return (BF16, BF16.arrays(spec, {})) if in_bf16 else None


def spec_names(spec: Spec) -> np.ndarray:
    """``spec.names`` as an object array whose shape is the stacked leading dimensions."""
    return np.array(spec.names, dtype=object)


def names_of(formats: Iterable[Format]) -> str:
    """Names of formats, as text for messages."""
    return " and ".join(sorted(f.name for f in formats))


def _ending(suffix: str) -> Callable[[str], str]:
    return lambda name: name + suffix


def _check_finite(scale: Tensor) -> None:
    if not np.isfinite(scale.array().astype(np.float32)).all():
        raise CheckpointError(
            f"{scale} has NaN or infinite scales; expected finite ones: the file is damaged"
        )
