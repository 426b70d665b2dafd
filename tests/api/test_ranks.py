"""Facts that ranks compare at their start: options and sizes before the load, every byte behind it."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import pytest

from mtp_jax import make_mesh
from mtp_jax.api import load
from mtp_jax.api.options import LLMOptions
from mtp_jax.engine.defaults import Target
from mtp_jax.hosts.hello import difference
from mtp_jax.model.family import config_of_file
from tests.checkpoint.files import copy_folder
from tests.golden import model_dir

MODEL, HEAD = model_dir("eagle3"), model_dir("eagle3", "draft")


class Rank:
    """A rank that is alone; its facts are kept."""

    def __init__(self) -> None:
        self.said: list[Mapping[str, str]] = []

    def compare(self, facts: Mapping[str, str]) -> None:
        self.said.append(facts)


def facts_of(model: Any, head: Any) -> list[Mapping[str, str]]:
    """Facts compared before and behind the load."""
    rank = Rank()
    mesh = make_mesh(1, len(jax.devices()))
    options = LLMOptions(model, draft_model=head, mesh=mesh, group=cast(Any, rank), seed=1)
    described = config_of_file(model / "config.json")
    folders = (model,) if head is None else (model, head)
    load._compare(options, folders, options.engine(described, Target()), None)()
    return rank.said


@pytest.mark.parametrize("part", ["the checkpoint", "draft_model"])
def test_one_bit_of_the_weights_is_found_behind_the_load(part, tmp_path):
    copies = {
        "the checkpoint": copy_folder(MODEL, tmp_path / "m"),
        "draft_model": copy_folder(HEAD, tmp_path / "h"),
    }
    mine, again = facts_of(MODEL, HEAD), facts_of(*copies.values())
    assert mine == again
    (path,) = copies[part].glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before, behind = facts_of(*copies.values())
    assert difference(mine[0], before, 1) is None
    found = difference(mine[1], behind, 1)
    assert found
    assert found.startswith(f"rank 1 differs from rank 0 in the bytes of {part}: ")


def test_another_folder_is_found_before_weights_are_read(tmp_path):
    copy = copy_folder(MODEL, tmp_path / "m")
    (copy / "README.md").write_text("x")
    found = difference(facts_of(MODEL, None)[0], facts_of(copy, None)[0], 1)
    assert found
    assert found.startswith("rank 1 differs from rank 0 in the checkpoint: ")
    assert "draft_model" in str(difference(facts_of(MODEL, HEAD)[0], facts_of(MODEL, None)[0], 1))
