"""Draft heads in the dialects of their trainers and of speculators: config.json, names of tensors."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from mtp_jax.checkpoint.folder import Folder
from mtp_jax.checkpoint.formats import IDS
from mtp_jax.checkpoint.medusa import is_medusa, medusa_config, medusa_name
from mtp_jax.checkpoint.safetensors_file import Tensor, shown
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.json_object import JsonObject, is_number
from mtp_jax.model.config import OF_MLA, ModelConfig
from mtp_jax.model.head_config import BlockConfig, Captures, Eagle3Config, Head, StagesConfig
from mtp_jax.model.head_specs import DRAFT_HEAD

# Marks of the names of architectures and types, in lower case: of heads that are read, and of others.
_EAGLE3, _BLOCKS = "eagle3", ("dflash", "dspark")
_OTHERS = {
    "domino": "Domino projectors are not supported",
    "eagle3moe": "EAGLE-3 heads with experts are not supported",
}
_LAYER = re.compile(r"(?:midlayer|layers\.(\d{1,9}))\.(.+)")
_IDS, _CHOSEN, _EMBED, _OUT = (
    f"{DRAFT_HEAD}.{name}" for name in ("d2t", "t2d", "embed_tokens.weight", "lm_head.weight")
)
_FUSE, _OF_EAGLE3, _OF_BLOCKS = "fc.weight", "layers.0.hidden_norm.weight", "hidden_norm.weight"
# Every step computes a block whole, however few drafts are wanted: 16 times DFlash's block of 16.
_MOST_BLOCK = 256
_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_OF_GQA = ("num_key_value_heads", "head_dim", "attention_bias")
_OF_BOTH = (
    "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "rope_interleave", "max_position_embeddings", "torch_dtype", "dtype", "hidden_act",
    "quantization_config", "q_lora_rank", "num_hidden_layers", *OF_MLA,
)  # fmt: skip
# Fields of a trunk that say nothing of its stages, at their defaults.
_OF_FILES = {"eos_token_ids": (), "dtype": "bfloat16", "fp8": False, "fp4": False}
# Factors that some block drafters have, and the values at which they change nothing.
_NEUTRAL = {"output_multiplier": 1, "input_embedding_scale": 1, "final_logit_softcapping": None}


def is_head(raw: JsonObject, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a folder is that of a draft head: its tensors say so, or config.json.

    Trainers also publish heads under the architecture of a plain model, such as ``LlamaForCausalLM``. Raises
    ConfigError for a head of an unknown kind.
    """
    kinds, known = (
        _kinds(raw),
        "expected a head of EAGLE-3, DFlash, DFlash2 or DSpark, Medusa heads, or NextN layers",
    )
    for kind in kinds:
        if why := next((why for mark, why in _OTHERS.items() if mark in kind), None):
            raise ConfigError(f"config.json says {kind!r:.80}: {why}; {known}")
    short = {_short(name): tensor for name, tensor in tensors.items()}
    fuse = short.get(_FUSE)
    if (
        fuse is not None
        and fuse.shape[1:] == (2 * fuse.shape[0],)
        and not {_OF_EAGLE3, _OF_BLOCKS} & {*short}
    ):
        raise ConfigError(
            f"{fuse} is {list(fuse.shape)}, and there is no hidden_norm: a head of EAGLE-1 or EAGLE-2, which "
            f"is not supported; {known}"
        )
    says = any(mark in kind for kind in kinds for mark in (_EAGLE3, *_BLOCKS))
    return is_medusa(raw) or fuse is not None or says


