"""Storage of weights in files: as plain arrays, or in one of ``FORMATS``, narrower than computation."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mtp_jax.checkpoint import fp8, int4
from mtp_jax.checkpoint.safetensors_file import DTYPES, Tensor
from mtp_jax.errors import CheckpointError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.hf_quantization import FP8_BLOCK, INT4_PER_WORD
from mtp_jax.model.narrow import Bf16, Fp8, Int4, Narrow
from mtp_jax.model.spec import Spec, columns_spec, scale_spec

PLAIN = ("F32", "BF16", "F16")
IDS = ("I64", "I32")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """One of the tensors that together store a weight.

    Attributes:
        suffix: the end of its name, after the weight's.
        dtypes: its allowed dtypes, in safetensors' words.
        shape: its shape.
        why: the source of its shape, for errors.
    """

    suffix: str
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

    def block(self, tensors: Tensors, name: str) -> tuple[int, int]:
        """Rows and columns of a block of the weight that must lie whole on one device."""
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

    def parts(self, cfg: ModelConfig, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The tensors that a weight of this shape consists of."""
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

    def block(self, tensors: Tensors, name: str) -> tuple[int, int]:
        return 1, 1


class _InFp8:
    """e4m3 with a scale per 128x128 block."""

    name, kept = "fp8", Fp8
    mark = "has dtype F8_E4M3"

    def announced(self, cfg: ModelConfig) -> bool:
        return cfg.fp8

    def holds(self, tensors: Tensors, name: str) -> bool:
        return name in tensors and tensors[name].dtype == "F8_E4M3"

    def parts(self, cfg: ModelConfig, shape: tuple[int, ...]) -> tuple[Part, ...]:
        why = f": one scale per 128x128 block of {list(shape)}"
        return (
            Part("", ("F8_E4M3",), shape, " from config.json"),
            Part(fp8.SCALE_SUFFIX, fp8.SCALES, fp8.scale_shape(shape), why),
        )

    def misfit(self, cfg: ModelConfig, shape: tuple[int, ...]) -> str | None:
        return None

    def check(self, tensors: Tensors, name: str) -> None:
        _check_finite(tensors[name + fp8.SCALE_SUFFIX])

    def read(self, tensors: Tensors, name: str, rows: range, columns: range, out: np.ndarray) -> None:
        blocks = fp8.blocks(rows)
        scale = tensors[name + fp8.SCALE_SUFFIX].array(blocks).astype(np.float32)
        fp8.dequantise(tensors[name].array(rows), scale, rows.start % FP8_BLOCK, columns, out)

    def can_stay(self, spec: Spec) -> bool:
        return spec.rows is None

    def arrays(self, spec: Spec, tensors: Tensors) -> tuple[Kept, ...]:
        scale = scale_spec(spec, fp8.SCALE_SUFFIX)
        return Kept(spec, DTYPES["F8_E4M3"]), Kept(scale, DTYPES["F32"])

    def block(self, tensors: Tensors, name: str) -> tuple[int, int]:
        return FP8_BLOCK, FP8_BLOCK


class _InInt4:
    """compressed-tensors' pack-quantized format."""

    name, kept = "int4", Int4
    mark = "is called weight_packed"

    def announced(self, cfg: ModelConfig) -> bool:
        return cfg.int4_group is not None

    def holds(self, tensors: Tensors, name: str) -> bool:
        return name + int4.PACKED in tensors

    def parts(self, cfg: ModelConfig, shape: tuple[int, ...]) -> tuple[Part, ...]:
        (rows, inputs), group = shape, cfg.int4_group or 1
        of, words, groups = list(shape), inputs // INT4_PER_WORD, inputs // group
        return (
            Part(int4.PACKED, ("I32",), (rows, words), f": eight values a word of {of}"),
            Part(int4.SCALE, PLAIN, (rows, groups), f": one scale per {group} inputs of {of}"),
            Part(int4.SHAPE, ("I64", "I32"), (2,), ": the shape of the weight"),
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
        words = columns_spec(spec, int4.PACKED, inputs // INT4_PER_WORD)
        return Kept(words, DTYPES["I32"]), Kept(columns_spec(spec, int4.SCALE, inputs // group), kind)

    def block(self, tensors: Tensors, name: str) -> tuple[int, int]:
        words, scale = tensors[name + int4.PACKED], tensors[name + int4.SCALE]
        return 1, math.lcm(INT4_PER_WORD, words.shape[1] * INT4_PER_WORD // scale.shape[1])


FP8, INT4, BF16 = _InFp8(), _InInt4(), _InBf16()
FORMATS: tuple[Format, ...] = (FP8, INT4)
STORED: tuple[Stored, ...] = (*FORMATS, BF16)
# Suffixes of all tensors that may belong to a weight.
SUFFIXES = ("", fp8.SCALE_SUFFIX, int4.PACKED, int4.SCALE, int4.SHAPE)


def format_of(tensors: Tensors, name: str) -> Format | None:
    """The format of a weight; None: it is a plain array, or absent."""
    return next((f for f in FORMATS if f.holds(tensors, name)), None)


def staying(spec: Spec, tensors: Tensors, keep: Collection[str]) -> Stored | None:
    """The way of storing, among ``keep``, in which a parameter stays in memory; None: it becomes an array."""
    names = [str(name) for name in spec_names(spec).flat]
    found = (s for s in STORED if s.name in keep and s.can_stay(spec))
    return next((s for s in found if all(s.holds(tensors, n) for n in names)), None)


def spec_names(spec: Spec) -> np.ndarray:
    """``spec.names`` as an object array whose shape is the stacked leading dimensions."""
    return np.array(spec.names, dtype=object)


def names_of(formats: Iterable[Format]) -> str:
    """Names of formats, as text for messages."""
    return " and ".join(sorted(f.name for f in formats))


def _check_finite(scale: Tensor) -> None:
    if not np.isfinite(scale.array()).all():
        raise CheckpointError(
            f"{scale} has NaN or infinite scales; expected finite ones: the file is damaged"
        )
