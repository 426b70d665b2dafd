"""Rigged checkpoints do what they promise, and the measurements built on them count correctly."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from mtp_jax.api.local import local_engine, local_runner
from mtp_jax.checkpoint import load
from mtp_jax.commands import cli
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.engine.config import EngineConfig
from mtp_jax.errors import ConfigError
from mtp_jax.heads.stages.declared import StagesConfig
from mtp_jax.lab.bench import cost, synthetic
from mtp_jax.lab.bench.acceptance import repeated
from mtp_jax.lab.bench.report import table
from mtp_jax.lab.bench.synthetic import (
    chain,
    complete,
    main,
    preset,
    random_prompts,
    rigged_params,
    tune,
    with_noise,
)
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_json, config_of
from mtp_jax.model.params import param_specs
from mtp_jax.spread import Spread
from tests.v4 import DSPARK, v4_config

pytestmark = pytest.mark.usefixtures("shared_programs")

CFG = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
    nextn_moe=(True,),
    max_position_embeddings=512,
    dtype="float32",
)
NOISE = 1.6
V4 = config_of(v4_config(vocab_size=320, num_hidden_layers=3, compress_ratios=[4, 128, 0, 0]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """CFG as a directory, and the arguments that made it."""
    out = tmp_path_factory.mktemp("synthetic")
    (out / "in.json").write_text(json.dumps(config_json(CFG)))
    given = ["--config", str(out / "in.json"), "--noise", str(NOISE), "--seed", "3"]
    assert main([*given, "--out", str(out / "model")]) == 0
    return out / "model", given


def test_the_chain_is_one_cycle_without_special_tokens():
    following = chain(CFG, seed=5)
    token, seen = 7, []
    for _ in range(CFG.vocab_size - 2):
        token = int(following[token])
        seen.append(token)
    assert sorted(seen) == list(range(2, CFG.vocab_size))
    assert following.min() == 2
    assert not np.array_equal(following, chain(CFG, seed=6))


@pytest.mark.slow
def test_tuned_noise_gives_the_acceptance_asked_for_and_greedy_text_is_the_chain():
    tuned = tune(CFG, 2.5, depth=3, seed=1)
    assert tuned.acceptance == pytest.approx(2.5, abs=0.1)
    params, following = rigged_params(CFG, tuned.noise, seed=1), chain(CFG, seed=1)
    engine = local_engine(
        CFG, params, EngineConfig(num_speculative_tokens=3, max_num_seqs=8, max_model_len=64)
    )
    other_prompts = random_prompts(CFG, 16, 8, seed=9)

    def acceptance(noise):
        local_runner(engine).take(with_noise(CFG, params, noise, seed=1))
        requests = complete(engine, other_prompts, 48)
        for r in requests:
            assert r.progress.output == following[[r.prompt[-1], *r.progress.output[:-1]]].tolist()
        runs = [r.progress.speculation for r in requests]
        return sum(s.accepted for s in runs) / sum(s.steps for s in runs) + 1

    assert acceptance(tuned.noise) == pytest.approx(2.5, abs=0.35)
    assert acceptance(0.0) == 4.0
    assert acceptance(50.0) < 1.3


def test_same_seed_same_bytes(checkpoint, tmp_path):
    directory, given = checkpoint
    assert main([*given, "--out", str(tmp_path)]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()


def test_a_written_checkpoint_holds_the_parameters_in_memory(checkpoint):
    loaded = load(checkpoint[0])
    assert loaded.config == CFG
    jax.tree.map(np.testing.assert_array_equal, loaded.params, rigged_params(CFG, NOISE, seed=3))


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_presets_have_200_million_parameters_and_24_layers(name):
    cfg = preset(name).config
    size = sum(int(np.prod(s.shape)) for s in jax.tree.leaves(param_specs(cfg)))
    assert 180e6 < size < 220e6
    assert cfg.num_hidden_layers == 24
    assert sum(cfg.is_moe(i) for i in range(24)) == (22 if name == "moe" else 0)


def test_the_preset_of_v4_has_layers_of_every_kind_and_is_written_and_read(tmp_path):
    found, staged = preset("v4").config, preset("v4-dspark").config
    assert staged.with_nextn((True,)) == replace(found, drafter=staged.drafter)
    size = sum(int(np.prod(s.shape)) for s in jax.tree.leaves(param_specs(found)))
    assert 110e6 < size < 130e6
    assert found.compressed is not None
    assert {*found.compressed.ratios} == {0, 4, 128}
    assert 0 < found.num_hash_layers < found.num_hidden_layers
    assert config_of(config_json(found)) == found
    (tmp_path / "in.json").write_text(json.dumps(config_json(V4)))
    given = ["--config", str(tmp_path / "in.json"), "--noise", str(NOISE), "--out", str(tmp_path / "model")]
    assert main(given) == 0
    loaded, rigged = load(tmp_path / "model"), rigged_params(V4, NOISE)
    assert loaded.config == V4
    jax.tree.map(np.testing.assert_array_equal, loaded.params, rigged)
    table = np.asarray(rigged.layers[0].mlp.by_token)
    assert all(len({*row}) == V4.num_experts_per_tok for row in table.tolist())


@pytest.mark.slow
def test_rigged_stages_draft_the_chain():
    """Without noise every draft comes true, with noise some; three of a block's four are verified."""
    trunk = V4.with_nextn(())
    said = {**DSPARK, "dspark_noise_token_id": 5, "dspark_target_layer_ids": [0, 1]}
    cfg = replace(trunk, drafter=StagesConfig.of(said, trunk, 2))
    params, lengths = rigged_params(cfg, 0.0), []
    sizes = EngineConfig(num_speculative_tokens=3, max_num_seqs=4, max_model_len=64, page_size=128)
    engine = local_engine(cfg, params, sizes)
    for noise in (0.0, 2.0):
        local_runner(engine).take(with_noise(cfg, params, noise))
        requests = complete(engine, random_prompts(cfg, 4, 8), 40)
        for r in requests:
            assert r.progress.output == chain(cfg)[[r.prompt[-1], *r.progress.output[:-1]]].tolist()
        runs = [r.progress.speculation for r in requests]
        lengths.append(sum(s.accepted for s in runs) / sum(s.steps for s in runs) + 1)
    assert lengths[0] > 3.5 > lengths[1] > 1.2


