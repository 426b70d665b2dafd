"""Every option of `mtp-jax` has an effect, wrong ones give one line; the small subcommands."""

import functools
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import mtp_jax.llm
from mtp_jax import LLM, SamplingParams, cli
from mtp_jax.commands import options
from tests import golden, tiny_tokenizer

V3 = golden.model_dir("v3")

# Option -> the field of SamplingParams or the argument of LLM that it sets, and to what.
SAMPLING = {
    "-n 2": ("n", 2),
    "--temperature 0.5": ("temperature", 0.5),
    "--top-p 0.5 --temperature 1": ("top_p", 0.5),
    "--top-k 5 --temperature 1": ("top_k", 5),
    "--min-p 0.1 --temperature 1": ("min_p", 0.1),
    "--max-tokens 7": ("max_tokens", 7),
    "--min-tokens 3": ("min_tokens", 3),
    "--stop a --stop b": ("stop", ["a", "b"]),
    "--stop-token-ids 4,5": ("stop_token_ids", [4, 5]),
    "--ignore-eos": ("ignore_eos", True),
    "--seed 9 --temperature 1": ("seed", 9),
    "--presence-penalty -1": ("presence_penalty", -1.0),
    "--frequency-penalty 1": ("frequency_penalty", 1.0),
    "--repetition-penalty 1.5": ("repetition_penalty", 1.5),
    "--logit-bias 7:2.5,8:-1": ("logit_bias", {7: 2.5, 8: -1.0}),
    "--logprobs 3": ("logprobs", 3),
    "--prompt-logprobs 2": ("prompt_logprobs", 2),
    "--no-skip-special-tokens": ("skip_special_tokens", False),
    "--include-stop-str-in-output --stop a": ("include_stop_str_in_output", True),
}
ENGINE = {
    "--draft-model d": ("draft_model", Path("d")),
    "--num-speculative-tokens 2": ("num_speculative_tokens", 2),
    "--dtype bfloat16": ("dtype", "bfloat16"),
    "--max-num-seqs 5": ("max_num_seqs", 5),
    "--max-model-len 99": ("max_model_len", 99),
    "--mesh 2x1": ("mesh", {"data": 2, "model": 1}),
    "--num-nextn-layers 1": ("num_nextn_layers", 1),
    "--page-size 8": ("page_size", 8),
    "--num-pages 33": ("num_pages", 33),
    "--prefill-chunk 32": ("prefill_chunk", 32),
    "--drafting greedy --temperature 1": ("drafting", "greedy"),
    "--verifier rejection --temperature 1": ("verifier", "rejection"),
    "--compile-cache c": ("compile_cache", Path("c")),
    "--no-compile-cache": ("compile_cache", None),
}
# Their effects are what test_cli.py tests.
BEHAVIOUR = {
    "--prompt",
    "--file",
    "--token-ids",
    "--lines",
    "--json",
    "--compare",
    "--runs",
    "--quiet",
    "--help",
}


def parse(*argv):
    return cli.make_parser().parse_args(["generate", "m", "-p", "x", *argv])


@pytest.mark.parametrize(("argv", "expected"), SAMPLING.items())
def test_sampling_options(argv, expected):
    name, value = expected
    params = options.sampling_params(parse(*argv.split()))
    assert getattr(params, name) == value
    assert getattr(options.sampling_params(parse()), name) != value


def opened_with(monkeypatch, *argv, completions=3):
    seen = {}
    monkeypatch.setattr(mtp_jax.llm, "LLM", lambda model, **given: seen.update(given, model=model))
    options.open_llm(parse("-q", *argv), options.Silent(), completions)
    return seen


@pytest.mark.parametrize(("argv", "expected"), ENGINE.items())
def test_engine_options(argv, expected, monkeypatch):
    name, value = expected
    defaults = {n: p.default for n, p in inspect.signature(LLM).parameters.items()}
    given = opened_with(monkeypatch, *argv.split())
    got = dict(given[name].shape) if name == "mesh" else given[name]
    assert got == value
    assert value != defaults[name]
    assert given["model"] == Path("m")


