"""A Llama-shaped model in a GGUF file, written as a folder in Hugging Face layout.

Source of keys, names and of the order of rows: convert_hf_to_gguf.py of llama.cpp.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from mtp_jax.checkpoint.formats import spec_names
from mtp_jax.checkpoint.gguf_file import GgufFile, GgufTensor, open_gguf
from mtp_jax.checkpoint.read import OnProgress
from mtp_jax.checkpoint.safetensors_file import DTYPES
from mtp_jax.checkpoint.write import SHARD_BYTES, NewTensor, write_folder, write_json
from mtp_jax.errors import CheckpointError, ConfigError, shortlist
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.config_parts import Llama3Scaling
from mtp_jax.model.family import config_of
from mtp_jax.model.spec import leaves
from mtp_jax.model.specs import param_specs
from mtp_jax.text.gguf_tokens import GgufTokens
from mtp_jax.text.tokenizer import JSON_FILE

_ARCHITECTURE = "llama"
# Keys of config.json by keys of a file.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_OPTIONAL = "attention.head_count_kv", "attention.key_length", "rope.freq_base"
# Names of tensors by the names of a release, of a layer behind its number.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_PAIRED = ("self_attn.q_proj", "self_attn.k_proj")
_BF16 = "BF16"
_FACTORS = "rope_freqs.weight"
# Llama 3.1 to 3.3, but for the factor.
_LLAMA_3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write_gguf(file: Path, out: Path, progress: OnProgress | None = None) -> None:
    """Write the model of a file to a new folder: config.json, tokenizer, weights as the file has them.

    Weights become float32, but bfloat16 stays; either holds the file's own values.

    Raises:
        ConfigError: the library that reads the file is missing.
        CheckpointError: the file is damaged, or has another model than a dense Llama or another tokenizer.
    """
    opened = open_gguf(file)
    try:
        raw, tokens = _described(opened)
        pieces = _pieces(opened, config_of(raw))
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    out.mkdir(parents=True)
    write_folder(out, _counted(pieces, progress) if progress else pieces, SHARD_BYTES)
    write_json(out / "config.json", raw)
    write_json(out / "tokenizer_config.json", tokens.config)
    tokens.backend.save(str(out / JSON_FILE))


def _described(file: GgufFile) -> tuple[JsonObject, GgufTokens]:
    """config.json and the tokenizer. Raises CheckpointError, ConfigError where the file is no such model."""
    own = _own_facts(file.facts)
    embed = file.tensors.get(_NAMES["model.embed_tokens.weight"])
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError("it has no table token_embd.weight")
    tokens = GgufTokens(file.facts)
    raw: JsonObject = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": _ARCHITECTURE,
        **{name: _plain(own[key]) for key, name in _KEYS.items() if key in own},
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": _NAMES["lm_head.weight"] not in file.tensors,
        "bos_token_id": tokens.bos,
        "eos_token_id": list(tokens.ends) or None,
        "torch_dtype": "bfloat16" if embed.kind == _BF16 else "float32",
    }
    cfg = config_of(raw)
    assert cfg.gqa is not None, "a Llama has grouped-query attention"
    _refuse(own, cfg.gqa.head_dim)
    if (count := tokens.backend.get_vocab_size()) > cfg.vocab_size:
        raise CheckpointError(f"it has {count} tokens; token_embd.weight has {cfg.vocab_size} rows")
    if _FACTORS in file.tensors:
        raw["rope_scaling"] = _scaling(file.tensors[_FACTORS].array(), cfg.gqa.head_dim, cfg.rope_theta)
    return raw, tokens


def _own_facts(facts: JsonMapping) -> JsonObject:
    """The keys of a Llama, without their prefix. Raises CheckpointError where it is none, or lacks a key."""
    if (got := facts.get("general.architecture")) != _ARCHITECTURE:
        raise CheckpointError(f"the architecture {got!r:.80} is not supported; expected {_ARCHITECTURE!r}")
    if (parts := facts.get("split.count", 1)) not in (0, 1):
        raise CheckpointError(f"it is one of {parts!r:.80} parts; join them first (llama-gguf-split --merge)")
    own = {k.removeprefix("llama."): v for k, v in facts.items() if k.startswith("llama.")}
    if lacks := [f"llama.{key}" for key in _KEYS if key not in (*_OPTIONAL, *own)]:
        raise CheckpointError(f"it lacks {shortlist(lacks)}")
    return own


def _plain(value: object) -> object:
    """A value as a release writes it: the shortest number that is the same in float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _refuse(own: JsonObject, head_dim: int) -> None:
    """Raises CheckpointError for keys of the architecture that say more than a dense Llama has."""
    only = dict.fromkeys(("attention.value_length", "rope.dimension_count"), head_dim)
    only |= {"expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}
    for key, value in own.items():
        if key in only and value != only[key]:
            raise CheckpointError(f"llama.{key} = {value!r:.80} is not supported; expected {only[key]!r}")
    # The embedding has vocab_size rows.
    if unknown := [f"llama.{key}" for key in own if key not in (*_KEYS, *only, "vocab_size")]:
        raise CheckpointError(f"{shortlist(unknown)} is not supported; a plain Llama has no such key")


def _scaling(factors: np.ndarray, head_dim: int, theta: float) -> JsonObject:
    """rope_scaling of config.json, from the numbers that divide the frequencies.

    Raises CheckpointError where no scaling of Llama 3 has these numbers.

    A file has no other trace of Llama 3.1's scaling. Its numbers were made in float32: a blend of 1 and 1/32
    is off by 32 roundoffs at most, a hundredth of the slack.
    """
    scaling = Llama3Scaling(factor=float(factors.max(initial=0)), **_LLAMA_3)
    numbers = np.arange(head_dim // 2)
    shares = scaling.shares(numbers, theta ** (-2 * numbers / head_dim), theta)
    wanted = 1 / (1 - shares + shares / scaling.factor) if scaling.factor >= 1 else None
    if wanted is None or factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4):
        raise CheckpointError(f"{_FACTORS} has an unknown scaling of rope; expected that of Llama 3.1 to 3.3")
    return scaling.keys


def _pieces(file: GgufFile, cfg: ModelConfig) -> list[NewTensor]:
    """The tensors of a folder. Raises CheckpointError with all that the file's do not match."""
    if cfg.num_hidden_layers > len(file.tensors):  # each has several
        raise CheckpointError(f"it has {len(file.tensors)} tensors for {cfg.num_hidden_layers} layers")
    specs = leaves(param_specs(cfg))
    shapes = {str(name): spec.tensor_shape for spec in specs for name in spec_names(spec).flat}
    theirs = {name: _name_of(name) for name in shapes}
    missing = [new for new in theirs.values() if new not in file.tensors]
    more = [name for name in file.tensors if name not in (*theirs.values(), _FACTORS)]
    wrong = [
        f"{new} {file.tensors[new].shape} in the place of {shapes[name]}"
        for name, new in theirs.items()
        if new in file.tensors and file.tensors[new].shape != shapes[name]
    ]
    named = {"tensors are missing": missing, "unknown tensors": more, "other shapes": wrong}
    if faults := [f"{what}: {shortlist(names)}" for what, names in named.items() if names]:
        raise CheckpointError("; ".join(faults))
    return [_piece(name, file.tensors[new], cfg) for name, new in theirs.items()]


def _name_of(name: str) -> str:
    """The name in a file of a release's tensor."""
    layer = _LAYER.fullmatch(name)
    return f"blk.{layer[1]}.{_OF_LAYER[layer[2]]}.weight" if layer else _NAMES[name]


def _piece(name: str, tensor: GgufTensor, cfg: ModelConfig) -> NewTensor:
    assert cfg.gqa is not None, "a Llama has grouped-query attention"
    half, dtype = cfg.gqa.head_dim // 2, _BF16 if tensor.kind == _BF16 else "F32"
    layer = _LAYER.fullmatch(name)
    paired = layer is not None and layer[2] in _PAIRED

    def data() -> np.ndarray:
        found = tensor.array()
        if paired:  # a file's rows that are rotated together are neighbours, a release's half a head apart
            found = found.reshape(-1, half, 2, found.shape[1]).swapaxes(1, 2).reshape(found.shape)
        return found.astype(DTYPES[dtype])

    return NewTensor(name, dtype, tensor.shape, data)


def _counted(pieces: list[NewTensor], progress: OnProgress) -> list[NewTensor]:
    """The same tensors, which report bytes as they are read."""
    total, done = sum(piece.nbytes for piece in pieces), 0

    def counted(piece: NewTensor) -> NewTensor:
        def data() -> np.ndarray:
            nonlocal done
            found, done = piece.data(), done + piece.nbytes
            progress(done, total)
            return found

        return replace(piece, data=data)

    return [counted(piece) for piece in pieces]
