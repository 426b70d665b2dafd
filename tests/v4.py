"""Small DeepSeek-V4 checkpoints under the release's names, made of a seed and stored without product code.

Random weights accept no drafts: ``tests.models.rigged`` has weights that do.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.checkpoint.formats import spec_names
from mtp_jax.heads.stages.declared import StagesConfig
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_of
from mtp_jax.model.params import Params, param_specs
from mtp_jax.model.spec import leaves
from tests.checkpoint.files import Raw, write_raw

Arrays = dict[str, np.ndarray]

# Four layers, one of each kind and a second one with an indexer. Widths divide by four devices.
_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "attention_bias": False,
    "bos_token_id": 0, "eos_token_id": 1, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "index_head_dim": 16, "index_n_heads": 8,
    "index_topk": 6, "max_position_embeddings": 4096, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 4, "num_hash_layers": 1, "num_key_value_heads": 1, "num_nextn_predict_layers": 1,
    "o_groups": 4, "o_lora_rank": 8, "q_lora_rank": 24, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 16,
    "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "float32",
    "vocab_size": 64, "compress_rope_theta": 160000, "compress_ratios": [0, 4, 128, 4, 0],
}  # fmt: skip
# Keys of a config whose ``mtp.*`` are DSpark stages, this many of them, of which files do not tell.
DSPARK: dict[str, Any] = {
    "n_mtp_layers": 3, "dspark_block_size": 4, "dspark_markov_rank": 16, "dspark_noise_token_id": 63,
    "dspark_target_layer_ids": [1, 2, 3],
}  # fmt: skip
QUANTISATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP8 = (
    *(".attn.wq_a.weight", ".attn.wq_b.weight", ".indexer.wq_b.weight", ".attn.wkv.weight", ".wo_a.weight"),
    *(".wo_b.weight", ".e_proj.weight", ".h_proj.weight", ".main_proj.weight"),
)
_FLOAT32 = ".attn_sink", ".ape", ".gate.bias", "norm.weight"


def v4_config(**changes: Any) -> dict[str, Any]:
    """A config.json with other values under these keys; None leaves a key out."""
    return {key: value for key, value in (_CONFIG | changes).items() if value is not None}


def v4_tensors(config: dict[str, Any], seed: int = 0) -> Arrays:
    """Every tensor of such a model in float32, ``tid2eid`` in int64.

    ``mtp.*`` are MTP layers, or DSpark stages where the config has ``DSPARK``'s keys.
    """
    made = _Made(config, np.random.default_rng(seed))
    layers, drafts = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    made.normal("embed.weight", config["vocab_size"], config["hidden_size"])
    for number in range(layers):
        hashed = number < config["num_hash_layers"]
        made.block(f"layers.{number}", config["compress_ratios"][number], hashed)
    made.norm("norm", config["hidden_size"])
    made.gates("")
    made.matrix("head", config["vocab_size"], config["hidden_size"])
    if "dspark_block_size" in config:
        made.stages(config["n_mtp_layers"])
    else:
        for k in range(drafts):
            made.mtp(f"mtp.{k}")
    return made.tensors


class _Made:
    """Tensors on their way."""

    def __init__(self, config: dict[str, Any], rng: np.random.Generator) -> None:
        self.c, self.rng, self.tensors = config, rng, Arrays()

    def normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> None:
        self.tensors[name] = (mean + std * self.rng.normal(size=shape)).astype(np.float32)

    def matrix(self, name: str, outputs: int, inputs: int) -> None:
        self.normal(f"{name}.weight", outputs, inputs, std=inputs**-0.5)

    def norm(self, name: str, width: int) -> None:
        self.normal(f"{name}.weight", width, std=0.1, mean=1.0)

    def compressor(self, p: str, ratio: int, width: int) -> None:
        rows = width * (2 if ratio == 4 else 1)
        self.normal(f"{p}.ape", ratio, rows, std=0.5)
        self.matrix(f"{p}.wkv", rows, self.c["hidden_size"])
        self.matrix(f"{p}.wgate", rows, self.c["hidden_size"])
        self.norm(f"{p}.norm", width)

    def attention(self, p: str, ratio: int) -> None:
        c = self.c
        hidden, heads, width, low = (
            c[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank")
        )
        outputs = c["o_groups"] * c["o_lora_rank"]
        self.normal(f"{p}.attn_sink", heads)
        self.matrix(f"{p}.wq_a", low, hidden)
        self.norm(f"{p}.q_norm", low)
        self.matrix(f"{p}.wq_b", heads * width, low)
        self.matrix(f"{p}.wkv", width, hidden)
        self.norm(f"{p}.kv_norm", width)
        self.matrix(f"{p}.wo_a", outputs, heads * width // c["o_groups"])
        self.matrix(f"{p}.wo_b", hidden, outputs)
        if ratio:
            self.compressor(f"{p}.compressor", ratio, width)
        if ratio == 4:
            self.matrix(f"{p}.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], low)
            self.matrix(f"{p}.indexer.weights_proj", c["index_n_heads"], hidden)
            self.compressor(f"{p}.indexer.compressor", ratio, c["index_head_dim"])

    def mlp(self, p: str) -> None:
        hidden, width = self.c["hidden_size"], self.c["moe_intermediate_size"]
        self.matrix(f"{p}.w1", width, hidden)
        self.matrix(f"{p}.w2", hidden, width)
        self.matrix(f"{p}.w3", width, hidden)

    def block(self, p: str, ratio: int, hashed: bool = False) -> None:
        c = self.c
        experts, chosen, streams = c["n_routed_experts"], c["num_experts_per_tok"], c["hc_mult"]
        self.attention(f"{p}.attn", ratio)
        for half in ("attn", "ffn"):
            rows, values = (2 + streams) * streams, streams * c["hidden_size"]
            self.norm(f"{p}.{half}_norm", c["hidden_size"])
            self.normal(f"{p}.hc_{half}_fn", rows, values, std=values**-0.5)
            self.normal(f"{p}.hc_{half}_base", rows, std=0.5)
            self.normal(f"{p}.hc_{half}_scale", 3, std=0.2, mean=1.0)
        self.matrix(f"{p}.ffn.gate", experts, c["hidden_size"])
        if hashed:
            table = [self.rng.permutation(experts)[:chosen] for _ in range(c["vocab_size"])]
            self.tensors[f"{p}.ffn.gate.tid2eid"] = np.array(table, np.int64)
        else:
            self.normal(f"{p}.ffn.gate.bias", experts, std=0.2)
        for e in range(experts):
            self.mlp(f"{p}.ffn.experts.{e}")
        self.mlp(f"{p}.ffn.shared_experts")

    def gates(self, p: str) -> None:
        streams, values = self.c["hc_mult"], self.c["hc_mult"] * self.c["hidden_size"]
        self.normal(f"{p}hc_head_fn", streams, values, std=values**-0.5)
        self.normal(f"{p}hc_head_base", streams, std=0.5)
        self.normal(f"{p}hc_head_scale", 1, std=0.2, mean=1.0)

    def mtp(self, p: str) -> None:
        hidden = self.c["hidden_size"]
        self.block(p, 0)
        for name in ("enorm", "hnorm", "norm"):
            self.norm(f"{p}.{name}", hidden)
        for name in ("e_proj", "h_proj"):
            self.matrix(f"{p}.{name}", hidden, hidden)
        self.gates(f"{p}.")

    def stages(self, count: int) -> None:
        c, last = self.c, f"mtp.{count - 1}"
        hidden, rank, taps = c["hidden_size"], c["dspark_markov_rank"], len(c["dspark_target_layer_ids"])
        for k in range(count):
            self.block(f"mtp.{k}", 0)
        self.matrix("mtp.0.main_proj", hidden, taps * hidden)
        self.norm("mtp.0.main_norm", hidden)
        self.norm(f"{last}.norm", hidden)
        self.gates(f"{last}.")
        self.matrix(f"{last}.markov_head.markov_w1", c["vocab_size"], rank)
        self.matrix(f"{last}.markov_head.markov_w2", c["vocab_size"], rank)
        self.matrix(f"{last}.confidence_head.proj", 1, hidden + rank)


def write_v4(
    folder: Path, config: dict[str, Any], tensors: Arrays, fp4: bool = False, fp8: bool = False
) -> Arrays:
    """Write ``folder``. Returns the values of the tensors that the file holds.

    fp4: as the releases: experts in e2m1, other projections in e4m3, tables and routers in bfloat16. fp8: the
    same with experts in e4m3, too, as community checkpoints have them. Else float32.
    """
    files: dict[str, Raw] = {}
    held = dict(tensors)
    for name, w in tensors.items():
        if w.dtype != np.float32 or not (fp4 or fp8) or "hc_" in name or name.endswith(_FLOAT32):
            files[name] = Raw("F32" if w.dtype == np.float32 else "I64", list(w.shape), w.tobytes())
        elif ".ffn.experts." in name and fp4:
            files[name], files[scale_name(name)], held[name] = e2m1(w)
        elif name.endswith(_FP8) or "experts." in name:
            files[name], files[scale_name(name)], held[name] = e4m3(w)
        else:
            half = w.astype(ml_dtypes.bfloat16)
            files[name] = Raw("BF16", list(w.shape), half.tobytes())
            held[name] = half.astype(np.float32)
    told = dict(config)
    if fp4 or fp8:
        told |= {"quantization_config": QUANTISATION, "torch_dtype": "bfloat16"}
        told |= {"expert_dtype": "fp4"} if fp4 else {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    write_raw(folder / "model.safetensors", files)
    return held


def scale_name(name: str) -> str:
    """The tensor with a weight's scales."""
    return f"{name.removesuffix('weight')}scale"


