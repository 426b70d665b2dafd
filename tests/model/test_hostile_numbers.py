"""Any number, and anything else, in the place of each integer of a config.json: it is read, or a ConfigError.

Nothing is made whose size is such a number: a file of that size is not there.
"""

import itertools
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from examples.medusa import MedusaConfig
from mtp_jax.errors import ConfigError
from mtp_jax.heads.eagle3.declared import Eagle3Config
from mtp_jax.heads.kinds import kind_of
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_json, config_of
from tests import v4
from tests.checkpoint.compressed import BLOCKS
from tests.checkpoint.int4_files import QUANTISATION
from tests.golden import model_dir
from tests.models import apart

VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 2**16, 2**16 + 1, 2**31 - 1, 2**31, 2**63, 10**30, 10**400),
    *(0.5, 1e300, float("nan"), float("inf"), True, "8", "", None, [], [[]], [{}], {}, {"a": 1}),
)
# Reading makes tuples of 2^16 flags, the limit of layers, and messages.
MOST_BYTES = 8 << 20


def described(variant: str, part: str = "model") -> JsonObject:
    return json.loads((model_dir(variant, part) / "config.json").read_text())


MODELS: dict[str, JsonObject] = {
    "v3": described("v3"),
    "fp8": described("fp8"),
    "llm-compressor": described("v3") | {"quantization_config": BLOCKS},
    "int4": described("v3")
    | {"quantization_config": QUANTISATION, "hidden_size": 64, "moe_intermediate_size": 32},
    "indexer": described("dsa_glm52"),
    "indexer by frequency": described("dsa_v32") | {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    "gqa": described("glm45") | {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32}},
    "v4": v4.v4_config(num_hidden_layers=2, compress_ratios=[4, 128, 0]),
}
HEADS: dict[str, JsonObject] = {
    name: described(name, "draft") for name in ("eagle3", "eagle3_mla", "dflash", "dflash2", "dspark")
}
MEDUSA: JsonObject = {"medusa_num_heads": 4, "medusa_num_layers": 1, "hidden_size": 40, "vocab_size": 80}
TRUNK = config_of(described("eagle3"))


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to every integer of a JSON value, and to every list."""
    if type(value) is int or isinstance(value, list):
        yield way
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*way, key))


def with_value(raw: JsonObject, way: tuple[Any, ...], value: Any) -> JsonObject:
    """A copy with another value at the end of a way."""
    copy = json.loads(json.dumps(raw))
    part = copy
    for key in way[:-1]:
        part = part[key]
    part[way[-1]] = value
    return copy


def used(cfg: ModelConfig) -> None:
    """Ask a configuration for everything that needs no tensor."""
    json.dumps(config_json(cfg))
    assert cfg.softmax_scale > 0
    assert cfg.row.width > 0
    assert cfg.attention.page_unit > 0


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES


def fuzz(raw: JsonObject, find: Callable[[JsonObject], object]) -> None:
    """Every value in every place: some are read, and everything else is refused in a short message."""
    find(raw)
    read = 0
    for way, value in itertools.product(places(raw), VALUES):
        try:
            find(with_value(raw, way, value))
            read += 1
        except ConfigError as error:
            if len(str(error)) > 2000:
                raise AssertionError(f"a message of {len(str(error))} characters for {way}") from error
        except Exception as error:
            raise AssertionError(f"{way} = {value!r:.80}") from error
    assert read


@pytest.mark.parametrize("name", apart(MODELS, "llm-compressor", "indexer", "gqa", "v4"))
def test_models(name: str):
    fuzz(MODELS[name], lambda raw: used(config_of(raw)))


@pytest.mark.parametrize("name", apart(HEADS, "eagle3", "dspark"))
def test_heads(name: str):
    fuzz(HEADS[name], lambda raw: (kind_of(raw, {}) or Eagle3Config).read(raw, TRUNK, {}, None))


def test_heads_of_an_example():
    fuzz(MEDUSA, lambda raw: MedusaConfig.read(raw, TRUNK, {}, None))
