"""Quantisation as llm-compressor writes it, in the format of compressed-tensors."""

from typing import Any

from tests.checkpoint.files import Tensors

_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "scale_dtype": None,
    "strategy": "block",
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}
BLOCKS: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "input_activations": _WEIGHTS | {"dynamic": True, "group_size": 128, "strategy": "group"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _WEIGHTS | {"block_structure": [128, 128]},
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.3.eh_proj"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.2",
}
"""Scheme FP8_BLOCK."""
MXFP4: dict[str, Any] = {
    "format": "mxfp4-pack-quantized",
    "input_activations": None,
    "output_activations": None,
    "targets": ["re:.*experts.*"],
    "weights": _WEIGHTS
    | {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}
"""A group of MXFP4."""


def renamed(tensors: Tensors) -> None:
    """Scales of FP8 blocks under the name that llm-compressor gives them."""
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name)
