"""Options by other names, from a file, from the environment, and in the shell's completion."""

import argparse
import subprocess
from pathlib import Path

import pytest

from mtp_jax.api.demo import demo_model
from mtp_jax.api.options import LLMOptions
from mtp_jax.commands import cli, foreign
from mtp_jax.commands.configured import variable
from mtp_jax.commands.options import flag_of, given
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.options import declared
from serve.base.settings import Settings

PARSERS = cli.make_parser().parse_args(["completion", "bash"]).root._subparsers._group_actions[0].choices


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("serve --tp 2", "use --mesh 1xN"),
        ("serve --tensor-parallel-size=2 DIR", "use --mesh 1xN"),
        ("serve --data-parallel-size 2", "use --mesh Nx1"),
        ("serve --speculative-num-steps 3", "use --num-speculative-tokens K"),
        ("serve --speculative-config {}", "use --num-speculative-tokens K"),
        ("generate --num_speculative_tokens 3", "write --num-speculative-tokens"),
        ("serve --max-running-requests 3", "use --max-num-seqs"),
        ("serve --ctx-size 100", "use --max-model-len"),
        ("serve --tool-call-parser glm45", "use --tool-parser"),
        ("serve --default-chat-template-kwargs {}", "use --chat-template-kwargs"),
        ("serve --trust-remote-code", "no code of a checkpoint is ever run"),
        ("serve --pipeline-parallel-size 2", "layers are not split"),
        ("serve --temperature 0.6", "requests say it"),
        ("generate --max-token 4", "do you mean --max-tokens?"),
        ("generate --temp 1", "use --temperature"),
        ("generate --n-predict 4", "use --max-tokens"),
        ("generate --promt x", "do you mean --prompt?"),
        ("generate --guided-json {}", "use --json-schema"),
        ("chat --port 1", "`serve` has it, not this command"),
        ("bench depth --depht 1", "do you mean --depths?"),
        ("info --jsn", "do you mean --json?"),
    ],
)
def test_an_unknown_option_names_what_is_meant(capsys, argv, says):
    told = error(capsys, *argv.split())
    assert "unrecognized arguments: " in told
    assert f"; {says}" in told or says in told.partition("; ")[2]


def test_nothing_is_made_up(capsys):
    assert error(capsys, "info", "--zzz") == (
        "error: unrecognized arguments: --zzz; see `mtp-jax info --help`\n"
    )


def test_a_misspelt_command_names_the_nearest(capsys):
    assert "do you mean serve?" in error(capsys, "sevre")
    assert "do you mean sweep?" in error(capsys, "bench", "swep")


def test_what_other_engines_say_leads_to_flags_that_there_are():
    """Each entry names a flag of some command, and none of them is a flag itself there."""
    flags = {name: set(parser._option_string_actions) for name, parser in PARSERS.items()}
    sweep = PARSERS["bench"]._subparsers._group_actions[0].choices["sweep"]
    known = set().union(*flags.values(), sweep._option_string_actions)
    for names, meant in foreign._OPTIONS.items():
        assert {flag.partition(" ")[0] for flag in meant} <= known, names
        for name in names:
            with_it = [f for f in flags.values() if meant[0].partition(" ")[0] in f]
            assert all(foreign.advice(f"--{name}", f) for f in with_it if f"--{name}" not in f)


@pytest.mark.parametrize("name", ["generate", "batch", "chat", "serve", "info", "plan", "profile"])
def test_every_command_takes_its_model_by_an_option(name, capsys):
    paths = {"batch": ["in", "out"], "profile": ["--phase", "decode", "--out", "o"]}.get(name, [])
    parse = cli.make_parser().parse_args
    for argv in (["--model", "x"], ["x"]):
        assert str(parse([name, *paths, *argv]).model) == "x"
    assert "not allowed with" in error(capsys, name, *paths, "x", "--model", "y")
    if name != "profile":
        assert parse([name, *paths]).model is None
        assert parse([name, *paths, "--model", "demo"]).model == demo_model()


@pytest.mark.parametrize("name", ["convert", "export-nextn"])
@pytest.mark.parametrize("argv", [["m", "o"], ["--model", "m", "o"], ["o", "--model=m"]])
def test_a_command_with_a_model_and_a_folder_takes_it_by_an_option(name, argv):
    args = cli.make_parser().parse_args([name, *argv])
    assert (args.model, args.out) == (Path("m"), Path("o"))


FILE = """\
model = "demo"
max-num-seqs = 4
no-prefix-cache = true
fixed-depth = false
mesh = "2x1"

[serve]
port = 9000
served_model_name = ["a", "b"]
allowed-host = "one,two"
max-num-seqs = 6

[generate]
temperature = 0.5
quiet = true
stop = ["x,y"]
"""


