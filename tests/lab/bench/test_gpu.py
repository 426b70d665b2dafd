"""Whole steps with random weights: shapes, refusals, traces; times mean something on a GPU only."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import checkpoint
from mtp_jax.checkpoint.random_weights import abstract_params, random_params
from mtp_jax.commands import cli
from mtp_jax.decode.law import MARK
from mtp_jax.decode.lowering import Lowering
from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench import gpu, shapes, steps
from mtp_jax.lab.bench.report import Report
from mtp_jax.lab.bench.synthetic import preset
from mtp_jax.lab.bench.trace import Op, Trace
from mtp_jax.lab.planning.hardware import gpu_of
from mtp_jax.lab.planning.published import KNOWN
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_json
from mtp_jax.model.narrow import Fp4, Fp8, Int4, expand, is_narrow, nbytes


@pytest.fixture
def dense(tmp_path) -> Path:
    """A directory with the config.json of a model without NextN layers, and nothing else."""
    raw = config_json(replace(preset("dense").config.with_nextn(()), num_hidden_layers=2))
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text(json.dumps(raw))
    return tmp_path / "dense"


def tiny(layers: int | None = None) -> ModelConfig:
    return shapes.find(Path("tiny"), layers, False)[1]


def test_shapes_have_their_sizes_and_layers():
    found = {name: shapes.find(Path(name), None, False)[1] for name in shapes.NAMED}
    assert {name: c.num_hidden_layers for name, c in found.items()} == {
        "share": 61, "deep": 61, "wide": 5, "sparse": 5, "joyai": 40, "tiny": 2,
    }  # fmt: skip
    gib = {name: nbytes(abstract_params(c, "bfloat16", {"fp8"})) / 2**30 for name, c in found.items()}
    # GiB of weights that docs/kernels.md has of the runs on GPUs.
    measured = {"share": 43, "deep": 58, "wide": 58, "sparse": 32, "joyai": 46}
    assert {name: gib[name] for name in measured} == pytest.approx(measured, abs=1)


@pytest.mark.parametrize("name", [*shapes.NAMED, "deepseek-v4-flash"])
def test_a_trunk_is_cut_to_its_first_layers(name):
    whole = shapes.NAMED[name].whole if name in shapes.NAMED else KNOWN[name]
    _, cfg = shapes.find(Path(name), 3, False)
    assert cfg.num_hidden_layers == 3
    assert cfg.num_nextn_predict_layers == whole.num_nextn_predict_layers
    for i in range(3):
        assert (cfg.is_moe(i), cfg.indexes(i)) == (whole.is_moe(i), whole.indexes(i))
    if cfg.compressed and whole.compressed:
        assert cfg.compressed.ratios == whole.compressed.ratios[:3]


@pytest.mark.parametrize("kind", [Fp8, *(pytest.param(k, marks=pytest.mark.rest) for k in (Int4, Fp4))])
def test_weights_have_the_types_that_the_config_announces(kind):
    """FP8 projections; int4 or FP4 experts; all of it finite, of the size that keeps inputs' size."""
    cfg = tiny()
    if kind is Int4:
        cfg = replace(cfg, fp8=False, int4_group=32)
    if kind is Fp4:
        cfg = replace(preset("v4").config, num_hidden_layers=1, num_hash_layers=1, fp4=True, dtype="bfloat16")
        cfg = replace(cfg, compressed=cfg.compressed and replace(cfg.compressed, ratios=(0,)))
    whole = abstract_params(cfg, "bfloat16", checkpoint.formats_kept("bfloat16", "keep"))
    wanted = whole.layers[-1].mlp
    made = random_params(jax.random.key(0), wanted, cfg.n_routed_experts)
    assert nbytes(made) == nbytes(wanted)
    experts = made.down
    assert isinstance(experts, kind)
    wide = jax.jit(lambda w: expand(w, jnp.float32))(experts)
    assert np.std(wide) * experts.shape[-1] ** 0.5 == pytest.approx(1, 0.3)
    for w in jax.tree.leaves(made, is_leaf=is_narrow):
        assert is_narrow(w) or w.dtype == jnp.int32 or np.isfinite(np.asarray(w, np.float32)).all()
    if kind is Fp4:
        table = np.asarray(made.by_token)
        assert table.shape == (cfg.vocab_size, 4)
        assert table.min() == 0
        assert table.max() == cfg.n_routed_experts - 1
        assert all(len({*row}) == 4 for row in table[:50].tolist())


def test_a_layer_is_told_from_the_order_of_launches():
    """Three layers, one of another kind, with times in nanoseconds on two streams."""
    alike = [
        ("mla_decode_mosaic_gpu_kernel", 900),
        ("loop_pad_fusion_7", 20),
        ("router_mosaic_gpu_kernel", 40),
    ]
    other = [("mla_decode_mosaic_gpu_kernel", 500), ("loop_pad_fusion", 60)]
    last = [("mla_decode_mosaic_gpu_kernel", 1)]
    at, ops = 0, []
    for name, took in [("fusion.1", 3), *alike, *other, *alike[:2], ("router_mosaic_gpu_kernel", 60), *last]:
        ops.append(Op(at, at + took, "jit_step", "command", None, name))
        at += took
    found = steps.launches(Trace(0, at, (tuple(ops[::2]), tuple(ops[1::2]))))
    assert found[0] == ("fusion", pytest.approx(3e-9))
    own = steps.layer(found)
    assert [name for name, _ in own] == [
        "mla_decode_mosaic_gpu_kernel",
        "loop_pad_fusion",
        "router_mosaic_gpu_kernel",
    ]
    assert [seconds for _, seconds in own] == pytest.approx([900e-9, 20e-9, 50e-9])
    longest = steps.kernels(found)[0]
    assert longest == ("mla_decode_mosaic_gpu_kernel", 4, pytest.approx(2301e-9))
    assert steps.layer(found[:1]) == []


