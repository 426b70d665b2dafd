"""The kinds of draft heads, without jax."""

from collections.abc import Mapping
from dataclasses import fields

from mtp_jax.errors import ConfigError
from mtp_jax.heads.blocks.declared import BlockConfig
from mtp_jax.heads.eagle3.declared import Eagle3Config
from mtp_jax.heads.reading import refuse_unknown
from mtp_jax.heads.stages.declared import StagesConfig
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_json, config_of
from mtp_jax.model.head import DraftHead, StoredTensor

KINDS: tuple[type[DraftHead], ...] = (BlockConfig, Eagle3Config, StagesConfig)
"""The kinds of this package, in the order in which they are asked whether a folder is theirs."""

_KNOWN = "expected a head of EAGLE-3, DFlash, DFlash2 or DSpark, or NextN layers"
_ADDED: list[type[DraftHead]] = []


def add(kind: type[DraftHead]) -> None:
    """Take a kind from outside, which is asked before the kinds of this package."""
    if kind not in (*_ADDED, *KINDS):
        _ADDED.insert(0, kind)


def kind_of(raw: JsonObject, tensors: Mapping[str, StoredTensor]) -> type[DraftHead] | None:
    """The kind of the head in a folder with this config.json and these tensors; None: it has no head.

    Raises ConfigError for a head of an unknown kind.
    """
    if found := next((kind for kind in _ADDED if kind.reads(raw, tensors)), None):
        return found
    refuse_unknown(raw, tensors, _KNOWN)
    return next((kind for kind in KINDS if kind.reads(raw, tensors)), None)


def head_to_json(head: DraftHead) -> JsonObject:
    """The head as JSON, for ``head_from_json``."""
    values = {f.name: getattr(head, f.name) for f in fields(head)}
    sizes = {name: config_json(v) for name, v in values.items() if isinstance(v, ModelConfig)}
    return {"kind": type(head).__name__, **values, **sizes}


def head_from_json(raw: JsonObject) -> DraftHead:
    """The head that ``head_to_json`` wrote. Raises ConfigError for anything else."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
    known = {kind.__name__: kind for kind in (*KINDS, *_ADDED)}
    kind = known.get(str(values.pop("kind", None)))
    try:
        sizes = {name: config_of(v) for name, v in values.items() if isinstance(v, dict)}
        if kind is not None:
            return kind(**{**values, **sizes})
    except TypeError as e:
        raise ConfigError(f"the draft head is not what convert writes: {e}") from e
    raise ConfigError(
        f"a draft head of kind {raw.get('kind')!r:.80}; expected one of {', '.join(known)}, or the kind that "
        "drafter names"
    )
