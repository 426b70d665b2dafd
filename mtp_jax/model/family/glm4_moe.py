"""GLM-4.5 to 4.7: grouped-query attention, and DeepSeek-V3's experts and NextN layers."""

from typing import Any, ClassVar

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family.family import Family
from mtp_jax.model.family.hints import TensorNames, contradicts
from mtp_jax.model.family.index_keys import indexer
from mtp_jax.model.family.keys import dense_layers, rope
from mtp_jax.model.gqa_config import GqaConfig


class Glm4Moe(Family):
    """Grouped-query attention, with norms of queries and keys and with biases, or without."""

    name, title, stem = "glm4_moe", "GLM-4.5", "Glm4Moe"
    types = ("glm4_moe",)
    architectures: ClassVar = {"Glm4MoeFor": "glm4_moe"}
    unwritten = (*Family.unwritten, *GqaConfig.excludes)

    def translate(self, raw: JsonObject, kind: str) -> dict[str, Any]:
        """See ``Family``."""
        interleaved = raw.get("rope_interleave")
        return {
            **dense_layers(raw),
            **rope(raw),
            "gqa": _gqa(raw),
            "indexer": indexer(raw),  # which no model has beside it
            "rope_interleave": False if interleaved is None else interleaved,
        }

    def own_hints(self, cfg: ModelConfig, names: TensorNames) -> list[str]:
        """See ``Family``; of norms and biases of attention."""
        assert cfg.gqa is not None, "a GLM-4.5 has grouped-query attention"
        out = super().own_hints(cfg, names)
        for key, declared, name in (
            ("use_qk_norm", cfg.gqa.qk_norm, "q_norm.weight"),
            ("attention_bias", cfg.gqa.bias, "q_proj.bias"),
        ):
            if declared != any(n.endswith(f".self_attn.{name}") for n in names.found):
                have = "have no" if declared else "have"
                out.append(contradicts(key, str(declared).lower(), f"the tensors {have} {name}"))
        return out

    def keys(self, cfg: ModelConfig) -> JsonObject:
        """See ``Family``."""
        assert cfg.gqa is not None, "a GLM-4.5 has grouped-query attention"
        return {"topk_method": "noaux_tc"} | {
            key: getattr(cfg.gqa, name) for name, key in cfg.gqa.KEYS.items()
        }


def _gqa(raw: JsonObject) -> GqaConfig:
    names = GqaConfig.KEYS
    nested = raw.get("rope_parameters")
    given = (nested if isinstance(nested, dict) else {}, raw)
    found: JsonObject = {}
    for field, name in names.items():
        values = [d[name] for d in given if d.get(name) is not None]
        if any(v != values[0] for v in values):
            both = " and ".join(f"{v!r:.80}" for v in values)
            raise ConfigError(f"{name} is given as {both}; expected one value")
        found |= {field: values[0]} if values else {}
    # Without the other two keys the checkpoint lacks such tensors, which a load would report.
    if lacks := [names[field] for field in ("kv_heads", "head_dim", "rotary") if field not in found]:
        raise ConfigError(f"config.json lacks {', '.join(lacks)}; glm4_moe has grouped-query attention")
    return GqaConfig(**found)