def test_a_card_is_told_by_the_name_of_its_driver():
    names = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "cpu"
    cards = [gpu_of(name) for name in names]
    assert [card and card.name for card in cards] == ["h100", "h200", "h20", None, None, None]


def bench(*arguments: object) -> int:
    return cli.main(["bench", "gpu", *map(str, arguments)])


def test_a_dry_run_lowers_a_program_and_counts_bytes(tmp_path, capsys):
    file = tmp_path / "found.json"
    assert bench("tiny", "--dry-run", "--depths", "0", "--layers", "1", "--json", file) == 0
    out = capsys.readouterr().out
    assert "Dry run of tiny, 1 layers, for NVIDIA H200: nothing ran" in out
    figures = json.loads(file.read_text())["figures"]
    (level,) = figures["levels"]
    assert figures["weight_bytes"] == nbytes(
        abstract_params(tiny(1).without_drafts(), "bfloat16", {"fp8", "int4", "fp4"})
    )
    # The slot has one page less than the cache, whose spare page takes discarded rows; bfloat16 in one layer.
    pages = -(-(4096 + steps.growth(0, 200)) // 64) + 1
    assert level["cache_bytes"] == pytest.approx(pages * 64 * 576 * 2, rel=0.02)
    assert level["kernel_calls"] > 7
    assert level["fits"] == ["h100", "h800", "h20", "h200", "b200", "gb200"]
    assert level["refused"] is level["fault"] is None


def test_a_dry_run_says_which_shape_kernels_refuse(dense, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench(f"{dense}/config.json", "--dry-run", "--depths", "0", "--layers", "1") == 0
    assert (tmp_path / "build/bench/gpu-dense.json").exists()
    assert "XLA in the place of a kernel: mla_decode" in capsys.readouterr().out


def test_a_dry_run_fails_where_a_program_does_not_lower(monkeypatch, tmp_path, capsys):
    def broken(self: Lowering, *_: object) -> None:
        raise NotImplementedError("no such instruction")

    monkeypatch.setattr(Lowering, "program", broken)
    assert bench("tiny", "--dry-run", "--depths", "0,1", "--json", tmp_path / "found.json") == 1
    out = capsys.readouterr().out
    for depth in (0, 1):
        assert f"depth {depth}, slots 1: does not lower: NotImplementedError: no such instruction" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nothing"],
            "nothing is neither a directory nor a shape; name a directory with config.json, or one",
        ),
        (["no/such/folder"], "no/such/folder is not a directory; name one with config.json and safetensors"),
        ([], "name a directory with config.json, or one of share, deep, wide, sparse, joyai, tiny"),
        (["tiny", "--slots", "1,0"], "argument --slots: '0' is not an integer of 1 or more"),
        (["tiny", "--depths", "0,32"], "--depths 32; expected 0 to 31 drafts"),
        (["tiny", "--depths", "-1"], "--depths -1; expected 0 to 31 drafts"),
        (["tiny", "--layers", "41"], "--layers 41; the trunk has 40 layers: expected at most that"),
        (["tiny", "--rows", "163840"], "163,840 rows and 200 steps at depth 3, but tiny has positions for"),
        (["tiny", "--synthetic-acceptance", "9"], "expected a length from 1, the model's own token, to 2"),
        (["DENSE", "--depths", "3"], "--depths 3, but dense declares no NextN layer to draft with; use"),
        (["DENSE", "--depths", "3", "--dry-run"], "--depths 3, but dense declares no NextN layer to draft"),
    ],
)
def test_wrong_usage_is_one_line(dense, tmp_path, capsys, arguments, message):
    given = [str(dense) if word == "DENSE" else word for word in arguments]
    assert bench(*given, "--json", tmp_path / "found.json") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "found.json").exists()


def test_bytes_that_the_device_has_not_are_refused_before_any_is_taken(monkeypatch):
    monkeypatch.setattr(gpu, "allocatable", lambda: (10 * 2**30, 2**30))
    monkeypatch.setattr(gpu, "random_params", None)
    cfg = shapes.find(Path("wide"), None, False)[1]
    with pytest.raises(
        ConfigError, match=r"wide at depth 0, 1 slot of 4,096 rows needs 5.* GiB: .* 9.0 GiB free"
    ):
        gpu.run("wide", cfg, gpu.StepLoad([0, 1], [1]))
    with pytest.raises(ConfigError, match=r"tiny at depth 1, 512 slots of .* of cache; cpu has 9.0 GiB free"):
        gpu.run("tiny", tiny(), gpu.StepLoad([1], [1, 512], rows=9000))


@pytest.mark.slow
def test_steps_of_a_model_of_random_weights_are_measured():
    load = gpu.StepLoad([0, 1], [4], rows=100, steps=40)
    reports: list[Report] = [*gpu.run("tiny", tiny(), load, trace=True)]
    assert [report.pending for report in reports] == [1, 0]
    plain, drafting = reports[-1].figures["levels"]
    assert plain["tokens_per_step_and_slot"] == 1
    assert drafting["tokens_per_step_and_slot"] == pytest.approx(1 + gpu.ACCEPTANCE[0], abs=0.1)
    for level in (plain, drafting):
        assert level["step_seconds"].count == level["call_seconds"].count == 40
        assert level["kernel_seconds"] > 0
        assert level["floor_seconds"] is None
    text = reports[-1].text()
    assert text.startswith(f"{MARK} - Steps of tiny, 2 layers, random weights, on cpu")
    assert "Depth 1, slots 4: kernels of a step" in text