@pytest.mark.parametrize(("completions", "mesh", "slots"), [(1, "1x1", 1), (3, "2x1", 4), (50, "1x1", 8)])
def test_as_many_slots_as_completions(monkeypatch, completions, mesh, slots):
    assert opened_with(monkeypatch, "--mesh", mesh, completions=completions)["max_num_seqs"] == slots


def test_there_is_an_option_for_everything_and_a_test_for_every_option():
    sampling = {f.name for f in fields(SamplingParams)} - {"num_speculative_tokens"}
    engine = set(inspect.signature(LLM).parameters) - {"model", "reporter", "seed"}
    assert {name for name, _ in SAMPLING.values()} == sampling
    assert {name for name, _ in ENGINE.values()} == engine

    commands = [a.choices for a in cli.make_parser()._actions if isinstance(a.choices, dict)]
    generate = commands[0]["generate"]
    declared = {a.option_strings[-1] for a in generate._actions if a.option_strings}
    tested = {argv.split()[0] for argv in (*SAMPLING, *ENGINE)} | BEHAVIOUR
    assert declared == tested - {"-n"} | {"--n"}


def test_defaults():
    params = options.sampling_params(parse())
    assert params == SamplingParams(temperature=0, max_tokens=128)


class Typed(io.TextIOWrapper):
    """Standard input, from a pipe or, in one test, from a terminal."""


def failing(capsys, monkeypatch, *argv, stdin=""):
    """Standard error of a command that must fail without output."""
    monkeypatch.setattr(sys, "stdin", Typed(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)))
    assert cli.main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


IDS = ("--token-ids", "3")
QUIET = (*IDS, "--quiet", "--no-compile-cache")
ERRORS = [
    ([], "the following arguments are required: COMMAND; see `mtp-jax --help`"),
    (["frobnicate"], "argument COMMAND: invalid choice: 'frobnicate'"),
    (["generate", V3, "--max-token", 3, *IDS], "unrecognized arguments: --max-token 3"),
    (
        ["generate", V3, "--max-tokens", "x", *IDS],
        "argument --max-tokens: invalid int value: 'x'; see `mtp-jax gen",
    ),
    (["generate", V3, "-p", "x", *IDS], "argument --token-ids: not allowed with argument -p/--prompt"),
    (["generate", V3, "--token-ids", "1,x"], "'1,x' is not a list of integers; write 1,2,3"),
    (["generate", V3, "--mesh", "8", *IDS], "'8' is not DATAxMODEL; write 2x4 for eight devices"),
    (["generate", V3, "--mesh", "0x1", *IDS], "'0x1' is not DATAxMODEL"),
    (["generate", V3, "--logit-bias", "3", *IDS], "'3' is not ID:BIAS,...; write 17:2.5,4:-100"),
    (["generate", V3, "--compile-cache", "c", "--no-compile-cache", *IDS], "not allowed with argument"),
    (["generate", V3, "--dtype", "int4", *IDS], "invalid choice: 'int4'"),
    (["generate", "nowhere", *IDS], "nowhere is not a directory; name one with config.json and safetensors"),
    (["generate", V3, "-p", "x"], "v3/model has no tokenizer.json; give --token-ids, and no --stop"),
    (["generate", V3, "--stop", "x", *IDS], "has no tokenizer.json; give --token-ids, and no --stop"),
    (["generate", V3, "--temperature", -1, *IDS], "temperature = -1.0; expected a number from 0"),
    (["generate", V3, "--max-tokens", 0, *IDS], "max_tokens = 0; expected an integer from 1"),
    (
        ["generate", V3, "--top-p", 0.5, *IDS],
        "--top-p has no effect at temperature 0; add --temperature 1, or leave",
    ),
    (["generate", V3, "--seed", 1, *IDS], "--seed has no effect at temperature 0"),
    (["generate", V3, "--verifier", "block", *IDS], "--verifier has no effect at temperature 0"),
    (
        ["generate", V3, "--num-speculative-tokens", 0, "--draft-model", "d", *IDS],
        "--draft-model has no effect with --num-speculative-tokens 0; raise that, or leave it out",
    ),
    (["generate", V3, "--include-stop-str-in-output", *IDS], "has no effect without --stop"),
    (
        ["generate", V3, "--lines", *IDS],
        "--lines splits -f FILE or standard input; leave out -p and --token-ids",
    ),
    (["generate", V3, "--runs", 2, *IDS], "--runs has no effect without --compare"),
    (["generate", V3, "--compare", "--runs", 0, *IDS], "--runs 0; expected at least 1"),
    (["generate", V3, "--compare", "--num-speculative-tokens", 0, *IDS], "--compare needs drafts"),
    (["generate", V3, "--compare", "-n", 2, *IDS], "--compare measures one completion"),
    (["generate", V3, "--compare", "--logprobs", 2, *IDS], "leave out --logprobs"),
    (
        ["generate", V3, "--num-speculative-tokens", 65, *QUIET],
        "num_speculative_tokens = 65",
    ),
    (
        ["generate", V3, "--max-model-len", 9999, *QUIET],
        "the model's positions end at 2560",
    ),
    (["generate", V3, "--mesh", "9x9", *QUIET], "a 9x9 mesh needs 81 devices"),
    (["chat", V3], "v3/model has no tokenizer.json, so it cannot chat; use `mtp-jax generate`"),
    (["chat", V3, "--logprobs", 2], "unrecognized arguments: --logprobs 2"),
    (["info", "nowhere"], "nowhere is not a directory"),
    (["info", V3, "--draft-model", "nowhere"], "nowhere"),
    (["export-nextn", "nowhere", "out"], "nowhere is not a directory"),
    (["convert", V3], "the following arguments are required: out"),
    (["train", "--config", "nowhere.toml", "--out", "out"], "nowhere.toml"),
    (["train", "--out", "out"], "the following arguments are required: --config"),
]