def _exponent(largest: np.ndarray, most: float) -> np.ndarray:
    """k of the least 2^k by which values up to ``largest`` come down to ``most``."""
    return np.ceil(np.log2(np.maximum(largest, 1e-30) / most)).astype(int)


def _ue8m0(exponent: np.ndarray) -> Raw:
    return Raw("F8_E8M0", list(exponent.shape), (exponent + 127).astype(np.uint8).tobytes())


def e2m1(w: np.ndarray) -> tuple[Raw, Raw, np.ndarray]:
    """Codes two to a byte, the low four bits first, a power of two per 32 inputs, and the values."""
    grouped = w.reshape(len(w), -1, 32)
    exponent = _exponent(np.abs(grouped).max(-1), 6)
    scaled = grouped / np.exp2(exponent)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - E2M1[:8]).argmin(-1) + 8 * np.signbit(scaled)
    values = (E2M1[codes] * np.exp2(exponent)[..., None]).astype(np.float32)
    flat = codes.reshape(w.shape).astype(np.uint8)
    packed = flat[:, 0::2] | flat[:, 1::2] << 4
    return Raw("I8", list(packed.shape), packed.tobytes()), _ue8m0(exponent), values.reshape(w.shape)


def e4m3(w: np.ndarray) -> tuple[Raw, Raw, np.ndarray]:
    """e4m3 with a power of two per 128 x 128 block, partial ones too, and the values."""
    rows, columns = w.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 128), np.float32)
    padded[:rows, :columns] = w
    blocks = padded.reshape(len(padded) // 128, 128, -1, 128)
    exponent = _exponent(np.abs(blocks).max((1, 3)), 448)
    scale = np.exp2(exponent).repeat(128, 0).repeat(128, 1)[:rows, :columns].astype(np.float32)
    codes = (w / scale).astype(ml_dtypes.float8_e4m3fn)
    values = codes.astype(np.float32) * scale
    return Raw("F8_E4M3", [rows, columns], codes.tobytes()), _ue8m0(exponent), values


def loaded(config: dict[str, Any], tensors: Arrays, **options: Any) -> Loaded:
    """Such a model in memory, by way of its folder; options of ``load``."""
    with tempfile.TemporaryDirectory() as folder:
        write_v4(Path(folder), config, tensors)
        return load(Path(folder), dtype="float32", **options)


def by_name(cfg: ModelConfig, params: Params) -> Arrays:
    """Parameters in the shapes of their tensors."""
    found: Arrays = {}
    for spec, array in zip(leaves(param_specs(cfg)), jax.tree.leaves(params), strict=True):
        for at, name in np.ndenumerate(spec_names(spec)):
            found[str(name)] = np.asarray(array)[at].reshape(spec.tensor_shape)
    return found


def model(**changes: Any) -> ModelConfig:
    """The configuration of such a model with its MTP layer."""
    return config_of(v4_config(**changes)).with_nextn((True,))


def staged(**changes: Any) -> ModelConfig:
    """The configuration of such a model with DSpark stages in the place of its MTP layer."""
    raw = v4_config(**DSPARK | changes)
    trunk = config_of(raw).with_nextn(())
    return replace(trunk, drafter=StagesConfig.of(raw, trunk, raw["n_mtp_layers"]))
