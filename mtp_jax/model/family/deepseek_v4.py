"""DeepSeek-V4: window and compressed attention, hyper-connections, layers whose tokens choose experts.

No key of config.json has a default: V4-Flash and V4-Pro differ in most of them, and engines' defaults differ
from both.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject, is_number
from mtp_jax.model.attention_config import OF_MLA
from mtp_jax.model.compressed_config import CompressedConfig
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.config_parts import HyperConfig, check_size
from mtp_jax.model.family.family import OF_EXPERTS, Family, TrunkNames
from mtp_jax.model.family.hints import TensorNames, contradicts, listed
from mtp_jax.model.family.keys import scaled
from mtp_jax.model.family.mtp_layers import mtp_layers
from mtp_jax.model.layer_names import mtp_layer_of
from mtp_jax.model.layer_specs import Layer, norm
from mtp_jax.model.nextn_specs import NextN
from mtp_jax.model.v4_specs import hyper_head, v4_block, whole

# Compression ratios of layers, and transformers' names of them.
RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_RATE_NAMES = {"compress_rate_csa": 4, "compress_rate_hca": 128}
# An error has a hint for each layer whose ratio the tensors contradict: a few show the pattern.
_MOST_HINTS = 5
_HASH, _ROUTED = "hash_moe", "moe"
_OF_YARN = "factor", "beta_fast", "beta_slow", "original_max_position_embeddings"
# Needed in ``ModelConfig`` itself, under the same names.
_REQUIRED = (
    "num_hidden_layers",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "q_lora_rank",
    "swiglu_limit",
    "rms_norm_eps",
    "norm_topk_prob",
    "max_position_embeddings",
)


class DeepSeekV4(Family):
    """The releases, whose names of tensors are their own, and transformers' dialect of config.json."""

    name, title, stem = "deepseek_v4", "DeepSeek-V4", "DeepseekV4"
    types = ("deepseek_v4",)
    architectures: ClassVar = {"DeepseekV4For": "deepseek_v4"}
    allowed: ClassVar = {**Family.allowed, "scoring_func": "sqrtsoftplus", "attention_bias": False}
    needed_by_experts = OF_EXPERTS
    unwritten = (
        *OF_MLA,
        *("intermediate_size", "n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq"),
        "rope_interleave",
    )
    names_of_layers = "layers"
    keeps_names = True
    nextn_module = "mtp_jax.model.nextn_streams:StreamNextN"
    narrow = ("F8_E4M3", "I8")
    scales = ("F8_E8M0", *Family.scales)
    names = TrunkNames("embed.weight", "norm.weight", "head.weight")

    def translate(self, raw: JsonObject, kind: str) -> dict[str, Any]:
        """See ``Family``."""
        if raw.get("vision_config") is not None:
            raise ConfigError(
                "vision_config: DeepSeek-V4 with vision is not supported; expected the text model"
            )
        compressed = {f: raw[key] for f, key in CompressedConfig.KEYS.items() if raw.get(key) is not None}
        hyper = {f: raw[key] for f, key in HyperConfig.KEYS.items() if raw.get(key) is not None}
        nested = _nested(raw)
        theta = nested["main"].get("rope_theta") if nested else raw.get("rope_theta")
        scaling = nested["main"].get("rope_type") if nested else None
        if scaling not in (None, "default"):
            raise ConfigError(f"rope_parameters.main has rope_type = {scaling!r:.80}; expected 'default'")
        if nested and "rope_theta" in nested["compress"]:
            compressed["theta"] = nested["compress"]["rope_theta"]
        rope = _rope_width(raw)
        names = {**CompressedConfig.KEYS, **HyperConfig.KEYS}
        has = {key: raw.get(key) is not None for key in _REQUIRED}
        has |= {key: f in {*compressed, *hyper, "ratios", "rope"} for f, key in names.items()}
        has |= {"rope_theta": theta is not None, "qk_rope_head_dim": rope is not None}
        has |= {"rope_scaling (null: no YaRN)": bool(nested) or "rope_scaling" in raw}
        if lacks := [key for key, there in has.items() if not there]:
            raise ConfigError(f"config.json lacks {', '.join(lacks)}; DeepSeek-V4 has them all")
        if raw.get("num_key_value_heads", 1) != 1:
            raise ConfigError(f"num_key_value_heads = {raw['num_key_value_heads']!r:.80}; expected 1")
        compressed |= {"ratios": _ratios(raw), "rope": rope}
        for part, name in ((compressed, "theta"), (hyper, "eps")):
            part[name] = _float(part[name])
        return {
            "compressed": CompressedConfig(**compressed),
            "hyper": HyperConfig(**hyper),
            "rope_theta": _float(theta),
            "rope_scaling": scaled(raw, _yarn_source(raw)),
            "swiglu_limit": _float(raw["swiglu_limit"]),
            **dict.fromkeys(OF_MLA, 0),
            "num_hash_layers": _hash_layers(raw),
            "scoring_func": "sqrtsoftplus",
            "first_k_dense_replace": 0,
            # No layer is dense; the shared expert is as wide as a routed one.
            "intermediate_size": raw["moe_intermediate_size"],
        }

    def check(self, cfg: ModelConfig) -> None:
        """See ``Family``."""
        assert cfg.hyper is not None, "a DeepSeek-V4 has hyper-connections"
        cfg.hyper.check()
        if cfg.nvfp4:
            raise ConfigError(
                "DeepSeek-V4 with weights in NVFP4 is not supported; take the release's own FP4"
            )
        check_size("q_lora_rank", cfg.q_lora_rank, ": queries have a low rank")
        limit, most = cfg.swiglu_limit, cfg.num_hidden_layers
        for ok, name, expected in (
            (is_number(limit) and limit > 0, "swiglu_limit", "a positive number"),
            (cfg.n_routed_experts > 0, "n_routed_experts", "a positive integer"),
            (cfg.n_shared_experts == 1, "n_shared_experts", "1"),
            (cfg.norm_topk_prob, "norm_topk_prob", "true"),
            (cfg.num_hash_layers <= most, "num_hash_layers", f"at most num_hidden_layers = {most}"),
        ):
            if not ok:
                raise ConfigError(f"{name} = {getattr(cfg, name)!r:.200}; expected {expected}")

    def keys(self, cfg: ModelConfig) -> JsonObject:
        """See ``Family``."""
        c, h = cfg.compressed, cfg.hyper
        assert c is not None, "a DeepSeek-V4 has compressed attention"
        assert h is not None, "a DeepSeek-V4 has hyper-connections"
        sizes = {key: getattr(part, name) for part in (c, h) for name, key in part.KEYS.items()}
        ratios = [*c.ratios, *(0,) * cfg.num_nextn_predict_layers]
        out = {"topk_method": "noaux_tc", "attention_bias": False, "num_key_value_heads": 1}
        return out | sizes | {"compress_ratios": ratios}

    def layer(self, cfg: ModelConfig, number: int) -> Layer:
        """See ``Family``."""
        return v4_block(cfg, f"layers.{number}", number)

    def beside_layers(self, cfg: ModelConfig) -> dict[str, Any]:
        """See ``Family``: the gates behind the last block."""
        return {"hyper_head": hyper_head(cfg, "")}

    def nextn_name(self, cfg: ModelConfig, k: int) -> str:
        """See ``Family``."""
        return f"mtp.{k}"

    def nextn_copies(self, cfg: ModelConfig, k: int) -> tuple[str, str]:
        """See ``Family``; V4-Flash-Base has them."""
        p = self.nextn_name(cfg, k)
        return f"{p}.emb.tok_emb.weight", f"{p}.head.weight"

    def nextn_of(self, cfg: ModelConfig, name: str) -> int | None:
        """See ``Family``."""
        return mtp_layer_of(name)

    def draft_layers(
        self, cfg: ModelConfig, names: Collection[str], folder: Path
    ) -> tuple[str | None, list[str]]:
        """See ``Family``; ``STAGES`` of DSpark stages."""
        return mtp_layers(names, folder)

    def has_trunk(self, names: Collection[str]) -> bool:
        """See ``Family``."""
        return any(name.startswith("layers.") for name in names)

    def own_hints(self, cfg: ModelConfig, names: TensorNames) -> list[str]:
        """See ``Family``; of layers whose tokens choose experts, and of compression ratios."""
        assert cfg.compressed is not None, "a DeepSeek-V4 has compressed attention"
        layer, out = r"layers\.(\d{1,9})\.", []
        hashed = sorted(names.numbers(layer + r"ffn\.gate\.tid2eid"))
        if hashed != list(range(cfg.num_hash_layers)):
            got = f"the layers with tid2eid are {listed(hashed)}"
            out.append(contradicts("num_hash_layers", cfg.num_hash_layers, got))
        compressing = names.numbers(layer + r"attn\.compressor\.ape")
        indexing = names.numbers(layer + r"attn\.indexer\.wq_b\.weight")
        for i, ratio in enumerate(cfg.compressed.ratios):
            want = 4 if i in indexing else 128 if i in compressing else 0
            if ratio != want:
                got = f"the tensors of layer {i} have {want}"
                out.append(contradicts(f"compress_ratios[{i}]", ratio, got))
        return out[:_MOST_HINTS]

    def nextn(self, cfg: ModelConfig, k: int, own: tuple[bool, bool]) -> NextN:
        """See ``Family``."""
        d, p = cfg.hidden_size, self.nextn_name(cfg, k)
        embed, head = self.tables(cfg, k, own)
        return NextN(
            token_norm=norm(f"{p}.enorm.weight", d),
            hidden_norm=norm(f"{p}.hnorm.weight", d),
            merge=whole(f"{p}.e_proj.weight", d, d),
            layer=v4_block(cfg, p, cfg.num_hidden_layers + k),
            norm=norm(f"{p}.norm.weight", d),
            embed=embed,
            head=head,
            stream_merge=whole(f"{p}.h_proj.weight", d, d),
            hyper_head=hyper_head(cfg, f"{p}."),
        )


