"""A family of models: its config.json, the names of its tensors, and its layers.

Most releases have its defaults: tensors as transformers names them, and NextN layers whose numbers go
on behind the trunk's, as DeepSeek-V3 has them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from mtp_jax.errors import CheckpointError, ConfigError, shortlist
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.config_parts import MOST
from mtp_jax.model.family.hints import TensorNames, contradicts, listed
from mtp_jax.model.family.keys import dtype_of
from mtp_jax.model.hf_quantization import quantisation
from mtp_jax.model.layer_names import layer_of, nextn_layers
from mtp_jax.model.layer_specs import Layer, block, norm, table
from mtp_jax.model.nextn_specs import NextN
from mtp_jax.model.spec import Spec

# Fields that no key of config.json has as its value.
_MADE = {"family", "drafter", "indexer", "gqa", "compressed", "hyper", "rope_scaling"}
# Their defaults in transformers are DeepSeek-V3's own values, which a file of another model must not fall
# back to.
OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok", "routed_scaling_factor")
_GROUPS = "n_group", "topk_group"


class TrunkNames(NamedTuple):
    """Names of the trunk's tensors beside its layers."""

    embed: str
    norm: str
    head: str


class Family:
    """Models that are described and stored in the same way.

    Attributes:
        name: its key in ``FAMILIES``, and the model_type that it writes.
        title: its name for people.
        types: values of model_type that it reads.
        architectures: beginnings of class names in ``architectures``, and the model_type that each means.
        stem: the beginning of the class name of an export of its NextN layers.
        allowed: keys of config.json that must have one value where they are there.
        needed: keys that a model must have, beside sizes that all models have.
        needed_by_experts: further keys that a model with routed experts must have.
        unwritten: fields of ``ModelConfig`` that are no key of config.json.
        names: names of the trunk's tensors beside its layers.
        names_of_layers: a pattern of the names of its layers, up to their numbers.
        nextn_module: "module:class" of NextN layers as a ``DraftModule``.
        keeps_names: whether NextN layers have the same names in a folder of their own.
        narrow: dtypes of narrow weights that its releases have.
        scales: dtypes that the scales of FP8 weights may have.
    """

    name: str
    title: str
    types: Sequence[str]
    architectures: Mapping[str, str]
    stem: str
    allowed: Mapping[str, object] = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
    }
    needed: Sequence[str] = ()
    needed_by_experts: Sequence[str] = (*OF_EXPERTS, *_GROUPS)
    unwritten: Sequence[str] = ("swiglu_limit", "num_hash_layers")
    names_of_layers: str = r"model\.layers"
    nextn_module: str = "mtp_jax.model.nextn:NextNLayers"
    keeps_names: bool = False
    narrow: Sequence[str] = ("F8_E4M3",)
    scales: tuple[str, ...] = ("F32", "BF16")
    names = TrunkNames("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")

    # config.json

    def read(self, raw: JsonObject, kind: str) -> ModelConfig:
        """The model that a config.json describes. kind: its model_type. Raises ConfigError."""
        self._refuse(raw)
        eos = raw.get("eos_token_id")
        known = {f.name: f for f in fields(ModelConfig) if f.name not in _MADE}
        values = {name: raw[name] for name in known if raw.get(name) is not None}
        values |= {
            "swiglu_limit": None,
            "num_hash_layers": 0,
            **self.translate(raw, kind),
            **quantisation(raw),
        }
        values |= {
            "family": self.name,
            "dtype": dtype_of(raw),
            "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        }
        moe = bool(values.get("n_routed_experts"))
        required = [name for name, f in known.items() if f.default is MISSING]
        required += [*self.needed, *(self.needed_by_experts if moe else ())]
        if missing := [name for name in required if name not in values]:
            raise ConfigError(f"config.json lacks {', '.join(missing)}; a {self.title} config has them all")
        if not moe:
            values["first_k_dense_replace"] = values["num_hidden_layers"]
        try:
            count = values.get("num_nextn_predict_layers", 0)
            values["nextn_moe"] = tuple(raw.get("nextn_moe", [moe] * min(count, MOST + 1)))
            cfg = ModelConfig(**values)
        except (TypeError, OverflowError) as e:
            raise ConfigError(f"config.json has a value of the wrong type: {e}") from e
        self.check(cfg)
        return cfg

    def check(self, cfg: ModelConfig) -> None:
        """Raises ConfigError for values that this family's models cannot have."""

    def translate(self, raw: JsonObject, kind: str) -> dict[str, Any]:
        """Fields of ``ModelConfig`` that are not keys of the same name. Raises ConfigError."""
        raise NotImplementedError

    def _refuse(self, raw: JsonObject) -> None:
        for key, allowed in self.allowed.items():
            for given in (raw, raw.get("rope_parameters")):
                got = given.get(key) if isinstance(given, dict) else None
                if got is not None and got != allowed:
                    raise ConfigError(f"{key} = {got!r:.200} is not supported; expected {allowed!r}")

    def write(self, cfg: ModelConfig) -> JsonObject:
        """``config.json`` in the dialect of the release, without quantisation."""
        model_type, architecture = self.kind(cfg)
        left_out = {*_MADE, "fp8", "fp4", "int4_group", "nvfp4", *self.unwritten}
        out: JsonObject = {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_act": "silu",
            **{f.name: getattr(cfg, f.name) for f in fields(cfg) if f.name not in left_out},
            **self.keys(cfg),
            **(cfg.drafter.keys if cfg.drafter else {}),
        }
        out["torch_dtype"] = out.pop("dtype")
        ids = out.pop("eos_token_ids")
        out["eos_token_id"] = ids[0] if len(ids) == 1 else list(ids) or None
        out["rope_scaling"] = cfg.rope_scaling.keys if cfg.rope_scaling else None
        out["nextn_moe"] = list(cfg.nextn_moe)
        return out

    def kind(self, cfg: ModelConfig) -> tuple[str, str]:
        """The model_type and the architecture that it writes."""
        return self.name, f"{self.stem}ForCausalLM"

    def keys(self, cfg: ModelConfig) -> JsonObject:
        """Keys of config.json for attention, and further keys that are no fields of the same name."""
        raise NotImplementedError

    # Tensors

    def layer(self, cfg: ModelConfig, number: int) -> Layer:
        """The specs of a layer of the trunk."""
        name = f"model.layers.{number}"
        return block(cfg, name, cfg.is_moe(number), cfg.indexes(number), cfg.hidden_size)

    def beside_layers(self, cfg: ModelConfig) -> dict[str, Any]:
        """Fields of ``Params`` that this family's models have beside the fields of all models."""
        return {}

    def nextn_name(self, cfg: ModelConfig, k: int) -> str:
        """The beginning of the names of a NextN layer's tensors."""
        return f"model.layers.{cfg.num_hidden_layers + k}"

    def nextn_copies(self, cfg: ModelConfig, k: int) -> tuple[str, str]:
        """Names of the copies of embedding and head that NextN layer ``k`` may carry."""
        p = self.nextn_name(cfg, k)
        return f"{p}.embed_tokens.weight", f"{p}.shared_head.head.weight"

    def nextn(self, cfg: ModelConfig, k: int, own: tuple[bool, bool]) -> NextN:
        """The specs of a NextN layer. own: whether it has an embedding and a head of its own."""
        d, p = cfg.hidden_size, self.nextn_name(cfg, k)
        embed, head = self.tables(cfg, k, own)
        indexes = cfg.indexes(cfg.num_hidden_layers + k)
        return NextN(
            token_norm=norm(f"{p}.enorm.weight", d),
            hidden_norm=norm(f"{p}.hnorm.weight", d),
            merge=Spec((d, 2 * d), (None, None), f"{p}.eh_proj.weight", (d, 2 * d)),
            layer=block(cfg, p, cfg.nextn_moe[k], indexes, d),
            norm=norm(f"{p}.shared_head.norm.weight", d),
            embed=embed,
            head=head,
        )

    def exported_name(self, cfg: ModelConfig, k: int, name: str) -> str:
        """The name of a tensor of NextN layer ``k`` in a folder of these layers alone, as SGLang reads it."""
        return name if self.keeps_names else name.replace(self.nextn_name(cfg, k), f"model.layers.{k}", 1)

    def exported(self, cfg: ModelConfig) -> JsonObject:
        """The keys of config.json that differ in such a folder."""
        architectures = [f"{self.stem}ForCausalLMNextN"]
        count = {} if self.keeps_names else {"num_hidden_layers": cfg.num_nextn_predict_layers}
        return {"architectures": architectures, **count}

    def exported_to_xllm(self, cfg: ModelConfig) -> JsonObject:
        """The same as xLLM reads it. Raises ConfigError where xLLM reads no such layers."""
        raise ConfigError(
            f"layout = 'xllm' is known of DeepSeek-V3 alone, this is {self.title}; take 'lmsys'"
        )

    def nextn_of(self, cfg: ModelConfig, name: str) -> int | None:
        """Number of the NextN layer that a tensor belongs to, None outside these layers."""
        layer = layer_of(name)
        return None if layer is None or layer < cfg.num_hidden_layers else layer - cfg.num_hidden_layers

    def draft_layers(
        self, cfg: ModelConfig, names: Collection[str], folder: Path
    ) -> tuple[str | None, list[str]]:
        """The kind of the draft layers in a model's own folder, None of NextN layers; and their tensors.

        Raises CheckpointError where these are not the layers of such a model.
        """
        layers, first = nextn_layers(names), cfg.num_hidden_layers
        others = {layer_of(name) for name in names} - {None, *layers}
        if layers and not others and layers[0] != first:
            raise no_model(folder, "NextN layers")
        if layers and layers != list(range(first, first + len(layers))):
            raise CheckpointError(
                f"{folder}: config.json says num_hidden_layers = {first}, but the tensors have NextN layers "
                f"at {shortlist(map(str, layers))}; expected them from layer {first} on"
            )
        return None, [name for name in names if layer_of(name) in layers]

    def has_trunk(self, names: Collection[str]) -> bool:
        """Whether a folder with draft layers may have a trunk, too."""
        return True

    def hints(self, cfg: ModelConfig, names: TensorNames) -> list[str]:
        """Values of config.json that a folder's tensors contradict."""
        out, found = [], self.names_of_layers
        layers = names.numbers(rf"{found}\.(\d{{1,9}})\..*")
        depth = len(layers - names.nextn)
        if layers and depth != cfg.num_hidden_layers:
            got = f"the tensors have {depth} trunk layers"
            out.append(contradicts("num_hidden_layers", cfg.num_hidden_layers, got))
        experts = names.numbers(rf"(?:{found}|mtp)\.\d{{1,9}}\.(?:mlp|ffn)\.experts\.(\d{{1,9}})\..*")
        if experts and len(experts) != cfg.n_routed_experts:
            out.append(
                contradicts("n_routed_experts", cfg.n_routed_experts, f"the tensors have {len(experts)}")
            )
        out += self.own_hints(cfg, names)
        if self.names.head in names.missing:
            out.append(contradicts("tie_word_embeddings", "false", f"the tensors have no {self.names.head}"))
        return out

    def own_hints(self, cfg: ModelConfig, names: TensorNames) -> list[str]:
        """Hints of this family alone: layers with experts."""
        moe = sorted(names.numbers(rf"{self.names_of_layers}\.(\d{{1,9}})\.mlp\.gate\.weight") - names.nextn)
        if moe == [i for i in range(cfg.num_hidden_layers) if cfg.is_moe(i)]:
            return []
        said = f"{cfg.first_k_dense_replace} (moe_layer_freq {cfg.moe_layer_freq})"
        return [contradicts("first_k_dense_replace", said, f"the layers with experts are {listed(moe)}")]

    def tables(self, cfg: ModelConfig, k: int, own: tuple[bool, bool]) -> list[Spec | None]:
        """Embedding and head of a NextN layer, None where it has none of its own."""
        names = self.nextn_copies(cfg, k)
        return [table(name, cfg) if has else None for has, name in zip(own, names, strict=True)]


def no_model(folder: Path, found: str) -> CheckpointError:
    """The error where a model's folder has draft layers alone."""
    return CheckpointError(
        f"{folder} holds {found} that were exported by themselves, and no model; name the model, and "
        "this folder with draft_model="
    )
