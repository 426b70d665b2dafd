"""The quantisation that a ``config.json`` announces: FP8 in blocks, FP4 or int4 in groups, or none."""

from collections.abc import Sequence

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject

FP8_BLOCK = 128
INT4_PER_WORD = 8
FP4_GROUP = 32

_EXPECTED = "expected fp8 with 128x128 blocks, int4 as compressed-tensors packs it, or none"


def quantisation(raw: JsonObject) -> JsonObject:
    """``fp8``, ``fp4`` and ``int4_group`` of ``ModelConfig``.

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
        return {"fp8": False, "fp4": False, "int4_group": _int4_group(quant)}
    kind = quant.get("quant_algo")
    of = f", quant_algo = {kind!r:.80}" if kind is not None else ""
    raise ConfigError(f"quantization {method!r:.200} is not supported{of}; {_EXPECTED}")


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


# Values that compressed-tensors may give for weights beside their group size; optional keys come last.
_WEIGHTS = {
    "num_bits": (4,),
    "type": ("int", None),
    "strategy": ("group", None),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "actorder": (None,),
    "block_structure": (None,),
}


def _int4_group(quant: JsonObject) -> int:
    """Inputs that share a scale, of compressed-tensors' pack-quantized format.

    The tensors show which weights are packed, as for FP8, so the patterns ``targets`` and ``ignore`` are not
    read.
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
    sizes = {_group_size(quant, name, group) for name, group in groups.items()}
    if len(sizes) > 1:
        raise ConfigError(
            f"compressed-tensors with groups of {' and '.join(map(str, sorted(sizes)))} inputs is not "
            "supported; expected one group_size"
        )
    return sizes.pop()


def _group_size(quant: JsonObject, name: str, group: JsonObject) -> int:
    _need(f"{name}.format", group.get("format") or quant.get("format"), ("pack-quantized",))
    for key in ("input_activations", "output_activations"):
        _need(f"{name}.{key}", group.get(key), (None,))
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f"compressed-tensors with {name}.weights = {weights!r:.200}; expected an object")
    for key, allowed in _WEIGHTS.items():
        _need(f"{name}.weights.{key}", weights.get(key), allowed)
    size = weights.get("group_size")
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"compressed-tensors with {name}.weights.group_size = {size!r:.80} is not supported; expected a "
            "number of inputs"
        )
    return size


def _need(key: str, got: object, allowed: Sequence[object]) -> None:
    """Raises ConfigError for another value; 1 is another value than True."""
    if not any(type(got) is type(value) and got == value for value in allowed):
        raise ConfigError(
            f"compressed-tensors with {key} = {got!r:.200} is not supported; expected {allowed[0]!r}: int4 "
            "weights, symmetric, packed eight to a word with a scale per group of inputs, and nothing else"
        )
