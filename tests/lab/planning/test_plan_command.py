"""`mtp-jax plan`: what it prints, what docs/planning.md shows, what it refuses."""

import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtp_jax.commands import cli
from mtp_jax.lab.planning.releases import KNOWN
from mtp_jax.model.family import config_of
from tests import golden
from tests.lab.planning.releases import FEWER_LAYERS, RELEASES, write
from tests.v4 import DSPARK

DOCS = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
(LOAD,) = re.findall(r"^```jsonl\n(.*?)```$", DOCS, re.MULTILINE | re.DOTALL)
# Making the parser of all commands takes as long as a plan.
PARSER = functools.cache(cli.make_parser)
EXAMPLES = re.findall(r"^```\n\$ mtp-jax (plan.*)\n((?:.*\n)*?)```$", DOCS, re.MULTILINE)
# One golden model of each form of block and of weights.
KINDS = ("bf16", "dsa_glm52", "dsa_v32", "fp8", "glm46", "mtp2", "no_mtp_head", "no_q_lora", "v3")


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch):
    monkeypatch.setattr(cli, "make_parser", PARSER)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A working directory with a folder for each release, and a load."""
    for name in RELEASES:
        write(tmp_path, name)
    (tmp_path / "load.jsonl").write_text(LOAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan(models, capsys):
    """Runs the command; returns its output, or the error it ends with."""

    def run(*argv: str) -> str:
        status = cli.main(["plan", *argv])
        out, err = capsys.readouterr()
        assert (status, err == "", out == "") in ((0, True, False), (2, False, True))
        return out or err

    return run


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_the_documentation_shows_what_is_printed(plan, command, shown):
    assert plan(*shlex.split(command)[1:]) == shown


def test_the_documentation_has_examples_of_each_kind():
    assert len(EXAMPLES) == 6
    assert ["--check" in c for c, _ in EXAMPLES].count(True) == 1
    assert [s.startswith("error: 8 x H100: needs ") for _, s in EXAMPLES].count(True) == 1


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2-Thinking", "GLM-4.5", "DeepSeek-V4-Flash"])
@pytest.mark.parametrize("fraction", ["0.94", pytest.param("0.85", marks=pytest.mark.rest)])
def test_info_has_the_same_sum(tmp_path, plan, capsys, name, fraction):
    """FP8, int4 and bfloat16, split over eight GPUs, with a cache that is whole on each."""
    model = str(write(tmp_path, name, **FEWER_LAYERS.get(name, {})))
    both = "--gpus", "8", "--gpu", "h200", "--memory-fraction", fraction, "--json"
    assert cli.main(["info", model, *both]) == 0
    found = json.loads(capsys.readouterr().out)
    for kind in ("bfloat16", "fp8"):
        cache = ["--kv-cache-dtype", "fp8"] if kind == "fp8" else []
        *_, with_drafts = json.loads(plan(model, *both, *cache, "--mesh", "1x8"))["memory"]
        # Scales of blocks that are cut off are counted by their share, in the plan.
        assert found["cache_tokens_per_gpu"][kind] == pytest.approx(with_drafts["cache_tokens"], rel=1e-5)


def test_info_tells_the_form_of_an_fp8_release(tmp_path, capsys):
    model = str(write(tmp_path, "DeepSeek-V3"))
    assert cli.main(["info", model, "--gpus", "16", "--gpu", "h200"]) == 0
    told = capsys.readouterr().out
    assert "686.1 GB as fp8" in told
    assert "tokens as fp8: 0.94 of 140.4 GiB, less" in told
    assert "with weights in fp8" in told
    assert cli.main(["info", model, "--memory-fraction", "0.9"]) == 2
    assert "name one with --gpu" in capsys.readouterr().err


def test_the_documentation_has_every_option(plan, capsys):
    assert cli.main(["plan", "--help"]) == 0
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert flags == set(re.findall(r"^\| `(--[a-z-]+)` \|", DOCS, re.MULTILINE))


def test_8_h100_are_too_few_and_8_h200_enough(plan):
    error = plan("DeepSeek-V3", "--gpu", "h100")
    found = re.search(r"needs ([\d.]+) GiB per GPU, has ([\d.]+): .*; 16 GPUs would do\n", error)
    assert found
    assert float(found[1]) > 100 > 80 > float(found[2])
    assert "requests" in plan("DeepSeek-V3", "--gpu", "h200")
    assert "requests" in plan("DeepSeek-V3", "--gpu", "h100", "--gpus", "16")
    assert "8 x H100: needs 88.4 GiB" in plan("DeepSeek-V3", "--gpu", "h100", "--mesh", "1x8")
    assert "requests" in plan("Kimi-K2-Thinking", "--gpu", "h200")
    assert "64 GPUs would do" in plan("GLM-5.2", "--gpu", "h100")


def test_where_weights_divided_by_heads_would_fit_that_is_said(plan):
    error = plan("GLM-4.5", "--gpu", "h200", "--gpus", "8", "--context", "90000")
    assert error.endswith("; a mesh of 1x8 or 16 GPUs would do\n")
    assert "requests" in plan("GLM-4.5", "--gpu", "h200", "--mesh", "1x8", "--context", "90000")


def test_what_cannot_be_made_is_not_proposed(plan):
    """Neither groups that do not divide the heads nor hosts that do not divide the GPUs."""
    assert plan("DeepSeek-V3", "--gpu", "gb200", "--gpus", "2").endswith("; 8 GPUs would do\n")
    assert plan("GLM-4.5", "--gpu", "h100", "--gpus", "5").endswith("; 40 GPUs would do\n")


@pytest.mark.parametrize(
    "variant",
    [v if v in KINDS else pytest.param(v, marks=pytest.mark.rest) for v in golden.VARIANTS],
)
def test_every_architecture_can_be_planned(plan, variant):
    """Of small models, on one GPU and on groups of two."""
    config = golden.model_dir(variant) / "config.json"
    for argv in (["--gpus", "1"], ["--gpus", "4", "--mesh", "2x2"]):
        for cache in ("auto", "fp8"):
            found = json.loads(
                plan(str(config), "--json", "--context", "64", "--kv-cache-dtype", cache, *argv)
            )
            assert len(found["rows"]) > 9
            assert all(0 < lean < usual for usual, lean in (row["step_seconds"] for row in found["rows"]))


def test_what_drafts_leave_no_room_for_is_planned_without(plan):
    """The NextN layer takes memory, too."""
    found = json.loads(plan("GLM-5.2", "--gpu", "b200", "--gpus", "16", "--json"))
    assert [m["drafts"] for m in found["memory"]] == [False, True]
    tight = json.loads(
        plan("GLM-5.2", "--gpu", "h200", "--gpus", "16", "--json", "--context", "90000", "--requests", "16")
    )
    assert {row["depth"] for row in tight["rows"]} == {0}
    assert tight["notes"][0].startswith("with drafts 16 x H200: needs ")


def test_json_says_what_the_table_says(plan):
    argv = ("DeepSeek-V3", "--requests", "64", "--depths", "3", "--price", "2.5", "--kv-cache-dtype", "fp8")
    found = json.loads(plan(*argv, "--json"))
    (row,), (memory,) = found["rows"], found["memory"]
    usual, lean = row["tokens_per_second_per_user"]
    assert usual < lean
    assert row["tokens_per_second_per_gpu"] == pytest.approx([usual * 8, lean * 8])
    assert row["dollars_per_million_tokens"][1] == pytest.approx(2.5 / 3600 / (lean * 8) * 1e6)
    assert row["step_seconds"][1] == pytest.approx(row["tokens_per_step"] / lean)
    assert sum(row["shares_lean"].values()) == pytest.approx(1)
    assert memory["cache_bytes_per_token"] == 62 * 656
    (line,) = [line for line in plan(*argv).splitlines() if line.startswith("      64 ")]
    assert f"{usual:.1f}-{lean:.1f}" in line


def test_drafts_of_a_part_of_the_vocabulary_read_less(plan):
    argv = ("DeepSeek-V3", "--requests", "8", "--depths", "0,3", "--json")
    whole, part = (json.loads(plan(*argv, *more)) for more in ((), ("--draft-vocab", "16384")))
    assert whole["draft_bytes"]["layers"] == part["draft_bytes"]["layers"]
    assert [f["draft_bytes"]["table"] for f in (whole, part)] == [129280 * 7168 * 2, 16384 * 7168 * 2]
    plain, drafting = (list(zip(whole[key], part[key], strict=True)) for key in ("memory", "rows"))
    assert [b["weights"] - a["weights"] for a, b in plain] == [0, 16384 * 7168 * 2]
    (still, same), (slow, fast) = ((a["step_seconds"], b["step_seconds"]) for a, b in drafting)
    assert still == same
    # Three drafts less the rest of the table, at the highest bandwidth at least.
    assert slow[1] - fast[1] > 3 * (129280 - 16384) * 7168 * 2 / 4.8e12


def test_the_file_itself_will_do(plan):
    assert plan("DeepSeek-V3/config.json") == plan("DeepSeek-V3")


def test_a_model_without_nextn_layers_is_planned_without_drafts(plan):
    found = json.loads(plan("Kimi-K2-Thinking", "--gpus", "16", "--json"))
    assert {row["depth"] for row in found["rows"]} == {0}
    assert found["weights"] == "bfloat16, experts in int4"


def test_the_trunk_of_a_model_with_dspark_stages_is_planned(plan, models):
    (models / "dspark.json").write_text(json.dumps(RELEASES["DeepSeek-V4-Flash"] | DSPARK))
    alike = "--depths", "0", "--gpus", "4", "--requests", "1,16", "--json"
    found, trunk = (json.loads(plan(name, *alike)) for name in ("dspark.json", "deepseek-v4-flash"))
    assert found["rows"] == trunk["rows"]
    assert found["weights"] == "fp8, experts in fp4"


def test_large_pages_of_v4_take_less_memory(plan):
    """12 kB per token at 128k of context, MTP and the slot included; 55 kB with the least pages."""
    argv = "deepseek-v4-flash", "--gpus", "4", "--context", "131072", "--depths", "3", "--json"
    (small,), (large,) = (json.loads(plan(*argv, *more))["memory"] for more in ((), ("--page-size", "2048")))
    assert (small["cache_bytes_per_token"], large["cache_bytes_per_token"]) == (55_296, 10_866)
    assert large["cache_bytes_per_token"] + large["cache_bytes_per_slot"] / 131072 < 12_000
    assert large["requests"] > 4 * small["requests"]


def test_a_load_for_v4(plan):
    """Pages are of 128 tokens by default, and slots take memory of their own."""
    argv = "DeepSeek-V4-Flash", "--gpus", "4", "--mesh", "1x4", "--load", "load.jsonl", "--json"
    on, off = json.loads(plan(*argv, "--software", "lean"))["runs"]
    assert on["requests_served"] == off["requests_served"] == 6
    assert on["tokens_per_second"] > 1.3 * off["tokens_per_second"]


def test_what_the_engine_does_may_be_asked_for(plan):
    argv = ("DeepSeek-V3", "--gpus", "64", "--requests", "8192", "--depths", "0", "--json")
    auto = json.loads(plan(*argv))
    engine = json.loads(plan(*argv, "--exchange", "gather", "--micro-batches", "1"))
    assert (auto["exchange"], engine["exchange"]) == ("all-to-all", "gather")
    assert [p["rows"][0]["micro_batches"] for p in (auto, engine)] == [2, 1]
    assert auto["rows"][0]["step_seconds"][1] < 0.5 * engine["rows"][0]["step_seconds"][1]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("DeepSeek-V3 --gpu a100", "unknown GPU 'a100'; expected one of h100, h800, h20, h200, b200, gb200"),
        ("DeepSeek-V3 --gpus 7", "256 experts do not divide over 7 GPUs; choose a number that divides"),
        ("DeepSeek-V3 --gpus 16 --hosts 3", "hosts = 3; 16 GPUs do not divide over them"),
        ("DeepSeek-V3 --gpus 16 --hosts 1", "hosts = 1; 16 x H200 need 2 or more"),
        ("DeepSeek-V3 --mesh 2x2", "--mesh 2x2 is 4 GPUs, --gpus 8; give both alike"),
        ("DeepSeek-V3 --gpus 16 --mesh 1x16", "a mesh of 1x16 has groups of 16 GPUs, a host 8"),
        ("GLM-4.5 --gpus 5 --mesh 1x5", "num_attention_heads = 96 does not divide over the 5 GPUs"),
        ("DeepSeek-V3 --context 0", "argument --context: '0' is not an integer of 1 or more"),
        ("DeepSeek-V3 --context 200000", "context = 200000; the model has positions for 163840"),
        ("DeepSeek-V3 --requests 5000", "5,000 requests are too many: the cache holds 920 requests of 4,096"),
        ("DeepSeek-V3 --depths 0,9", "depth = 9; expected 0 to 8 drafts"),
        ("DeepSeek-V3 --draft-vocab 129281", "--draft-vocab 129281; expected 1 to 129280 tokens"),
        ("DeepSeek-V3 --accept-rates 1.5", "'1.5' is not a list of numbers from 0 to 1"),
        ("Kimi-K2-Thinking --depths 1", "depth = 1; config.json declares no NextN layer"),
        ("nowhere", "nowhere is neither a directory nor the name of a known model; name a directory with"),
        ("joyai", "a directory with config.json, or one of joyai-llm-flash"),
        ("DeepSeek_v4-fash", "a directory with config.json, or one of deepseek-v4-flash"),
        ("zai-org/GLM-5", "the cache of the hub does not have all of zai-org/GLM-5"),
        ("list.json", "list.json holds a JSON list; expected an object"),
        ("mamba.json", "model_type 'mamba' is not supported"),
        ("", "name a model's directory or its config.json, or one of deepseek-v3, "),
        (
            "--check --load load.jsonl",
            "--check compares DeepSeek-V3 and V4 with published speeds; leave out --load",
        ),
        ("DeepSeek-V3 --max-num-seqs 8", "--max-num-seqs has no effect without --load FILE; give both or"),
        ("DeepSeek-V3 --seed 1", "--seed has no effect without --load FILE"),
        ("DeepSeek-V3 --fixed-depth", "--fixed-depth has no effect without --load FILE"),
        ("DeepSeek-V3 --load load.jsonl --depths 3", "--depths has no effect with --load"),
        ("DeepSeek-V3 --load load.jsonl --context 9", "--context has no effect with --load"),
        ("DeepSeek-V3 --load nothing", "--load nothing cannot be read"),
        ("DeepSeek-V3 --load empty.jsonl", "empty.jsonl has no arrivals"),
        ("DeepSeek-V3 --load bad.jsonl", "bad.jsonl, line 7: arrival = -1; expected a number of 0 or more"),
        (
            "DeepSeek-V3 --load load.jsonl --max-model-len 4096",
            "line 3 of the load: the prompt has 6,000 tokens, a request at most 4,096; raise --max-model-len",
        ),
        (
            "DeepSeek-V3 --load load.jsonl --max-num-seqs 9",
            "--max-num-seqs 9 does not divide over a data axis",
        ),
        ("DeepSeek-V3 --load load.jsonl --max-num-seqs 0", "--max-num-seqs 0; expected an integer from 1 to"),
        ("DeepSeek-V3 --load load.jsonl --seed -1", "--seed -1; expected an integer from 0 to"),
        ("DeepSeek-V3 --load load.jsonl --num-speculative-tokens 9", "depth = 9; expected 0 to 8 drafts"),
        ("DeepSeek-V3 --load load.jsonl --gpu h100", "with drafts 8 x H100: needs "),
        ("Kimi-K2-Thinking --load load.jsonl --num-speculative-tokens 1", "--num-speculative-tokens 1, but "),
        ("DeepSeek-V3 --accept-rates glm", "'glm' is not a list of numbers from 0 to 1"),
        ("--check DeepSeek-V3", "--check compares DeepSeek-V3 and V4 with published speeds; leave out Deep"),
        (
            "dspark.json",
            "dspark.json declares DSpark stages, which its tensors alone describe; take the trunk, ",
        ),
        ("dspark.json --depths 1", "with --depths 0"),
        ("dspark.json --load load.jsonl", "with --num-speculative-tokens 0"),
        ("DeepSeek-V4-Pro --load load.jsonl --page-size 64", "--page-size 64; expected a multiple of 128"),
        ("DeepSeek-V4-Pro --page-size 64", "--page-size 64; expected a multiple of 128, such as 128"),
        ("DeepSeek-V3 --page-size 0", "--page-size 0; expected a multiple of 1, such as 64"),
        ("DeepSeek-V4-Flash --gpus 16 --mesh 1x16 --gpu gb200", "o_groups = 8 does not divide over the 16"),
    ],
)
def test_errors_are_one_line(plan, models, argv, error):
    (models / "list.json").write_text("[1]")
    (models / "empty.jsonl").write_text("\n")
    (models / "bad.jsonl").write_text(f'{LOAD}{{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}}')
    (models / "mamba.json").write_text('{"model_type": "mamba"}')
    (models / "dspark.json").write_text(json.dumps(RELEASES["DeepSeek-V4-Pro"] | DSPARK))
    told = plan(*argv.split())
    assert told.startswith("error: ")
    assert error in told
    assert told.count("\n") == 1


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    return figures


def test_the_picture_has_a_band_for_each_depth(plan, models, drawn):
    plan("DeepSeek-V3", "--output", "out.png", "--depths", "0,3", "--requests", "8,64,512")
    assert (models / "out.png").read_bytes().startswith(b"\x89PNG")
    (axis,) = drawn[0].axes
    assert len(axis.patches) == 2
    labels = [line.get_label() for line in axis.get_lines()]
    assert [label for label in labels if not str(label).startswith("_")] == ["without MTP", "MTP, depth 3"]
    assert all(np.shape(line.get_xydata()) == (3, 2) for line in axis.get_lines())


OF_LOAD = ("DeepSeek-V3", "--load", "load.jsonl", "--mesh", "1x8", "--prefill-chunk", "4096")


def test_a_load_in_json_has_the_figures_of_the_text(plan):
    argv = *OF_LOAD, "--price", "2.5"
    found, shown = json.loads(plan(*argv, "--json")), plan(*argv)
    on, off = found["runs"]
    assert (on["run"], off["run"]) == ("with MTP, 0 to 3 drafts", "without MTP")
    for run in (on, off):
        times = run["whole_answer_seconds"]
        assert times["50"] <= times["90"] <= times["99"]
        assert run["requests_served"] == 6
        assert run["tokens_per_second_per_gpu"] == pytest.approx(run["tokens_per_second"] / 8)
        assert run["dollars_per_million_tokens"] == pytest.approx(
            2.5 / 3600 * 8 / run["tokens_per_second"] * 1e6
        )
        assert f"{times['99']:10.3f}" in shown
        assert f"{run['tokens_per_second']:,.1f}" in shown
    assert on["tokens_per_second"] > 1.3 * off["tokens_per_second"]
    assert off["tokens_per_step"] == 1 < on["tokens_per_step"]


def test_a_load_depends_on_its_seed_and_its_software(plan):
    one, again, other = (plan(*OF_LOAD, "--seed", seed) for seed in ("0", "0", "1"))
    assert one == again != other
    usual, lean = (
        json.loads(plan(*OF_LOAD, "--json", "--software", software, "--num-speculative-tokens", "0"))["runs"]
        for software in ("usual", "lean")
    )
    assert len(usual) == len(lean) == 1
    assert usual[0]["seconds"] > lean[0]["seconds"]


def test_a_load_for_a_model_without_nextn_layers_has_one_run(plan):
    found = json.loads(plan("Kimi-K2-Thinking", "--gpus", "16", "--load", "load.jsonl", "--json"))
    assert [run["run"] for run in found["runs"]] == ["without MTP"]


def test_acceptance_may_have_a_name(plan):
    argv = ("DeepSeek-V3", "--requests", "8", "--depths", "3", "--json", "--accept-rates")
    assert json.loads(plan(*argv, "glm-5.2"))["rows"][0]["tokens_per_step"] == pytest.approx(2.99)


def test_the_picture_of_a_load_has_a_line_for_each_run(plan, models, drawn):
    plan(*OF_LOAD, "--output", "out.png")
    assert (models / "out.png").read_bytes().startswith(b"\x89PNG")
    labels = ["with MTP, 0 to 3 drafts", "without MTP"]
    for axis in drawn[0].axes:
        assert [line.get_label() for line in axis.get_lines()] == labels
        assert all(line.get_ydata()[-1] == 1 for line in axis.get_lines())
    assert len(drawn[0].axes) == 4


def test_without_matplotlib_the_picture_says_what_to_install(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib; or leave --output out" in plan("DeepSeek-V3", "--output", "out.png")


def test_it_starts_without_jax(models):
    code = (
        "import sys; sys.modules['jax'] = None; from mtp_jax.commands import cli; "
        "argv = ['plan', 'DeepSeek-V3']; "
        "sys.exit(cli.main(argv) or cli.main([*argv, '--load', 'load.jsonl']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_known_model_is_the_release():
    for name in RELEASES:
        assert config_of(RELEASES[name]) == KNOWN[name.lower()]


def test_a_known_model_needs_no_file(plan):
    options = ("--gpu", "h200", "--gpus", "16", "--requests", "1", "--json")
    known, read = (json.loads(plan(name, *options)) for name in ("deepseek-r1", "DeepSeek-V3"))
    assert known.pop("model") == "deepseek-r1"
    read.pop("model")
    assert known == read
    assert f"or one of {', '.join(KNOWN)}, whose is known" in plan()


def test_the_default_server_of_one_gpu(plan):
    """The documentation has its sizes, and figures of one request."""
    Path("one.csv").write_text("arrival,prompt_tokens,output_tokens\n0.0,8192,1024\n")
    argv = "joyai-llm-flash-fp8", "--gpus", "1", "--load", "one.csv"
    assert "\n128 slots of 131,072 tokens at most, chunks of 8,192; seed 0\n" in plan(*argv)
    found = []
    for software in ("middle", "lean"):
        run, alone = json.loads(plan(*argv, "--software", software, "--json"))["runs"]
        found += [(f"{software} software", run), (f"{software}, without MTP", alone)]
    for name, run in found[:3]:
        first, later = (1e3 * run[f"{time}_seconds"]["50"] for time in ("first_token", "token_to_token"))
        assert f"{name} | {first:.0f} ms | {later:.1f} ms | {run['tokens_per_second']:.0f} |" in DOCS
