"""Published speeds of DeepSeek-V3, R1 and V4, read from ``published.toml``, which names their sources."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.lab.planning.deployment import Deployment, hosts_for
from mtp_jax.lab.planning.hardware import GPUS
from mtp_jax.lab.planning.releases import KNOWN
from mtp_jax.lab.planning.weights import BFLOAT16, FP4, FP8, NVFP4, Storage

_DATA: JsonObject = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SOURCES: dict[str, str] = _DATA["sources"]
_FORMATS = {f.name: f for f in (BFLOAT16, FP8, FP4, NVFP4)}


@dataclass(frozen=True)
class Point:
    """A published figure.

    Attributes:
        name: the name of the measurement.
        source: a key of ``SOURCES``.
        deployment: the model, the GPUs and the load.
        rate: number of tokens per second, of one user or of one GPU.
        per_user: whether ``rate`` is that of one user.
        open: assumptions about facts that the source leaves out.
    """

    name: str
    source: str
    deployment: Deployment
    rate: float
    per_user: bool = False
    open: str = ""


def _with_base(table: JsonMapping) -> JsonObject:
    """The keys of a table, with the values of its base for keys that it lacks."""
    base = _with_base(_DATA["base"][table["base"]]) if "base" in table else {}
    return base | {key: value for key, value in table.items() if key != "base"}


def _point(table: JsonMapping) -> Point:
    keys = _with_base(table)
    name, source, rate = (keys.pop(key) for key in ("name", "source", "rate"))
    per_user, open = keys.pop("per_user", False), keys.pop("open", "")
    gpu, gpus = GPUS[keys.pop("gpu")], keys["data"] * keys.get("model", 1)
    cfg = KNOWN[keys.pop("of", "deepseek-v3")]
    storage = Storage(_FORMATS[keys.pop("experts")], _FORMATS[keys.pop("others")])
    keys |= {
        "hosts": hosts_for(gpu, gpus),
        "requests": keys.pop("each") * gpus if "each" in keys else keys.get("requests", 1),
    }
    return Point(name, source, Deployment(cfg, storage, gpu, **keys), rate, per_user, open)


FITTED = tuple(map(_point, _DATA["fitted"]))
HELD_OUT = tuple(map(_point, _DATA["held_out"]))
V4 = tuple(map(_point, _DATA["v4_points"]))
ORDERED: tuple[tuple[str, str], ...] = tuple((faster, slower) for faster, slower in _DATA["ordered"])