def test_what_cannot_be_rigged_is_refused(capsys, tmp_path):
    with pytest.raises(ConfigError, match="unknown"):
        preset("huge")
    with pytest.raises(ConfigError, match="NextN"):
        rigged_params(CFG.with_nextn(()), 1.0)
    with pytest.raises(ConfigError, match="at most 4"):
        tune(CFG, 4.5, depth=3)
    (tmp_path / "config.json").write_text(json.dumps(config_json(CFG)))
    assert main(["--config", str(tmp_path / "config.json"), "--out", str(tmp_path)]) == 1
    assert "--noise or --tune" in capsys.readouterr().err
    (tmp_path / "stages.json").write_text(json.dumps(config_json(CFG) | {"dspark_block_size": 4}))
    given = ["--config", str(tmp_path / "stages.json"), "--noise", "1", "--out", str(tmp_path)]
    assert main(given) == 1
    assert "declares DSpark stages, which --config does not make" in capsys.readouterr().err
    assert main(["--preset", "dense", "--seed", "-1", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: --seed -1; expected 0 or more\n"
    for given, message in (
        (["--noise", "nan"], "error: --noise nan; expected a finite number of 0 or more\n"),
        (["--noise", "-1"], "error: --noise -1.0; expected a finite number of 0 or more\n"),
        (["--depth", "2"], "error: --depth has no effect without --tune; add that, or leave it out\n"),
    ):
        assert main(["--preset", "dense", "--out", str(tmp_path), *given]) == 1
        assert capsys.readouterr().err == message
    with pytest.raises(SystemExit, match="2"):
        main(["--preset", "dense", "--out", str(tmp_path), "--noise", "1", "--tune", "2"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.slow
def test_an_acceptance_that_no_noise_gives_is_refused(monkeypatch):
    calm = synthetic.with_noise
    monkeypatch.setattr(synthetic, "with_noise", lambda cfg, params, _, seed=0: calm(cfg, params, 0.0, seed))
    with pytest.raises(ConfigError, match=r"2.0 at depth 3 is out of reach .*: the nearest is 4\.000"):
        tune(CFG, 2.0, depth=3, prompts=2, max_tokens=12)


def test_bytes_of_a_step():
    params = rigged_params(CFG, 1.0)
    total = sum(a.nbytes for a in jax.tree.leaves(params))
    trunk, head, nextn = cost.of_trunk(params), cost.of_head(params), cost.of_nextn(params.nextn[0])
    # Visiting all eight experts touches everything; the embedding table is left out.
    assert trunk.touched(8) + head.touched(8) + nextn.touched(8) + params.embed.nbytes == total
    assert trunk.expert == nextn.expert == 3 * 24 * 64 * 4
    assert head.always == 320 * 64 * 4

    experts = {1: 2.0, 4: 5.0}

    def step_bytes(depth: int) -> float:
        key = StepKey(1, depth, 0, SamplingMode())  # of no cached rows
        return cost.of_launch(key, CFG, params, 16, "float32", 1, experts.__getitem__).bytes

    assert step_bytes(0) == trunk.touched(2) + head.always
    rows = cost.of_entries(params.nextn[0])
    assert rows.expert == 0
    assert 0 < rows.always < nextn.always
    drafting = 3 * head.always + 3 * nextn.touched(2) + rows.always
    assert step_bytes(3) == trunk.touched(5) + head.always + drafting


def test_distinct_experts_over_sliding_windows():
    ids = np.array([[0, 1], [1, 2], [0, 1], [3, 4]])
    assert cost.distinct_experts(ids, 1) == 2
    assert cost.distinct_experts(ids, 2) == pytest.approx((3 + 3 + 4) / 3)
    assert cost.distinct_experts(ids, 4) == 5
    assert cost.experts_per_window([], [1, 4]) == {1: 0.0, 4: 0.0}


def test_share_of_repeated_text():
    assert repeated(list(range(20))) == repeated([1, 2]) == 0
    assert repeated([7] * 17) == pytest.approx(0.9)
    assert repeated([1, 2, 3, 1, 2, 3, 1], gram=3) == pytest.approx(2 / 5)


def test_spread_and_table():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]).show(1) == "3.0 (2.0-4.0)"
    lines = table(["name", "ms"], [["a", 1], ["bb", 12.5]]).splitlines()
    assert lines == ["| name |   ms |", "|:-----|-----:|", "| a    |    1 |", "| bb   | 12.5 |"]


def run_bench(tmp_path, *given):
    out = tmp_path / "out.json"
    assert cli.main(["bench", *given, "--json", str(out), "--compile-cache", "none"]) == 0
    return json.loads(out.read_text())


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that are saved."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (figures.append(f), save(f, *a, **k))[1])
    return figures


@pytest.mark.rest
def test_bench_depth_measures_greedy_and_sampled_speed(checkpoint, tmp_path, capsys, drawn):
    sizes = ("--prompts", "2", "--prompt-tokens", "8", "--max-tokens", "24")
    content = run_bench(tmp_path, "depth", "--model", str(checkpoint[0]), "--depths", "0,2", *sizes)
    assert "bench depth --model" in content["command"]
    assert content["environment"].keys() >= {"python", "jax", "jaxlib", "cpu", "cores", "load_average"}
    figures = content["figures"]["depths"]
    assert [(f["temperature"], f["depth"]) for f in figures] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    for plain, two in (figures[:2], figures[2:]):
        assert plain["speedup"] == {"median": 1.0, "low": 1.0, "high": 1.0, "count": 2}
        assert plain["acceptance_length"] == 1
        assert 1 < two["acceptance_length"] <= 3
        assert len(two["acceptance_per_position"]) == len(two["seconds"]) == 2
        assert two["tokens_per_second"] == pytest.approx(2 * 23 / sum(two["seconds"]))
        assert two["of_depth_0"] == pytest.approx(two["tokens_per_second"] / plain["tokens_per_second"])
    assert [f["same_tokens"] for f in figures] == [True, True, None, None]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert header[:2] == ["temperature", "depth"]
    assert [row[:2] for row in rows] == [["0", "0"], ["0", "2"], ["1", "0"], ["1", "2"]]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    speed = drawn[0].axes[0]
    plotted = {line.get_label(): list(line.get_ydata()) for line in speed.get_lines()}
    assert plotted == {
        "greedy": [f["tokens_per_second"] for f in figures[:2]],
        "temperature 1": [f["tokens_per_second"] for f in figures[2:]],
    }


def test_bench_depth_refuses_a_temperature_before_it_measures_others(checkpoint, tmp_path, capsys):
    out = tmp_path / "out.json"
    command = ["bench", "depth", "--model", str(checkpoint[0]), "--temperature", "0,-1", "--json", str(out)]
    assert cli.main([*command, "--compile-cache", "none"]) == 2
    assert "temperature" in capsys.readouterr().err
    assert not out.exists()


def test_bench_reports_errors_without_a_traceback(tmp_path, capsys):
    assert cli.main(["bench", "depth", "--model", str(tmp_path), "--compile-cache", "none"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_bench_window_and_acceptance(checkpoint, tmp_path):
    model = ("--model", str(checkpoint[0]))
    sizes = ("--prompts", "2", "--max-tokens", "16")
    window = run_bench(tmp_path, "window", *model, "--windows", "2,4", "--rounds", "3", *sizes)["figures"]
    assert [w["window"] for w in window["windows"]] == [1, 2, 4]
    assert [w["experts_per_layer"] >= 2 for w in window["windows"]] == [True] * 3
    end = window["end_to_end"]
    for f in (*window["windows"], *end["steps"].values()):
        assert f["over_floor"] > 0
    first = window["windows"][0]
    read = first["bytes"] + first["cached_bytes"]
    assert first["floor_seconds"] == pytest.approx(read / end["copied_bytes_per_second"])
    assert end["measured_over_predicted"] == pytest.approx(
        end["measured_speedup"]["median"] / end["predicted_speedup"]
    )
    found = run_bench(tmp_path, "acceptance", *model, "--prompt-tokens", "8", *sizes)["figures"]
    assert [f["temperature"] for f in found["temperatures"]] == [0.0, 0.7, 1.0]
    for f in found["temperatures"]:
        assert f["acceptance_length"] == pytest.approx(1 + sum(f["acceptance_per_position"]))
