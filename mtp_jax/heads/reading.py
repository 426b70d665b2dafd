"""A head's folder, as trainers and speculators write it: config.json with nested parts, names of tensors."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from mtp_jax.errors import ConfigError
from mtp_jax.heads.tables import CHOSEN, EMBED, OFFSETS, OUT
from mtp_jax.json_object import JsonObject
from mtp_jax.model.attention_config import OF_MLA
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_of
from mtp_jax.model.head import DRAFT_HEAD, Captures, DraftHead, StoredTensor

# Marks of the names of architectures and types, in lower case: of heads that are read, and of heads that are
# refused.
_EAGLE3, _BLOCKS = "eagle3", ("dflash", "dspark")
_OTHERS = {
    "domino": "Domino projectors are not supported",
    "eagle3moe": "EAGLE-3 heads with experts are not supported",
    "medusa": "Medusa heads are an example of --drafter (docs/research.md)",
}
_LAYER = re.compile(r"(?:midlayer|layers\.(\d{1,9}))\.(.+)")
_FUSE, _OF_EAGLE3, _OF_BLOCKS = "fc.weight", "layers.0.hidden_norm.weight", "hidden_norm.weight"
_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_OF_GQA = ("num_key_value_heads", "head_dim", "attention_bias")
_OF_BOTH = (
    "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "rope_interleave", "max_position_embeddings", "torch_dtype", "dtype", "hidden_act",
    "quantization_config", "q_lora_rank", "num_hidden_layers", *OF_MLA,
)  # fmt: skip


def said_kinds(raw: JsonObject) -> list[str]:
    """Names of architectures and types in config.json, in lower case."""
    names = raw.get("architectures")
    said = [*(names if isinstance(names, list) else ()), raw.get("speculators_model_type")]
    return [str(name).lower() for name in (*said, raw.get("projector_type"))]


def with_layers(raw: JsonObject, tensors: Collection[str]) -> Literal["EAGLE-3", "blocks"] | None:
    """The kind of a head with decoder layers; None: its tensors and config.json tell of no such head.

    Trainers also publish heads under the architecture of a plain model, such as ``LlamaForCausalLM``. A head
    that drafts blocks has a norm of contexts, and no norm of hidden states in its layer.
    """
    short, kinds = {short_name(name) for name in tensors}, said_kinds(raw)
    blocks = any(mark in kind for kind in kinds for mark in _BLOCKS)
    if not (_FUSE in short or blocks or any(_EAGLE3 in kind for kind in kinds)):
        return None
    marks = {_OF_EAGLE3, _OF_BLOCKS} & short
    return "blocks" if (marks == {_OF_BLOCKS} if marks else blocks) else "EAGLE-3"


@dataclass(frozen=True, kw_only=True)
class LayeredHead(DraftHead):
    """A draft head with decoder layers of its own, in the folders of trainers and of speculators.

    Attributes:
        form: the answer of ``with_layers`` for its folders.
    """

    form: ClassVar[Literal["EAGLE-3", "blocks"]]

    @property
    def untuned(self) -> str | None:
        """It is tuned."""
        return None

    @classmethod
    def reads(cls, raw: JsonObject, tensors: Mapping[str, StoredTensor]) -> bool:
        """Whether the tensors, or else config.json, tell of such a head."""
        return with_layers(raw, tensors) == cls.form

    @classmethod
    def names(cls, names: Collection[str]) -> dict[str, str]:
        """Names of EAGLE's, SGLang's, vLLM's, the trainers' and speculators' folders."""
        return short_names(names)


def refuse_unknown(raw: JsonObject, tensors: Mapping[str, StoredTensor], known: str) -> None:
    """Raises ConfigError for a head of a kind that is not supported. known: kinds that are."""
    for kind in said_kinds(raw):
        if why := next((why for mark, why in _OTHERS.items() if mark in kind), None):
            raise ConfigError(f"config.json says {kind!r:.80}: {why}; {known}")
    short = {short_name(name): tensor for name, tensor in tensors.items()}
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


def short_name(name: str) -> str:
    """A tensor's name in a head's folder, in the dialect of ``specs``."""
    short = name.removeprefix("model.")
    for alias, known in _ALIASES.items():
        short = short.replace(alias, known)
    match = _LAYER.fullmatch(short)
    if not match:
        return short
    own = match[2].replace("_proj.scale", "_proj.weight_scale_inv")  # as ``spec.scale_name`` has V4's layers
    return f"layers.{match[1] or 0}.{own}"


def short_names(names: Collection[str]) -> dict[str, str]:
    """The names in the dialect of ``specs`` of a folder's tensors."""
    several = any("fc_norm.1." in name for name in names)
    short = {name: short_name(name) for name in names}
    # One norm of one tap is the norm of all taps.
    return short if several else {n: s.replace("fc_norm.0.", "input_norm.") for n, s in short.items()}