@pytest.mark.parametrize(("argv", "message"), ERRORS)
def test_errors_are_one_line(argv, message, capsys, monkeypatch):
    err = failing(capsys, monkeypatch, *argv)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_prompts_that_cannot_be_served(capsys, monkeypatch, tmp_path):
    argv = ["generate", V3, "--no-compile-cache", "--max-model-len", 8, "-q"]
    for ids, message in (
        ("3,999", "the prompt names token 999"),
        (",".join("3" * 8), "has 8 tokens; max_model_len = 8"),
    ):
        err = failing(capsys, monkeypatch, *argv, "--token-ids", ids)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err


def test_input_that_cannot_be_read(capsys, monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text("")
    argv = ["generate", tmp_path]
    fail = functools.partial(failing, capsys, monkeypatch, *argv)
    assert fail("-f", tmp_path / "none").endswith("none cannot be read: No such file or directory\n")
    assert "standard input is not UTF-8 text: byte 1 is wrong" in fail(stdin=b"a\xff")
    assert "the input is empty; give a prompt with -p" in fail("--lines")
    assert "the input is empty; give a prompt with -p" in fail(stdin="\n")
    monkeypatch.setattr(Typed, "isatty", lambda self: True)
    assert "no prompt; give -p TEXT, -f FILE, or text on standard input" in fail()


def test_info(capsys):
    assert cli.main(["info", str(V3), "--draft-model", str(V3.parent / "nextn")]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:])
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["architecture"] == "deepseek_v3"
    assert rows["layers"] == "3 (1 dense, 2 MoE)"
    assert rows["NextN layers"] == "1 (MoE; lmsys NextN)"
    assert rows["tokenizer"] == "none"
    assert rows["cache per GiB"] == "2,097,152 tokens as float32, 4,194,304 tokens as bfloat16"