def _yarn_source(raw: JsonObject) -> JsonObject:
    """The object that describes YaRN, of layers that compress; empty without."""
    nested = _nested(raw)
    found = nested["compress"] if nested else raw.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"rope_scaling = {found!r:.200}; expected an object or null")
    yarn = "yarn" in (found.get("rope_type"), found.get("type"))
    if lacks := [key for key in _OF_YARN if yarn and not found.get(key)]:
        raise ConfigError(f"yarn rope scaling has no {', '.join(lacks)}: {found!r:.200}")
    for key, want in (("attention_factor", 1), ("mscale", None), ("mscale_all_dim", None)):
        if found.get(key) not in (None, want):
            raise ConfigError(f"{key} = {found[key]!r:.80} is not supported; DeepSeek-V4 scales no attention")
    return found | {"attention_factor": 1.0}


def _float(value: Any) -> Any:
    """A number as a float; anything else as it is, for the check to refuse."""
    return float(value) if is_number(value) else value


def _nested(raw: JsonObject) -> JsonObject | None:
    """transformers' two sets of parameters of rope."""
    rope = raw.get("rope_parameters")
    if rope is None:
        return None
    if not isinstance(rope, dict) or not all(isinstance(rope.get(k), dict) for k in ("main", "compress")):
        raise ConfigError(f"rope_parameters = {rope!r:.200}; expected objects main and compress")
    return rope


