"""Keys of a ``config.json`` for the indexer of DeepSeek's sparse attention."""

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.mla_config import IndexerConfig


def indexer(raw: JsonObject, interleaved: bool | None = None) -> IndexerConfig | None:
    """The sparse attention's indexer; None without.

    interleaved: whether its rope pairs neighbours if no key says it; None: a model may have none. Raises
    ConfigError.
    """
    found = {f: raw[name] for f, name in IndexerConfig.KEYS.items() if raw.get(name) is not None}
    needed = {field: IndexerConfig.KEYS[field] for field in ("heads", "dim", "topk")}
    if not found.keys() & needed.keys() and interleaved is None:
        return None
    if lacks := [name for field, name in needed.items() if field not in found]:
        raise ConfigError(f"config.json lacks {', '.join(lacks)}; sparse attention needs {_listed(needed)}")
    return IndexerConfig(**{"interleaved": bool(interleaved), "shared": _shared(raw), **found})


def index_keys(i: IndexerConfig) -> JsonObject:
    """The keys that describe an indexer."""
    types = ["shared" if shared else "full" for shared in i.shared]
    return {key: getattr(i, name) for name, key in i.KEYS.items()} | {"indexer_types": types}


def _listed(names: dict[str, str]) -> str:
    return " and ".join((", ".join([*names.values()][:-1]), [*names.values()][-1]))


def _shared(raw: JsonObject) -> tuple[bool, ...]:
    """Whether each layer attends to the choice of the layer before it.

    config.json gives a list, letters, or a frequency and an offset: the first that is there counts (SGLang).
    """
    layers = raw.get("num_hidden_layers")
    count = layers if type(layers) is int and 0 < layers <= 2**16 else 0  # ``_check`` reports the fault
    for name, full, shared in (("indexer_types", "full", "shared"), ("index_topk_pattern", "F", "S")):
        given = raw.get(name)
        if given is None:
            continue
        if not isinstance(given, (list, str)) or len(given) != count or {*given} - {full, shared}:
            raise ConfigError(
                f"{name} = {given!r:.200}; expected {full!r} or {shared!r} for each of {count} layers"
            )
        return tuple(kind == shared for kind in given)
    freq, offset = raw.get("index_topk_freq"), raw.get("index_skip_topk_offset")
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset
    if type(freq) is not int or type(offset) is not int or freq < 1 or offset < 0:
        raise ConfigError(
            f"index_topk_freq = {freq!r:.80}, index_skip_topk_offset = {offset!r:.80}; expected whole "
            "numbers, the first of 1 or more, the second of 0 or more"
        )
    return tuple(max(layer - offset + 1, 0) % freq != 0 for layer in range(count))
