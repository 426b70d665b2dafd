"""The small subcommands of `mtp-jax`, and what holds for all: exit statuses, streams, a quick start."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import mtp_jax
from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.commands import chat, cli, flags, options
from tests import golden, tiny_tokenizer
from tests.checkpoint.files import drop_nextn, edit_tensors
from tests.models import TINY, tiny_params

V3 = golden.model_dir("v3")


@pytest.mark.rest
def test_without_a_compile_cache_there_is_none_even_if_the_environment_names_one(tmp_path):
    cfg = replace(TINY, num_hidden_layers=1).with_nextn(())
    save_checkpoint(tmp_path / "model", cfg, tiny_params(cfg), "float32")
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla")}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    sizes = ["--max-model-len", "32", "--page-size", "16", "--prefill-chunk", "16"]
    command = [sys.executable, "-m", "mtp_jax", "generate", str(tmp_path / "model"), "-q"]
    command += ["--token-ids", "1,2", "--max-tokens", "2", "--num-speculative-tokens", "0", *sizes]
    subprocess.run([*command, "--no-compile-cache"], env=env, check=True, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "xla").exists()


def test_profile_refuses_what_a_phase_has_no_use_for(capsys, tmp_path):
    for phase, given in (("prefill", ["--batch", "4"]), ("decode", ["--depth", "2"])):
        assert cli.main(["profile", "--phase", phase, *given, "--out", str(tmp_path / "out")]) == 2
        told = f"error: {' '.join(given)} has no effect with --phase {phase}; leave it out\n"
        assert capsys.readouterr().err == told
    assert not (tmp_path / "out").exists()


def test_info(capsys):
    assert cli.main(["info", str(V3), "--draft-model", str(V3.parent / "nextn")]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:])
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["architecture"] == "deepseek_v3"
    assert rows["layers"] == "3 (1 dense, 2 MoE)"
    assert rows["NextN layers"] == "1 (MoE; lmsys NextN)"
    assert rows["tokenizer"] == "none"
    assert (
        rows["cache per GiB"]
        == "2,097,152 tokens as float32, 4,194,304 tokens as bfloat16, 6,100,805 tokens as fp8"
    )


def test_info_of_a_config_alone(capsys, tmp_path):
    """What a model would need before anybody downloads it; what is split, by the number of devices."""
    config = json.loads((V3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["info", str(tmp_path), "--json", "--gpus", "2"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert cli.main(["info", str(V3), "--draft-model", str(V3.parent / "nextn"), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    same = ("parameters", "nextn_parameters", "cache_bytes_per_token")
    assert [alone[name] for name in same] == [whole[name] for name in same]
    assert (alone["stored"], alone["nextn_layout"]) == ({}, "declared")
    for dtype, size in alone["weight_bytes"].items():
        assert size == pytest.approx(whole["weight_bytes"][dtype], rel=0.02)
        assert size / 2 < alone["weight_bytes_per_device"][dtype] < size
    assert cli.main(["info", str(tmp_path), "--gpus", "2"]) == 0
    told = capsys.readouterr().out
    assert "no weights" in told
    assert "each of 2 GPUs" in told
    assert cli.main(["info", str(tmp_path), "--gpus", "3"]) == 2
    assert "does not divide over 3 devices" in capsys.readouterr().err
    assert cli.main(["info", str(tmp_path), "--num-nextn-layers", "9"]) == 2


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
    assert [line.split()[0] for line in err.splitlines()][-1] == "convert"
    assert cli.main(["info", str(orbax), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nextn_layout"] == "Orbax"
    assert cli.main(["info", str(nextn)]) == 2
    assert capsys.readouterr().err == (
        f"error: {nextn} holds NextN layers that were exported by themselves, and no model; name the model, "
        "and this folder with --draft-model\n"
    )
    assert cli.main(["export-nextn", str(V3), str(nextn)]) == 2
    assert "is there already and not empty" in capsys.readouterr().err


def test_a_model_without_its_nextn_layers(capsys, tmp_path):
    assert cli.main(["convert", str(V3), str(tmp_path / "out"), "--num-nextn-layers", "0"]) == 0
    for described in (["info", str(tmp_path / "out")], ["info", str(V3), "--num-nextn-layers", "0"]):
        capsys.readouterr()
        assert cli.main(described) == 0
        assert re.search(r"^NextN layers +none$", capsys.readouterr().out, re.MULTILINE)


def test_advice_is_in_the_words_of_the_shell(capsys, tmp_path):
    folder = edit_tensors(V3, tmp_path / "model", drop_nextn(V3))
    assert cli.main(["info", str(folder)]) == 2
    advice = (
        "with --draft-model, or do without: --num-speculative-tokens 0 to run it, --num-nextn-layers 0 to"
    )
    assert advice in capsys.readouterr().err
    assert cli.main(["info", str(folder), "--num-nextn-layers", "0"]) == 0
    kept = "a=1, adaptive_depth=False, seed = 3, n=2, compile_cache=None"
    told = "a=1, adaptive_depth=False, seed = 3, --n 2, compile_cache=None"
    assert flags.with_flags(kept, {"n": "--n", "compile_cache": "--compile-cache"}) == told
    kept = (
        "num_pages = 'a b', raise num_pages or memory_fraction. num_pages = None; /x/num_pages, 'num_pages'"
    )
    told = (
        "--num-pages 'a b', raise --num-pages or memory_fraction. num_pages = None; /x/num_pages, 'num_pages'"
    )
    assert flags.with_flags(kept, {"num_pages": "--num-pages"}) == told
    kept, switches = "a_b=True, or a_b = False", {("a_b", "True"): "--a-b"}
    assert flags.with_flags(kept, {}, switches) == "--a-b, or a_b = False"
    assert cli.main(["generate", str(folder), "-p", "x", "--max-tokens", "0"]) == 2
    error = "error: --max-tokens 0; expected an integer from 1 to 2147483647\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("name", ["models/tiny.gguf", "tiny.gguf"])
def test_a_file_that_is_missing_is_told_as_such(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", name, "-p", "x"]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {name} does not exist; name a GGUF file, or a directory"
    )


def test_a_folder_without_a_model_is_told_as_such(capsys, tmp_path):
    gguf = tmp_path / "model-Q4.gguf"
    missing = f"{tmp_path / 'config.json'} does not exist"
    empty = f"error: {missing}; a model directory holds config.json and safetensors"
    named = ". model-Q4.gguf is GGUF: a whole model is read from it, named as the file"
    for argv in (["generate", tmp_path, "-p", "x"], ["chat", tmp_path], ["info", tmp_path]):
        gguf.unlink(missing_ok=True)
        assert cli.main([*map(str, argv)]) == 2
        assert capsys.readouterr().err == f"{empty}\n"
        gguf.touch()
        assert cli.main([*map(str, argv)]) == 2
        assert capsys.readouterr().err == f"{empty}{named}\n"
    assert cli.main(["generate", "-p", "x", "--draft-model", str(gguf)]) == 2
    assert capsys.readouterr().err.endswith(f"or a hub's org/name{named}\n")


def test_train(capsys, monkeypatch, tmp_path):
    from mtp_jax.lab.train import loop

    recipe = Path(mtp_jax.__file__).parent.parent / "configs" / "demo" / "train.toml"
    monkeypatch.setattr(loop, "train", lambda recipe, out, packages_dir: out / "model")
    assert cli.main(["train", "--config", str(recipe), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/model\n"


def test_train_without_its_packages(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    for name in [n for n in sys.modules if n.startswith("mtp_jax.lab.train.")]:
        monkeypatch.delitem(sys.modules, name)
    recipe = Path(mtp_jax.__file__).parent.parent / "configs" / "demo" / "train.toml"
    assert cli.main(["train", "--config", str(recipe), "--out", "o"]) == 2
    assert capsys.readouterr().err == "error: training needs optax; install it with: pip install optax\n"
    assert cli.main(["train", "--config", "nowhere.toml", "--out", "o"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err


def test_version(capsys):
    for argv in (["version"], ["--version"]):
        assert cli.main(argv) == 0
        assert capsys.readouterr().out.startswith("mtp-jax ")


def test_another_package_adds_a_command_and_an_option(capsys, monkeypatch):
    """Entry points do it, as the entry points of the laboratory and the cluster."""

    def register(subparsers):
        subparsers.add_parser("greet", help="say hello").set_defaults(run=lambda args: print("hello") or 0)
        subparsers.choices["generate"].add_argument("--shout", action="store_true")

    entry = SimpleNamespace(name="greeting", load=lambda: SimpleNamespace(register=register))
    broken = metadata.EntryPoint("broken", "no.such.module", "mtp_jax.commands")
    monkeypatch.setattr(cli.metadata, "entry_points", lambda group: [entry, broken])
    assert cli.main(["greet"]) == 0
    said = "warning: broken (no.such.module) is no command here: No module named 'no'\n"
    assert capsys.readouterr() == ("hello\n", said)
    assert cli.main(["generate", "--help"]) == 0
    assert "--shout" in capsys.readouterr().out
    assert cli.main(["bench"]) == 2  # the laboratory is not hung in


def test_ctrl_c_and_system_errors(capsys, monkeypatch):
    def fail(error):
        def run(args):
            raise error

        monkeypatch.setattr(cli, "_print_version", run)
        return cli.main(["version"])

    assert fail(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")
    assert fail(PermissionError(13, "Permission denied", "/x")) == 2
    assert capsys.readouterr().err == "error: /x: Permission denied\n"
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


# Writes the status of each command line after its errors.
STATUSES = """
import sys
from mtp_jax.commands import cli

for line in sys.argv[1:]:
    print(cli.main(line.split()), file=sys.stderr)
"""


def test_help_and_errors_do_not_wait_for_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(mtp_jax.__file__).parent.parent}"}
    commands = ["--help", "generate --help", "chat --help", "version", f"generate {V3} -p x", f"info {V3}"]
    done = subprocess.run(
        [sys.executable, "-c", STATUSES, *commands], capture_output=True, text=True, env=environment
    )
    *told, refused, status, last = done.stderr.splitlines()
    assert told == ["0"] * 4
    assert "has no tokenizer.json" in refused
    assert (status, last) == ("2", "jax was imported")


def test_a_reader_that_goes_away(tmp_path):
    command = f"{sys.executable} -m mtp_jax generate --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=Path(mtp_jax.__file__).parent.parent
    )
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_a_user_without_a_home_folder_has_no_history(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(path))  # as of a uid that nothing knows
    with chat._history():
        pass
    assert not [*tmp_path.iterdir()]