def test_info_of_the_demo_model_as_json(capsys, monkeypatch, tmp_path):
    shutil.copytree(V3, tmp_path / "demo")
    demo = tiny_tokenizer.write(tmp_path / "demo", 160)
    monkeypatch.setattr(options, "demo_model", lambda: demo)
    assert cli.main(["info", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["nextn_layout"] == "in place"
    assert result["config"]["num_hidden_layers"] == 3
    assert result["parameters"] > result["active_parameters"] > 0
    assert result["tokenizer"] == {"ids": 160, "chat_template": True}
    assert result["stored"]["F32"]["nbytes"] > 1e6
    assert result["cache_tokens_per_gib"]["float32"] * result["cache_bytes_per_token"]["float32"] == 2**30


def test_export_and_convert(capsys, tmp_path):
    nextn, orbax = tmp_path / "nextn", tmp_path / "orbax"
    assert cli.main(["export-nextn", str(V3), str(nextn)]) == 0
    argv = [
        "convert",
        str(V3),
        str(orbax),
        "--draft-model",
        str(nextn),
        "--dtype",
        "float32",
        "--mesh",
        "1x2",
    ]
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert out == f"{nextn}\n{orbax}\n"
    assert [line.split()[0] for line in err.splitlines()] == ["export:", "convert"]
    assert cli.main(["info", str(orbax), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nextn_layout"] == "Orbax"
    assert cli.main(["export-nextn", str(V3), str(nextn)]) == 2
    assert "already holds safetensors files" in capsys.readouterr().err


def test_train(capsys, monkeypatch, tmp_path):
    from mtp_jax.train import loop

    recipe = Path(cli.__file__).parent.parent / "configs" / "demo" / "train.toml"
    monkeypatch.setattr(loop, "train", lambda recipe, out: out / "model")
    assert cli.main(["train", "--config", str(recipe), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/model\n"


def test_train_without_its_packages(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    for name in [n for n in sys.modules if n.startswith("mtp_jax.train.")]:
        monkeypatch.delitem(sys.modules, name)
    err = failing(capsys, monkeypatch, "train", "--config", "c", "--out", "o")
    assert err == "error: training needs optax; install it with: pip install 'mtp-jax[train]'\n"


def test_version(capsys):
    for argv in (["version"], ["--version"]):
        assert cli.main(argv) == 0
        assert capsys.readouterr().out.startswith("mtp-jax ")


def test_ctrl_c_and_system_errors(capsys, monkeypatch):
    def fail(error):
        def run(args):
            raise error

        monkeypatch.setattr(cli, "_print_version", run)
        return cli.main(["version"])

    assert fail(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")
    assert fail(PermissionError(13, "Permission denied", "/x")) == 2
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: '/x'\n"
    assert fail(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")) == 2
    assert capsys.readouterr().err.startswith("error: out of device memory; lower --max-num-seqs")
    with pytest.raises(RuntimeError, match="a bug"):  # these need their traceback
        fail(RuntimeError("a bug"))


def test_text_that_the_terminal_cannot_show(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(cli, "_version", lambda: "\u00e9")
    assert cli.main(["version"]) == 0
    assert screen.buffer.getvalue() == b"?\n"  # type: ignore[attr-defined]


def process(*argv, **options):
    return subprocess.run(
        [sys.executable, "-m", "mtp_jax", *map(str, argv)], capture_output=True, text=True, **options
    )


def test_help_and_errors_do_not_wait_for_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(cli.__file__).parent.parent}"}
    for argv in (["--help"], ["generate", "--help"], ["chat", "--help"], ["version"]):
        done = process(*argv, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
    assert process("generate", V3, "-p", "x", env=environment).returncode == 2
    assert "jax was imported" in process("info", V3, env=environment).stderr


def test_a_reader_that_goes_away(tmp_path):
    command = f"{sys.executable} -m mtp_jax generate --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=Path(cli.__file__).parent.parent
    )
    assert done.returncode in (0, 141)
    assert done.stderr == ""
