"""EAGLE-3 heads in the dialects of SpecForge, NVIDIA and speculators: config.json, names of tensors."""

import re

import numpy as np

from mtp_jax.checkpoint.folder import Folder
from mtp_jax.checkpoint.formats import IDS
from mtp_jax.checkpoint.safetensors_file import Tensor
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import OF_MLA, Captures, Eagle3Config, ModelConfig
from mtp_jax.model.hf_config import is_number
from mtp_jax.model.specs import EAGLE3

# Names of the architectures and types of other heads, and the reason why they are refused.
_OTHERS = {
    "medusa": "Medusa heads are not supported",
    "dflash": "block drafters (DFlash) are not supported",
    "dspark": "block drafters (DSpark) are not supported",
    "eagle3moe": "EAGLE-3 heads with experts are not supported",
}
_LAYER = re.compile(r"(?:midlayer|layers\.0)\.(.+)")
_IDS, _CHOSEN, _EMBED = f"{EAGLE3}.d2t", f"{EAGLE3}.t2d", f"{EAGLE3}.embed_tokens.weight"
_OF_GQA = ("num_key_value_heads", "head_dim", "attention_bias")
_OF_BOTH = (
    "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "rope_interleave", "max_position_embeddings", "torch_dtype", "dtype", "hidden_act",
    "quantization_config", "q_lora_rank", *OF_MLA,
)  # fmt: skip


def is_head(raw: JsonObject) -> bool:
    """Whether a config.json is that of an EAGLE-3 head. Raises ConfigError for a head of another kind."""
    names = raw.get("architectures")
    said = [*(names if isinstance(names, list) else ()), raw.get("speculators_model_type")]
    kinds = [str(name).lower() for name in said]
    for kind in kinds:
        if why := next((why for mark, why in _OTHERS.items() if mark in kind), None):
            raise ConfigError(
                f"config.json says {kind!r:.80}: {why}; expected an EAGLE-3 head or NextN layers"
            )
    return any("eagle3" in kind for kind in kinds)


def head_config(
    raw: JsonObject, cfg: ModelConfig, tensors: dict[str, Tensor], captures: Captures | None
) -> Eagle3Config:
    """The head that config.json and its tensors describe, for the trunk of ``cfg``.

    captures: the meaning of the list of taps; None: outputs if it begins with 1, else inputs, as SGLang and
    vLLM read it. Raises ConfigError for a head that does not fit the trunk, or is not supported.
    """
    inner, nested = raw.get("transformer_layer_config"), raw.get("eagle_config")
    layer: JsonObject = inner if isinstance(inner, dict) else raw
    eagle: JsonObject = nested if isinstance(nested, dict) else {}
    said = eagle | {key: value for key, value in raw.items() if value is not None}

    def flag(name: str) -> bool:
        value = said.get(name, False)
        if type(value) is not bool:
            raise ConfigError(f"{name} = {value!r:.80}; expected true or false")
        return value

    if said.get("use_aux_hidden_state", True) is not True:
        raise ConfigError("use_aux_hidden_state = false is not supported; expected a head that reads taps")
    width = layer.get("hidden_size")
    for name, got, wanted in (
        ("vocab_size", layer.get("vocab_size"), cfg.vocab_size),
        ("target_hidden_size", said.get("target_hidden_size", width), cfg.hidden_size),
    ):
        if got != wanted:
            raise ConfigError(f"the head is made for {name} = {got!r:.80}, the model has {wanted}")
    taps = _taps(said, cfg.num_hidden_layers, captures)
    each, joint = flag("fc_norm"), flag("norm_before_fc")
    if each and joint:
        raise ConfigError("fc_norm and norm_before_fc are both true; expected one of them at most")
    vocabulary = said.get("draft_vocab_size", cfg.vocab_size)
    scale = said.get("logit_scale", 1.0)
    if not is_number(scale) or scale <= 0:
        raise ConfigError(f"logit_scale = {scale!r:.80}; expected a positive number")
    return Eagle3Config(
        layer=_layer_config(layer, vocabulary),
        taps=taps,
        tap_norms=len(taps) if each else int(joint),
        normed_output=flag("norm_output"),
        normed_residual=flag("norm_before_residual"),
        logit_scale=float(scale),
        maps=_IDS in tensors or vocabulary != cfg.vocab_size,
        embeds=_EMBED in tensors or width != cfg.hidden_size,
    )


