"""The quantisation that a ``config.json`` announces: FP8 in blocks, FP4, NVFP4 or int4 in groups, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject

FP8_BLOCK = 128
INT4_PER_WORD = 8
FP4_GROUP, NVFP4_GROUP = 32, 16
Nvfp4Layout = Literal["modelopt", "compressed-tensors"]
"""The tool whose names NVFP4 weights have; of the first a scale of the whole weight multiplies."""

_EXPECTED = "expected fp8 with 128x128 blocks, int4 as compressed-tensors packs it, NVFP4, or none"


def quantisation(raw: JsonObject) -> JsonObject:
    """``fp8``, ``fp4``, ``int4_group`` and ``nvfp4`` of ``ModelConfig``; fields that are left out are none.

    Raises ConfigError for a format that cannot be read.
    """
    quant, mlx = raw.get("quantization_config"), raw.get("quantization")
    if isinstance(mlx, dict) and "group_size" in mlx:  # mlx writes it under both names
        raise ConfigError(f"quantization of {mlx.get('bits')} bits by mlx is not supported; {_EXPECTED}")
    if not quant:  # xLLM's export writes the empty string
        return {"fp8": False, "fp4": _fp4(raw, {}), "int4_group": None}
    if not isinstance(quant, dict):
        raise ConfigError(f"quantization {quant!r:.200} is not supported, as it is no object; {_EXPECTED}")
    method = quant.get("quant_method")
    if method == "fp8":
        _check_fp8(quant)
        return {"fp8": True, "fp4": _fp4(raw, quant), "int4_group": None}
    if method == "compressed-tensors":
        return _compressed(raw, quant)
    if method == "modelopt" and quant.get("quant_algo") == "NVFP4":
        return _modelopt(quant)
    kind = quant.get("quant_algo")
    of = f", quant_algo = {kind!r:.80}" if kind is not None else ""
    raise ConfigError(f"quantization {method!r:.200} is not supported{of}; {_EXPECTED}")


def _modelopt(quant: JsonObject) -> JsonObject:
    """NVFP4 as ModelOpt writes it: groups of 16. The tensors show which weights are narrow."""
    groups = quant.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise ConfigError(f"NVFP4 with config_groups = {groups!r:.200}; expected an object each")
    given = [g.get("weights") for g in groups.values() if isinstance(g, dict)]
    for told in (quant, *given):
        size = told.get("group_size") if isinstance(told, dict) else None
        if size not in (None, NVFP4_GROUP):
            raise ConfigError(
                f"NVFP4 with groups of {size!r:.80} inputs is not supported; expected {NVFP4_GROUP}"
            )
    return {"nvfp4": "modelopt"}


def _fp4(raw: JsonObject, quant: JsonObject) -> bool:
    """Whether experts are said to be in FP4, as DeepSeek-V4's are: at the top level or beside ``fp8``."""
    for given in (raw, quant):
        got = given.get("expert_dtype")
        if got not in (None, *_EXPERTS):
            raise ConfigError(
                f"expert_dtype = {got!r:.80} is not supported; expected {' or '.join(_EXPERTS)}"
            )
    return "fp4" in (raw.get("expert_dtype"), quant.get("expert_dtype"))


_EXPERTS = "fp4", "fp8", "bf16"


def _check_fp8(quant: JsonObject) -> None:
    """e4m3 in 128x128 blocks, whose scales may be powers of two or not."""
    if quant.get("weight_block_size") != [FP8_BLOCK, FP8_BLOCK] or quant.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"fp8 with weight_block_size {quant.get('weight_block_size')} and fmt {quant.get('fmt')} is not "
            "supported; expected [128, 128] and e4m3"
        )
    if quant.get("activation_scheme", "dynamic") != "dynamic":
        raise ConfigError(
            f"fp8 with activation_scheme {quant['activation_scheme']!r} is not supported; expected 'dynamic'"
        )


@dataclass(frozen=True)
class _Scheme:
    """A format of compressed-tensors: values that it may give for weights; optional keys come last.

    Attributes:
        about: the format in words.
        weights: allowed values of each key.
        dynamic: whether inputs may be quantised as they come; this engine leaves them as they are.
    """

    about: str
    weights: Mapping[str, tuple[object, ...]]
    dynamic: bool