@dataclass(frozen=True)
class HeadFile:
    """The config.json of a head with decoder layers, beside its tensors and its trunk.

    Raises ConfigError for a head that is made for another trunk.
    """

    raw: JsonObject
    trunk: ModelConfig
    tensors: Mapping[str, StoredTensor]

    def __post_init__(self) -> None:
        said, cfg = self.said, self.trunk
        for name, got, wanted in (
            ("vocab_size", self._rows(EMBED, CHOSEN), cfg.vocab_size),
            ("target_hidden_size", said.get("target_hidden_size"), cfg.hidden_size),
            ("num_target_layers", said.get("num_target_layers"), cfg.num_hidden_layers),
        ):
            if got not in (None, wanted):
                raise ConfigError(f"the head is made for {name} = {got!r:.80}, the model has {wanted}")

    @property
    def said(self) -> JsonObject:
        """The keys of all parts of config.json that have a value."""
        names = ("eagle_config", "dflash_config")
        nested = [self.raw[name] for name in names if isinstance(self.raw.get(name), dict)]
        return {k: v for part in (*nested, self.raw) for k, v in part.items() if v is not None}

    @property
    def layer(self) -> JsonObject:
        """The part of config.json with the sizes of layers."""
        inner = self.raw.get("transformer_layer_config")
        return inner if isinstance(inner, dict) else self.raw

    @property
    def vocabulary(self) -> object:
        """The number of tokens that the head drafts from, as far as config.json has a number."""
        # A head without a table drafts by the trunk's; config.json often has the vocabulary of another model.
        whole = self.trunk.vocab_size
        declared = whole if self.tensors else self.said.get("draft_vocab_size", whole)
        return self._rows(OUT, OFFSETS) or declared

    @property
    def narrower(self) -> bool:
        """Whether the head has another width than the trunk, whose tables then do not serve it."""
        return self.layer.get("hidden_size") != self.trunk.hidden_size

    @property
    def maps(self) -> bool:
        """Whether it has a table of its tokens' ids."""
        return OFFSETS in self.tensors or self.vocabulary != self.trunk.vocab_size

    @property
    def embeds(self) -> bool:
        """Whether it has an embedding of its own."""
        return self.narrower or EMBED in self.tensors

    @property
    def heads(self) -> bool:
        """Whether it has an output table of its own."""
        return self.maps or self.narrower or OUT in self.tensors

    def _rows(self, *names: str) -> int | None:
        """Rows of the first of these tables that is there."""
        found = (self.tensors[name].shape for name in names if name in self.tensors)
        return next((shape[0] for shape in found if shape), None)

    @property
    def _held(self) -> int | None:
        """The number of layers that the tensors are of; None without any."""
        matches = (_LAYER.fullmatch(name.removeprefix(f"{DRAFT_HEAD}.")) for name in self.tensors)
        return len({int(match[1] or 0) for match in matches if match}) or None

    def layers(self, blocks: bool) -> ModelConfig:
        """The layers as a dense model, with MLA as in DeepSeek-V3, or with GQA, normed as in Qwen3 or not.

        blocks: whether the head drafts blocks.
        """
        layer, held = self.layer, self._held
        kinds = layer.get("layer_types") or []
        sliding = layer.get("use_sliding_window") or layer.get("sliding_window_non_causal")
        if sliding or not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise ConfigError("a head with a sliding window is not supported; expected full attention")
        mla = layer.get("kv_lora_rank") is not None
        if blocks and mla:
            raise ConfigError("a block drafter with MLA is not supported; expected Qwen3's layers")
        sizes = self._sizes(_OF_BOTH) if mla else self._gqa(qk_norm=blocks)
        declared = sizes.setdefault("num_hidden_layers", held or 1)
        if blocks and held not in (None, declared):
            raise ConfigError(
                f"num_hidden_layers = {declared!r:.80} of a head, whose file has {held}; expected {held}"
            )
        # EAGLE-3's often is that of a model that it was made of.
        sizes["num_hidden_layers"] = held or declared
        kind = "deepseek_v3" if mla else "glm4_moe"
        return config_of({**sizes, "model_type": kind, "vocab_size": self.vocabulary})

    def _sizes(self, keys: Collection[str]) -> JsonObject:
        return {key: self.layer[key] for key in keys if self.layer.get(key) is not None}

    def _gqa(self, qk_norm: bool) -> JsonObject:
        sizes = self._sizes((*_OF_BOTH, *_OF_GQA))
        heads, width = sizes.get("num_attention_heads"), sizes.get("hidden_size")
        if "head_dim" not in sizes and type(heads) is int and heads > 0 and type(width) is int:
            sizes["head_dim"] = width // heads
        sizes = {"num_key_value_heads": heads, "attention_bias": False, **sizes}
        return sizes | {"partial_rotary_factor": 1, "use_qk_norm": qk_norm}


def flag(said: JsonObject, name: str, default: bool = False) -> bool:
    """The value of a key that is true or false. Raises ConfigError."""
    value = said.get(name, default)
    if type(value) is not bool:
        raise ConfigError(f"{name} = {value!r:.80}; expected true or false")
    return value


def whole(said: JsonObject, name: str, least: int = 1, most: int = 2**31 - 1) -> int:
    """The value of a key that is a whole number in these bounds. Raises ConfigError."""
    value = said.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} = {value!r:.80}; expected a whole number from {least} to {most}")
    return value


def taps_of(said: JsonObject, key: str, layers: int, captures: Captures) -> tuple[int, ...]:
    """Numbers of residual streams, k the stream after k layers. Raises ConfigError."""
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