def _rope_width(raw: JsonObject) -> object:
    """Channels of a head that are rotated; None where no key says it."""
    if raw.get("qk_rope_head_dim") is not None:
        return raw["qk_rope_head_dim"]
    nested = _nested(raw)
    share, dim = raw.get("partial_rotary_factor"), raw.get("head_dim")
    if share is None and nested:
        share = nested["main"].get("partial_rotary_factor")
    if share is None:
        return None
    if not is_number(share) or not 0 < share <= 1:
        raise ConfigError(f"partial_rotary_factor = {share!r:.80}; expected a number above 0, at most 1")
    return round(share * dim) if is_number(dim) else 0  # the check of head_dim reports the fault


def _ratios(raw: JsonObject) -> tuple[int, ...]:
    """The compression ratio of every layer of the trunk."""
    given, kinds = raw.get("compress_ratios"), raw.get("layer_types")
    if given is None and kinds is None:
        raise ConfigError("config.json lacks compress_ratios; DeepSeek-V4 has a ratio for each layer")
    return _ratios_listed(raw, given) if given is not None else _ratios_named(raw, kinds)


_ALLOWED = ", ".join(map(str, RATIOS.values()))


def _ratios_listed(raw: JsonObject, given: Any) -> tuple[int, ...]:
    """Ratios from the release's list, which goes on with the draft layers, which have windows alone.

    transformers drops the draft layers. No key counts DSpark stages.
    """
    layers, drafts = _count(raw, "num_hidden_layers"), _count(raw, "num_nextn_predict_layers")
    stages = raw.get("dspark_block_size") is not None
    fits = isinstance(given, list) and (
        len(given) in (layers, layers + drafts) or (stages and len(given) > layers)
    )
    if not fits:
        got = f"has {len(given)} entries" if isinstance(given, list) else f"= {given!r:.80}, not a list"
        more = f", or {layers + drafts} with num_nextn_predict_layers = {drafts}" if drafts else ""
        raise ConfigError(f"compress_ratios {got}; expected {layers} for num_hidden_layers{more}")
    if any(type(r) is not int or r not in RATIOS.values() for r in given) or any(given[layers:]):
        raise ConfigError(
            f"compress_ratios = {given!r:.200} is not supported; expected {_ALLOWED}, and 0 for draft layers"
        )
    return tuple(given[:layers])