@pytest.fixture
def parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parses with a file of options."""
    (tmp_path / "own.toml").write_text(FILE)

    def parse(command: str, *argv: str, **environment: str) -> argparse.Namespace:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return cli.make_parser().parse_args([command, *argv, "--config", str(tmp_path / "own.toml")])

    return parse


def test_a_file_gives_options(parsed):
    args = parsed("serve")
    assert args.model == demo_model()
    assert given(args, LLMOptions) == {"max_num_seqs": 6, "prefix_cache": False, "mesh": (2, 1)}
    assert given(args, Settings) == {"port": 9000, "model_names": ("a", "b"), "allowed_hosts": ("one", "two")}
    args = parsed("generate")
    assert given(args, LLMOptions) == {"max_num_seqs": 4, "prefix_cache": False, "mesh": (2, 1)}
    assert given(args, SamplingParams) == {"temperature": 0.5, "stop": ("x,y",)}
    assert args.quiet


def test_the_environment_goes_before_the_file_and_the_command_line_before_both(parsed):
    told = {"MTP_JAX_MAX_NUM_SEQS": "3", "MTP_JAX_COMPILE_CACHE": "c", "MTP_JAX_PORT": "tcp://10.0.0.1:8000"}
    args = parsed("serve", **told)
    found = given(args, LLMOptions)
    assert (found["max_num_seqs"], found["compile_cache"], args.port) == (3, Path("c"), 9000)
    argv = ["m", "--max-num-seqs", "2", "--served-model-name", "c", "--no-compile-cache"]
    args = parsed("serve", *argv)
    found = given(args, LLMOptions)
    assert (args.model, found["max_num_seqs"], found["compile_cache"]) == (Path("m"), 2, None)
    assert args.model_names == ["c"]
    args = parsed("serve", MTP_JAX_NO_PREFIX_CACHE="0", MTP_JAX_MODEL="n", MTP_JAX_FIXED_DEPTH="yes")
    assert "prefix_cache" not in args
    assert (args.model, args.adaptive_depth) == (Path("n"), False)
    assert parsed("serve", "--model", "o").model == Path("o")


def test_the_environment_may_name_the_file(tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_text("max-num-seqs = 5\n")
    monkeypatch.setenv("MTP_JAX_CONFIG", str(tmp_path / "a.toml"))
    assert cli.make_parser().parse_args(["serve"]).max_num_seqs == 5


OF_KINDS: dict[type, str] = {int: "2", float: "0.5", bool: "1"}
VALUES = {"mesh": "1x2", "logit_bias": "1:2", "stop_token_ids": "1", "allowed_token_ids": "1"}
VALUES["chat_template_kwargs"] = "{}"


@pytest.mark.parametrize("cls", [LLMOptions, SamplingParams, Settings])
def test_every_declared_option_has_a_variable(cls, monkeypatch):
    command = "serve" if cls is Settings else "generate"
    for name, about in declared(cls).items():
        if about.flag is None or name in ("api_keys", "admin_key"):  # theirs have a meaning of their own
            continue
        value = VALUES.get(name) or (about.choices or (OF_KINDS.get(about.kind, "x"),))[0]
        monkeypatch.setenv(variable(flag_of(name, about)), value)
        assert name in given(cli.make_parser().parse_args([command]), cls), name
        monkeypatch.delenv(variable(flag_of(name, about)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_seq = 3", "max_num_seq is no option of serve for a file; do you mean max-num-seqs?"),
        ("tensor-parallel-size = 3", "use mesh 1xN"),
        ("max-num-seqs = 'x'", "'x' is not an integer"),
        ("max-num-seqs = true", "got True; write it as on the command line"),
        ("no-prefix-cache = 3", "is a switch: expected true or false, got 3"),
        ("dtype = 'int3'", "dtype in"),
        ("mesh = '2'", "is not DATAxMODEL"),
        ("serve = 3", "options of serve stand in a table, [serve]"),
        ("[serve", "is not TOML"),
        ("prompt = 'x'", "prompt is no option of serve"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, capsys, text, says):
    (tmp_path / "a.toml").write_text(text)
    assert says in error(capsys, "serve", "--config", str(tmp_path / "a.toml"))


def test_what_is_wrong_with_the_environment_is_one_line(capsys, monkeypatch):
    assert "--config /nowhere.toml: No such file" in error(capsys, "serve", "--config", "/nowhere.toml")
    monkeypatch.setenv("MTP_JAX_MAX_NUM_SEQS", "many")
    assert "MTP_JAX_MAX_NUM_SEQS of the environment: 'many' is not an integer" in error(capsys, "serve")
    monkeypatch.delenv("MTP_JAX_MAX_NUM_SEQS")
    monkeypatch.setenv("MTP_JAX_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("MTP_JAX_SERVICE_HOST", "10.0.0.1")
    cli.make_parser().parse_args(["serve"])
    assert capsys.readouterr().err == (
        "warning: MTP_JAX_MAX_NUM_SEQ is no option's variable; do you mean MTP_JAX_MAX_NUM_SEQS?\n"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, capsys, tmp_path):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("--max-num-seqs", "export-nextn", "--sampling-defaults"))
    if shell == "bash":
        file = tmp_path / "mtp-jax.bash"
        ask = """
        ask() { COMP_WORDS=(mtp-jax "$@"); COMP_CWORD=$#; _shtab_mtp_jax; echo "${COMPREPLY[@]}"; }
        ask serve --samp
        ask serve --sampling-defaults ""
        """
        file.write_text(script + ask)
        told = subprocess.run(["bash", file], capture_output=True, text=True, check=True).stdout
        assert told.split("\n")[:2] == ["--sampling-defaults", "model none"]