def _is_block(raw: JsonObject, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a head drafts blocks: it has a norm of contexts, and no norm of hidden states in its layer."""
    marks = {name for name in (_OF_EAGLE3, _OF_BLOCKS) if f"{DRAFT_HEAD}.{name}" in tensors}
    said = any(mark in kind for kind in _kinds(raw) for mark in _BLOCKS)
    return marks == {_OF_BLOCKS} if marks else said


def _kinds(raw: JsonObject) -> list[str]:
    names = raw.get("architectures")
    said = [*(names if isinstance(names, list) else ()), raw.get("speculators_model_type")]
    return [str(name).lower() for name in (*said, raw.get("projector_type"))]


def head_config(
    raw: JsonObject, cfg: ModelConfig, tensors: dict[str, Tensor], captures: Captures | None
) -> Head:
    """The head that config.json and its tensors describe, for the trunk of ``cfg``.

    captures: the meaning of the list of taps; None: outputs for a block drafter, and for an EAGLE-3 head if
    the list begins with 1, else inputs, as SGLang and vLLM read it. Raises ConfigError for a head that does
    not fit the trunk, or is not supported.
    """
    if is_medusa(raw):
        return medusa_config(raw, cfg, tensors, captures)
    inner = raw.get("transformer_layer_config")
    layer: JsonObject = inner if isinstance(inner, dict) else raw
    nested = [raw[key] for key in ("eagle_config", "dflash_config") if isinstance(raw.get(key), dict)]
    said = {k: v for d in (*nested, raw) for k, v in d.items() if v is not None}
    width = layer.get("hidden_size")
    for name, got, wanted in (
        ("vocab_size", _rows(tensors, _EMBED, _CHOSEN), cfg.vocab_size),
        ("target_hidden_size", said.get("target_hidden_size"), cfg.hidden_size),
        ("num_target_layers", said.get("num_target_layers"), cfg.num_hidden_layers),
    ):
        if got not in (None, wanted):
            raise ConfigError(f"the head is made for {name} = {got!r:.80}, the model has {wanted}")
    blocks = _is_block(raw, tensors)
    # A head without a table drafts by the trunk's; config.json often has the vocabulary of another model.
    declared = cfg.vocab_size if tensors else said.get("draft_vocab_size", cfg.vocab_size)
    vocabulary = _rows(tensors, _OUT, _IDS) or declared
    maps = _IDS in tensors or vocabulary != cfg.vocab_size
    narrower = width != cfg.hidden_size
    sizes = _layer_config(layer, vocabulary, blocks, _layers(tensors))
    head = (_block_head if blocks else _eagle3)(said, sizes, cfg, captures)
    own = maps or narrower or _OUT in tensors or not (blocks or tensors)
    return replace(head, maps=maps, embeds=narrower or _EMBED in tensors, heads=own)


def _rows(tensors: Mapping[str, Tensor], *names: str) -> int | None:
    """Rows of the first of these tables that is there."""
    found = (tensors[name].shape for name in names if name in tensors)
    return next((shape[0] for shape in found if shape), None)


def _layers(tensors: Mapping[str, Tensor]) -> int | None:
    """The number of layers that a head's tensors are of; None without any."""
    matches = (_LAYER.fullmatch(name.removeprefix(f"{DRAFT_HEAD}.")) for name in tensors)
    return len({int(match[1] or 0) for match in matches if match}) or None


def _flag(said: JsonObject, name: str, default: bool = False) -> bool:
    value = said.get(name, default)
    if type(value) is not bool:
        raise ConfigError(f"{name} = {value!r:.80}; expected true or false")
    return value


def _eagle3(
    said: JsonObject, layer: ModelConfig, trunk: ModelConfig, captures: Captures | None
) -> Eagle3Config:
    layers = trunk.num_hidden_layers
    if said.get("use_aux_hidden_state", True) is not True:
        raise ConfigError("use_aux_hidden_state = false is not supported; expected a head that reads taps")
    if layer.num_hidden_layers != 1:
        raise ConfigError(f"an EAGLE-3 head of {layer.num_hidden_layers} layers is not supported; expected 1")
    key = "eagle_aux_hidden_state_layer_ids"
    if said.get(key) is None:  # EAGLE's own three: inputs of layers near the start, in the middle, at the end
        said, captures = {**said, key: [2, layers // 2, layers - 3]}, "inputs"
    if captures is None:
        captures = "outputs" if isinstance(said[key], list) and said[key][:1] == [1] else "inputs"
    taps = _taps(said, key, layers, captures)
    each, joint = _flag(said, "fc_norm"), _flag(said, "norm_before_fc")
    if each and joint:
        raise ConfigError("fc_norm and norm_before_fc are both true; expected one of them at most")
    scale = said.get("logit_scale", 1.0)
    if not is_number(scale) or scale <= 0:
        raise ConfigError(f"logit_scale = {scale!r:.80}; expected a positive number")
    return Eagle3Config(
        layer=layer,
        taps=taps,
        tap_norms=len(taps) if each else int(joint),
        normed_output=_flag(said, "norm_output"),
        normed_residual=_flag(said, "norm_before_residual"),
        logit_scale=float(scale),
    )


def _block_head(
    said: JsonObject, layers: ModelConfig, trunk: ModelConfig, captures: Captures | None
) -> BlockConfig:
    for key, neutral in _NEUTRAL.items():
        if said.get(key, neutral) != neutral:
            raise ConfigError(f"{key} = {said[key]!r:.80} of a head is not supported; expected {neutral}")
    if layers.gqa is None:
        raise ConfigError("a block drafter with MLA is not supported; expected Qwen3's layers")
    kind = said.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise ConfigError(f"markov_head_type = {kind!r:.80} is not supported; expected 'vanilla'")

    whole = partial(_whole, said)
    # A DSpark head drafts from its anchor unless it says otherwise, a DFlash head does not.
    anchored = _flag(said, "sample_from_anchor", any("dspark" in kind for kind in _kinds(said)))
    convolution = selector = None
    if "conv_kernel_size" in said:
        convolution = whole("conv_kernel_size"), whole("conv_group_size")
        if layers.hidden_size % convolution[1]:
            raise ConfigError(
                f"conv_group_size = {convolution[1]} does not divide {layers.hidden_size} channels"
            )
    if "selector_rank" in said:
        selector = whole("selector_rank"), whole("selector_top_k", 1, layers.vocab_size)
    key = "target_layer_ids" if "target_layer_ids" in said else "aux_hidden_state_layer_ids"
    return BlockConfig(
        layers=layers,
        taps=_taps(said, key, trunk.num_hidden_layers, captures or "outputs"),
        block=whole("block_size", 1 if anchored else 2, _MOST_BLOCK),
        mask=whole("mask_token_id", 0, trunk.vocab_size - 1),  # a token of the model
        anchored=anchored,
        convolution=convolution,
        selector=selector,
        markov=whole("markov_rank", 0) if "markov_rank" in said else 0,
        confidence=_flag(said, "enable_confidence_head"),
        markov_confidence=_flag(said, "confidence_head_with_markov"),
    )


def stages_config(raw: JsonObject, cfg: ModelConfig, count: int) -> StagesConfig:
    """``count`` DSpark stages of a DeepSeek-V4, as the model's config.json describes them.

    Raises ConfigError.
    """
    assert cfg.compressed is not None, "DeepSeek-V4 has compressed attention"
    told = raw.get("n_mtp_layers")
    if told not in (None, count):
        raise ConfigError(f"n_mtp_layers = {told!r:.80}; expected {count}, or no such key")
    layers = replace(
        cfg.without_drafts(),
        num_hidden_layers=count,
        num_hash_layers=0,
        compressed=replace(cfg.compressed, ratios=(0,) * count),
        **_OF_FILES,
    )
    return StagesConfig(
        layers=layers,
        taps=_taps(raw, "dspark_target_layer_ids", cfg.num_hidden_layers, "outputs"),
        block=_whole(raw, "dspark_block_size", 1, _MOST_BLOCK),
        mask=_whole(raw, "dspark_noise_token_id", 0, cfg.vocab_size - 1),
        anchored=True,
        markov=_whole(raw, "dspark_markov_rank"),
        confidence=True,
        markov_confidence=True,
    )


def _whole(said: JsonObject, name: str, least: int = 1, most: int = 2**31 - 1) -> int:
    value = said.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} = {value!r:.80}; expected a whole number from {least} to {most}")
    return value


def _taps(said: JsonObject, key: str, layers: int, captures: Captures) -> tuple[int, ...]:
    """Numbers of residual streams, k the stream after k layers."""
    ids, outputs = said.get(key), captures == "outputs"
    numbers = [i for i in ids if type(i) is int] if isinstance(ids, list) else []
    taps = tuple(i + outputs for i in numbers) if numbers == ids else ()
    if not taps or not all(i >= 0 and i + outputs <= layers for i in numbers):
        raise ConfigError(
            f"{key} = {ids!r:.80}, {captures} of layers; expected layers of the model, which has {layers}"
        )
    if (count := said.get("num_aux_hidden_states", len(taps))) != len(taps):
        raise ConfigError(f"num_aux_hidden_states = {count!r:.80}, but {key} names {len(taps)}")
    return taps


def _layer_config(layer: JsonObject, vocabulary: object, blocks: bool, held: int | None) -> ModelConfig:
    """The head's layers as a dense model: of MLA as in DeepSeek-V3, or of GQA, normed as in Qwen3 or not.

    blocks: whether the head drafts blocks. held: layers in its file; None: no tensor is known.
    """
    kinds = layer.get("layer_types") or []
    sliding = layer.get("use_sliding_window") or layer.get("sliding_window_non_causal")
    if sliding or not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ConfigError("a head with a sliding window is not supported; expected full attention")
    mla = layer.get("kv_lora_rank") is not None
    keys = _OF_BOTH if mla else (*_OF_BOTH, *_OF_GQA)
    sizes: JsonObject = {key: layer[key] for key in keys if layer.get(key) is not None}
    if not mla:
        heads, width = sizes.get("num_attention_heads"), sizes.get("hidden_size")
        if "head_dim" not in sizes and type(heads) is int and heads > 0 and type(width) is int:
            sizes["head_dim"] = width // heads
        sizes = {"num_key_value_heads": heads, "attention_bias": False, **sizes}
        sizes |= {"partial_rotary_factor": 1, "use_qk_norm": blocks}
    kind = "deepseek_v3" if mla else "glm4_moe"
    declared = sizes.setdefault("num_hidden_layers", held or 1)
    if blocks and held not in (None, declared):
        raise ConfigError(
            f"num_hidden_layers = {declared!r:.80} of a head, whose file has {held}; expected {held}"
        )
    sizes["num_hidden_layers"] = held or declared  # EAGLE-3's often is that of a model that it was made of
    return ModelConfig.from_dict({**sizes, "model_type": kind, "vocab_size": vocabulary})


def head_tensors(folder: Folder, raw: JsonObject) -> dict[str, Tensor]:
    """The tensors of a head under the names of ``specs``. raw: its config.json."""
    found: dict[str, Tensor] = {}
    medusa = is_medusa(raw)
    single = not any("fc_norm.1." in name for name in folder.tensors)
    for name, tensor in folder.tensors.items():
        short = _short(name, medusa)
        if single:  # one norm of one tap is the norm of all taps
            short = short.replace("fc_norm.0.", "input_norm.")
        new = f"{DRAFT_HEAD}.{short}"
        if new in found:
            raise CheckpointError(f"{tensor} is also there as {shown(found[new].name)}; expected one of them")
        found[new] = tensor
    return found


def _short(name: str, medusa: bool = False) -> str:
    """A tensor's name in a head's folder, in the dialect of ``specs``."""
    short = name.removeprefix("model.")
    for alias, known in _ALIASES.items():
        short = short.replace(alias, known)
    if medusa:
        return medusa_name(short)
    match = _LAYER.fullmatch(short)
    if not match:
        return short
    own = match[2].replace("_proj.scale", "_proj.weight_scale_inv")  # as ``spec.scale_name`` has V4's layers
    return f"layers.{match[1] or 0}.{own}"


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