def _ratios_named(raw: JsonObject, kinds: Any) -> tuple[int, ...]:
    """Ratios from transformers' names of layers."""
    layers = _count(raw, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in [*RATIOS] for k in kinds):
        raise ConfigError(
            f"layer_types = {kinds!r:.200}; expected one of {', '.join(RATIOS)} for each of {layers} layers"
        )
    rates = raw.get("compress_rates") or {k: r for k, r in RATIOS.items() if r}
    named = {name: raw[name] for name in _RATE_NAMES if raw.get(name) is not None}
    if not isinstance(rates, dict):
        raise ConfigError(f"compress_rates = {rates!r:.200}; expected an object, of {_ALLOWED} by layer type")
    if any((RATIOS | _RATE_NAMES).get(k) != r for k, r in (rates | named).items()):
        raise ConfigError(f"compress_rates = {rates | named!r:.200} is not supported; expected {_ALLOWED}")
    return tuple(RATIOS[kind] for kind in kinds)


def _count(raw: JsonObject, key: str) -> int:
    """A number of layers; 0 where the key is missing."""
    count = raw.get(key)
    if count is not None and (type(count) is not int or count < 0):
        raise ConfigError(f"{key} = {count!r:.80}; expected an integer >= 0")
    return count or 0


def _hash_layers(raw: JsonObject) -> object:
    """Number of the first layers, whose experts are chosen by token."""
    kinds = raw.get("mlp_layer_types")
    if raw.get("num_hash_layers") is not None:
        return raw["num_hash_layers"]
    if kinds is None:
        raise ConfigError("config.json lacks num_hash_layers; DeepSeek-V4 chooses experts by token there")
    layers, count = _count(raw, "num_hidden_layers"), kinds.count(_HASH) if isinstance(kinds, list) else 0
    if kinds != [_HASH] * count + [_ROUTED] * (layers - count):
        raise ConfigError(
            f"mlp_layer_types = {kinds!r:.200}; expected {_HASH!r}s, then {_ROUTED!r}s, for {layers} layers"
        )
    return count
