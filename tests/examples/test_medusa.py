"""Medusa heads, the example of a kind of draft head from outside."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.medusa import MedusaConfig
from examples.medusa.declared import MedusaTree
from mtp_jax.checkpoint import DraftFolder, convert, load, restore, summarise
from mtp_jax.checkpoint.update import read_update
from mtp_jax.commands import cli
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.heads import kinds
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench import cost
from mtp_jax.lab.bench.cost import of_trunk
from mtp_jax.lab.planning.work import expected_experts
from mtp_jax.lab.train.learner import learner_of
from tests.checkpoint.files import Tensors, assert_same, edit_json, edit_tensors
from tests.examples import medusa
from tests.golden import model_dir
from tests.layers import ROOT


def in_vllms_names(folder: Path, to: Path, **changes: object) -> Path:
    """Medusa heads in vLLM's layout."""

    def rename(t: Tensors) -> None:
        for name in list(t):
            head, layer, *rest = name.split(".")
            new = f"blocks.{head}.layers.{layer}.{rest[-1]}" if len(rest) > 1 else f"lm_heads.{head}.weight"
            t[new] = t.pop(name)

    edit_tensors(folder, to, rename)
    said = {"architectures": ["MedusaModel"], "hidden_size": 40, "num_heads": medusa.HEADS, "vocab_size": 80}
    (to / "config.json").write_text(json.dumps(said | changes))
    return to


def test_medusa_heads_in_either_naming(tmp_path: Path):
    folder, trunk = medusa.write(tmp_path / "heads"), model_dir(medusa.TRUNK)
    found = load(trunk, folder)
    assert found.config.drafter == MedusaConfig(heads=medusa.HEADS, layers=1, bias=True)
    assert isinstance(found.params.drafter, MedusaTree)
    names, raw = iter(sorted(medusa.arrays())), medusa.arrays()
    for (block,), table in zip(found.params.drafter.residual, found.params.drafter.tables, strict=True):
        for array in (block.bias, block.linear, table):
            np.testing.assert_array_equal(array, raw[next(names)])
    assert_same(load(trunk, in_vllms_names(folder, tmp_path / "vllm")).params, found.params)
    prefixed = edit_tensors(
        folder, tmp_path / "prefixed", lambda t: t.update({f"medusa_heads.{n}": t.pop(n) for n in list(t)})
    )
    assert_same(load(trunk, prefixed).params, found.params)
    summary = summarise(trunk, folder)
    assert summary.nextn_layout == "Medusa"
    assert summary.nextn_parameters == sum(a.size for a in raw.values())
    assert summary.cache_bytes_per_token == summarise(trunk).cache_bytes_per_token
    assert "4 Medusa heads" in summary.text()
    assert_same(read_update(found.config, found.params, trunk, folder, dtype="float32"), found.params)


def test_medusa_heads_of_two_blocks_without_biases(tmp_path: Path):
    def deeper(t: Tensors) -> None:
        for i in range(medusa.HEADS):
            del t[f"{i}.0.linear.bias"]
            t[f"{i}.2.weight"], t[f"{i}.1.linear.weight"] = t.pop(f"{i}.1.weight"), t[f"{i}.0.linear.weight"]

    folder = edit_tensors(medusa.write(tmp_path / "heads"), tmp_path / "deeper", deeper)
    edit_json(folder / "config.json", medusa_num_layers=2)
    found = load(model_dir(medusa.TRUNK), folder)
    assert found.config.drafter == MedusaConfig(heads=medusa.HEADS, layers=2, bias=False)
    assert isinstance(found.params.drafter, MedusaTree)
    for blocks in found.params.drafter.residual:
        np.testing.assert_array_equal(*(block.linear for block in blocks))
        assert blocks[0].bias is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "the head is made for hidden_size = 48, the model has 40"),
        ({"vocab_size": 81}, "the head is made for vocab_size = 81, the model has 80"),
        ({"truncated_vocab_size": 60}, "truncated_vocab_size = 60, the model has 80"),
        ({"original_lm_head": True}, "original_lm_head = True of Medusa heads is not supported"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5 of Medusa heads is not supported; expected 1"),
        ({"num_heads": 0}, "num_heads = 0; expected a whole number from 1 to 64"),
        ({"num_hidden_layers": "1"}, "num_hidden_layers = '1'; expected a whole number"),
        ({"num_heads": 5}, r"missing \(3\): draft_head.blocks.4.layers.0.weight"),
        ({"num_heads": 3}, r"unexpected \(3\): model.safetensors: blocks.3.layers.0"),
        ({"num_hidden_layers": 2}, r"missing \(8\): draft_head.blocks.0.layers.1.weight"),
    ],
)
def test_medusa_heads_that_are_refused(tmp_path: Path, changes: JsonObject, message: str):
    folder = in_vllms_names(medusa.write(tmp_path / "heads"), tmp_path / "vllm", **changes)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        summarise(model_dir(medusa.TRUNK), folder)


def test_medusa_heads_read_no_taps_and_no_pickles(tmp_path: Path):
    folder = medusa.write(tmp_path / "heads")
    with pytest.raises(ConfigError, match="Medusa heads read no taps; leave it out"):
        load(model_dir(medusa.TRUNK), DraftFolder(folder, "inputs"))
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt is not read: that format can run code"):
        load(model_dir(medusa.TRUNK), folder)


def test_a_medusa_head_is_read_for_its_own_draft():
    found = medusa.loaded()
    params, key = found.params, StepKey(1, 3, 0, SamplingMode())
    work, plain = (
        cost.of_launch(k, found.config, params, 16, "float32", 1) for k in (key, replace(key, depth=0))
    )
    narrow, wide = (expected_experts(found.config, w) for w in (1, 4))
    more = of_trunk(params).touched(wide) - of_trunk(params).touched(narrow)
    assert isinstance(params.drafter, MedusaTree)
    heads = cost.nbytes((params.drafter.residual[:3], params.drafter.tables[:3]))
    assert work.bytes - plain.bytes == pytest.approx(more + heads)


def test_medusa_heads_are_not_tuned() -> None:
    with pytest.raises(ConfigError, match="Medusa heads are not tuned here"):
        learner_of(medusa.loaded().config)


@pytest.mark.rest
def test_orbax_keeps_the_heads(tmp_path: Path) -> None:
    trunk, heads = model_dir(medusa.TRUNK), medusa.write(tmp_path / "heads")
    convert(trunk, tmp_path / "out", heads, dtype="float32")
    whole, found = load(trunk, heads), restore(tmp_path / "out")
    assert found.config == replace(whole.config, dtype="float32")
    assert_same(found.params, whole.params)


def test_the_command_line_takes_the_heads(tmp_path: Path, monkeypatch, capsys) -> None:
    """The command of its docstring works with examples/ in the path; without it, an error names the path."""
    monkeypatch.setattr(kinds, "_ADDED", [])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    heads = in_vllms_names(medusa.write(tmp_path / "heads"), tmp_path / "vllm")
    given = ["info", str(model_dir(medusa.TRUNK)), "--draft-model", str(heads)]
    assert cli.main(given) != 0
    assert "Medusa heads are an example of --drafter (docs/research.md)" in capsys.readouterr().err
    plain = medusa.write(tmp_path / "plain")
    assert cli.main([*given[:-1], str(plain)]) != 0
    assert "no head of a known kind (drafter names others)" in capsys.readouterr().err
    assert cli.main([*given, "--drafter", "medusa:MedusaConfig"]) == 0
    assert "4 Medusa heads, which read the final hidden state" in capsys.readouterr().out
