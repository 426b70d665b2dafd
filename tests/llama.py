"""A small Llama under the names and keys of transformers."""

import numpy as np

from mtp_jax.json_object import JsonObject

VOCABULARY, WIDTH, MLP, LAYERS, HEADS, KV_HEADS, HEAD = 128, 32, 48, 2, 4, 2, 8
LLAMA: JsonObject = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
# Frequencies of all three kinds: kept, blended, divided.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
Weights = dict[str, np.ndarray]


def weights(tied: bool = True) -> Weights:
    """A model's tensors under the names of transformers."""
    rng = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        shapes |= {f"{p}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        shapes |= {f"{p}.self_attn.{name}_proj.weight": (KV_HEADS * HEAD, WIDTH) for name in "kv"}
        shapes |= {f"{p}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qo"}
        shapes |= {f"{p}.mlp.{name}_proj.weight": (MLP, WIDTH) for name in ("gate", "up")}
        shapes[f"{p}.mlp.down_proj.weight"] = WIDTH, MLP
    return {
        name: (rng.normal(size=shape) / (np.sqrt(shape[-1]) if len(shape) > 1 else 4)).astype(np.float32)
        + np.float32(len(shape) == 1)
        for name, shape in shapes.items()
    }


def frequencies(config: JsonObject) -> np.ndarray:
    """Computes the frequencies of rope one by one, as transformers does."""
    found = []
    for i in range(0, HEAD, 2):
        inv = config["rope_theta"] ** (-i / HEAD)
        if s := config.get("rope_scaling"):
            length, original = 2 * np.pi / inv, s["original_max_position_embeddings"]
            if length > original / s["low_freq_factor"]:
                inv /= s["factor"]
            elif length >= original / s["high_freq_factor"]:
                low, high = s["low_freq_factor"], s["high_freq_factor"]
                smooth = (original / length - low) / (high - low)
                inv = (1 - smooth) * inv / s["factor"] + smooth * inv
        found.append(inv)
    return np.array(found)