_ANY = {"symmetric": (True, None), "dynamic": (False, None), "actorder": (None,)}
_INT4, _FP8_BLOCKS, _MXFP4 = "pack-quantized", "float-quantized", "mxfp4-pack-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_SCHEMES = {
    _INT4: _Scheme(
        "int4 weights, symmetric, packed eight to a word with a scale per group of inputs",
        {
            "num_bits": (4,),
            "type": ("int", None),
            "strategy": ("group", None),
            **_ANY,
            "block_structure": (None,),
        },
        dynamic=False,
    ),
    _FP8_BLOCKS: _Scheme(
        "FP8 weights with a scale per 128x128 block (FP8_BLOCK)",
        {
            "num_bits": (8,),
            "type": ("float",),
            "strategy": ("block",),
            "block_structure": ([FP8_BLOCK, FP8_BLOCK],),
            **_ANY,
        },
        dynamic=True,
    ),
    _MXFP4: _Scheme(
        "FP4 weights with a power of two per 32 inputs",
        {
            "num_bits": (4,),
            "type": ("float",),
            "strategy": ("group",),
            "group_size": (FP4_GROUP,),
            **_ANY,
            "block_structure": (None,),
        },
        dynamic=True,
    ),
    _NVFP4: _Scheme(
        "FP4 weights with an e4m3 scale per 16 inputs and a scale of the whole weight",
        {
            "num_bits": (4,),
            "type": ("float",),
            "strategy": ("tensor_group",),
            "group_size": (NVFP4_GROUP,),
            **_ANY,
            "block_structure": (None,),
        },
        dynamic=True,
    ),
}


def _compressed(raw: JsonObject, quant: JsonObject) -> JsonObject:
    """compressed-tensors, as llm-compressor writes it.

    The tensors show which weights are narrow, so the patterns ``targets`` and ``ignore`` are not read.
    """
    for key in ("kv_cache_scheme", "transform_config"):
        _need(key, quant.get(key) or None, (None,))
    sparsity = quant.get("sparsity_config") or None
    if not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        _need("sparsity_config", sparsity, (None,))
    _need("quantization_status", quant.get("quantization_status"), ("compressed", None))
    groups = quant.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(g, dict) for g in groups.values()):
        raise ConfigError(f"compressed-tensors with config_groups = {groups!r:.200}; expected an object each")
    found = [_group(quant, f"{name:.80}", group) for name, group in groups.items()]
    kinds, sizes = {kind for kind, _ in found}, {size for _, size in found if size is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"compressed-tensors with groups of {' and '.join(map(str, sorted(sizes)))} inputs is not "
            "supported; expected one group_size"
        )
    return {
        "fp8": _FP8_BLOCKS in kinds,
        "fp4": _MXFP4 in kinds or _fp4(raw, quant),
        "int4_group": next(iter(sizes), None),
        "nvfp4": (None, "compressed-tensors")[_NVFP4 in kinds],
    }


def _group(quant: JsonObject, name: str, group: JsonObject) -> tuple[str, int | None]:
    """The format of a group of weights, and of int4 the inputs that share a scale."""
    kind = group.get("format") or quant.get("format")
    _need(f"{name}.format", kind, tuple(_SCHEMES))
    scheme = _SCHEMES[str(kind)]
    for key in ("input_activations", "output_activations"):
        given = group.get(key)
        if not (scheme.dynamic and key == "input_activations" and _comes_quantised(given)):
            _need(f"{name}.{key}", given, (None,), scheme.about)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f"compressed-tensors with {name}.weights = {weights!r:.200}; expected an object")
    for key, allowed in scheme.weights.items():
        _need(f"{name}.weights.{key}", weights.get(key), allowed, scheme.about)
    size = weights.get("group_size") if kind == _INT4 else None
    if kind == _INT4 and (type(size) is not int or size < 1):
        raise ConfigError(
            f"compressed-tensors with {name}.weights.group_size = {size!r:.80} is not supported; expected a "
            "number of inputs"
        )
    return str(kind), size


def _comes_quantised(activations: object) -> bool:
    """Whether inputs have scales of their own in every batch, but for one of NVFP4's whole input."""
    if not isinstance(activations, dict):
        return False
    return activations.get("dynamic") in (True, "local") and activations.get("type") == "float"


def _need(key: str, got: object, allowed: Sequence[object], about: str = "weights alone") -> None:
    """Raises ConfigError for another value; 1 is another value than True."""
    if not any(type(got) is type(value) and got == value for value in allowed):
        expected = " or ".join(repr(value) for value in allowed if value is not None) or "None"
        raise ConfigError(
            f"compressed-tensors with {key} = {got!r:.200} is not supported; expected {expected}: {about}, "
            "and nothing else"
        )