def _taps(said: JsonObject, layers: int, captures: Captures | None) -> tuple[int, ...]:
    """Numbers of residual streams, k the stream after k layers."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = said.get(key)
    if ids is None:  # EAGLE's own three: inputs of a layer near the start, in the middle and near the end
        ids, captures = [2, layers // 2, layers - 3], "inputs"
    numbers = [i for i in ids if type(i) is int] if isinstance(ids, list) else []
    outputs = captures == "outputs" or (captures is None and numbers[:1] == [1])
    taps = tuple(i + outputs for i in numbers) if numbers == ids else ()
    if not taps or not all(0 <= tap <= layers for tap in taps):
        raise ConfigError(
            f"{key} = {ids!r:.80}, {'outputs' if outputs else 'inputs'} of layers; expected layers "
            f"of the model, which has {layers}"
        )
    if (count := said.get("num_aux_hidden_states", len(taps))) != len(taps):
        raise ConfigError(f"num_aux_hidden_states = {count!r:.80}, but {key} names {len(taps)}")
    return taps


def _layer_config(layer: JsonObject, vocabulary: object) -> ModelConfig:
    """The head's layer as a dense model of one layer: of MLA as in DeepSeek-V3, or of GQA as in Llama."""
    if layer.get("num_hidden_layers", 1) != 1:
        raise ConfigError(f"num_hidden_layers = {layer['num_hidden_layers']!r:.80} of a head; expected 1")
    kinds = layer.get("layer_types") or []
    if layer.get("use_sliding_window") or not isinstance(kinds, list) or {*kinds} - {"full_attention"}:
        raise ConfigError("a head with a sliding window is not supported; expected full attention")
    mla = layer.get("kv_lora_rank") is not None
    keys = _OF_BOTH if mla else (*_OF_BOTH, *_OF_GQA)
    sizes: JsonObject = {key: layer[key] for key in keys if layer.get(key) is not None}
    if not mla:
        heads, width = sizes.get("num_attention_heads"), sizes.get("hidden_size")
        if "head_dim" not in sizes and type(heads) is int and heads > 0 and type(width) is int:
            sizes["head_dim"] = width // heads
        sizes = {"num_key_value_heads": heads, "attention_bias": False, **sizes}
        sizes |= {"partial_rotary_factor": 1, "use_qk_norm": False}
    kind = "deepseek_v3" if mla else "glm4_moe"
    return ModelConfig.from_dict(
        {**sizes, "model_type": kind, "vocab_size": vocabulary, "num_hidden_layers": 1}
    )


def head_tensors(folder: Folder) -> dict[str, Tensor]:
    """The tensors of a head under the names of ``specs``."""
    found: dict[str, Tensor] = {}
    single = not any("fc_norm.1." in name for name in folder.tensors)
    for name, tensor in folder.tensors.items():
        short = name.removeprefix("model.")
        match = _LAYER.fullmatch(short)
        short = f"layer.{match[1]}" if match else short
        if single:  # one norm of one tap is the norm of all taps
            short = short.replace("fc_norm.0.", "input_norm.")
        new = f"{EAGLE3}.{short}"
        if new in found:
            raise CheckpointError(f"{tensor} is also there as {found[new].name}; expected one of them")
        found[new] = tensor
    return found


def check_ids(tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Check the tables of the head's tokens, and take out ``t2d``, which says the same as ``d2t``.

    Raises CheckpointError.
    """
    chosen, offsets = tensors.pop(_CHOSEN, None), tensors.get(_IDS)
    if offsets is None:
        return
    if offsets.dtype not in IDS or len(offsets.shape) != 1:
        raise CheckpointError(
            f"{offsets} is {offsets.dtype} {list(offsets.shape)}; expected a list of {' or '.join(IDS)}"
        )
    ids = np.arange(offsets.shape[0]) + offsets.array()
    wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if wrong.size:
        raise CheckpointError(
            f"{offsets} maps token {wrong[0]} of the head to {ids[wrong[0]]}; expected tokens of "
            f"the model, 0 to {vocabulary - 1}"
        )
    if chosen is not None and set(np.flatnonzero(chosen.array())) != set(ids.tolist()):
        raise CheckpointError(f"{chosen} marks other tokens than {offsets.name} names; expected the same")
