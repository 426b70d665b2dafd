"""Options by other names, from a file, from the environment, and in the shell's completion."""

import argparse
import subprocess
from pathlib import Path

import pytest

from mtp_jax import foreign
from mtp_jax.api.demo import demo_model
from mtp_jax.api.options import LLMOptions
from mtp_jax.commands import cli
from mtp_jax.commands.configured import variable
from mtp_jax.commands.options import flag_of, given
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
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
        ("serve --speculative-config {}", "use --num-speculative-tokens K, and --draft-model DIR for a head"),
        ("serve --speculative-algorithm EAGLE3", "write --draft-model DIR for a head"),
        ("serve --enable-lora", "LoRA is not supported"),
        ("serve --lora-modules a=b", "LoRA is not supported"),
        ("generate --num_speculative_tokens 3", "write --num-speculative-tokens"),
        ("serve --max-running-requests 3", "use --max-num-seqs"),
        ("serve --ctx-size 100", "use --max-model-len"),
        ("serve --tool-call-parser glm45", "use --tool-parser"),
        ("serve --default-chat-template-kwargs {}", "use --chat-template-kwargs"),
        ("serve --trust-remote-code", "no code of a checkpoint is ever run"),
        ("serve --pipeline-parallel-size 2", "layers are not split"),
        ("serve --temperature 0.6", "requests say it"),
        ("serve --seed 0", "one without a seed gets a fresh one"),
        ("serve -c 100", "use --max-model-len"),
        ("serve --cpu-offload-gb 4", "all weights must fit the devices"),
        ("serve --kv-offloading-size 4", "use --host-cache-gib"),
        ("serve --enable-log-requests", "a line per request is logged"),
        ("serve --disable-uvicorn-access-log", "use --access-log off"),
        ("serve --slots", "GET /server_info and /metrics tell it"),
        ("serve --model-impl auto", "config.json says the family"),
        ("batch -i a -o b", "`mtp-jax batch IN OUT` takes its files without flags"),
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


LEFT_OUT = (
    "async-scheduling api-server-count enable-sleep-mode stream-interval limit-mm-per-prompt hf-overrides "
    "language-model-only chat-template-content-format structured-outputs-config "
    "enable-prompt-tokens-details tokenizer-mode"
)


def test_an_option_without_a_counterpart_gets_the_reason():
    flags = PARSERS["serve"]._option_string_actions
    for name in LEFT_OUT.split():
        assert foreign.advice(f"--{name}", flags).startswith(("leave it out: ", "edit config.json")), name


@pytest.mark.parametrize(
    ("option", "value", "meant"), [("kv_cache_dtype", "fp8_e4m3", "fp8"), ("dtype", "half", "bfloat16")]
)
def test_a_value_of_another_engine_leads_to_ours(option, value, meant, capsys, tmp_path):
    flag = f"--{option.replace('_', '-')}"
    assert f"there is no '{value}'; do you mean {meant}?" in error(capsys, "serve", flag, value)
    (file := tmp_path / "a.toml").write_text(f'{option} = "{value}"')
    assert f"do you mean {meant}?" in error(capsys, "serve", "--config", str(file))
    with pytest.raises(ConfigError, match=rf"{option} = '{value}'; expected .*; do you mean '{meant}'\?"):
        LLMOptions(**{option: value})


def test_nothing_is_made_up(capsys):
    assert error(capsys, "info", "--zzz") == (
        "error: unrecognized arguments: --zzz; see `mtp-jax info --help`\n"
    )


def test_a_line_end_in_an_argument_makes_no_second_line(capsys):
    assert "--a\\nb" in error(capsys, "info", "--a\nb")
    assert "there is" in error(capsys, "in\nfo") or "invalid choice" in error(capsys, "in\nfo")


def test_a_misspelt_command_names_the_nearest(capsys):
    assert "do you mean serve?" in error(capsys, "sevre")
    assert "do you mean sweep?" in error(capsys, "bench", "swep")


def test_what_other_engines_say_leads_to_flags_that_there_are():
    """Each entry names a flag of some command, or an argument in Python, and is no flag itself there."""
    flags = {name: set(parser._option_string_actions) for name, parser in PARSERS.items()}
    sweep = PARSERS["bench"]._subparsers._group_actions[0].choices["sweep"]
    known = set().union(*flags.values(), sweep._option_string_actions)
    known |= {f"--{name}" for name in declared(SamplingParams)}
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
        (
            "[server]\nport = 9001",
            "[server] is no command that takes options from a file; do you mean [serve]?",
        ),
        ("server.port = 9001", "do you mean [serve]?"),
        (
            "[info]\njson = true",
            "[info] is no command that takes options from a file; there are batch, chat,",
        ),
        ("[serve.engine]\nport = 1", "engine is no option of serve"),
        ("[[serve]]\nport = 1", "options of serve stand in a table, [serve]"),
        ("mesh = " + "[" * 5000 + "]" * 5000, "nests too deeply"),
        ("mesh = " + "[" * 200 + "]" * 200, "is not DATAxMODEL"),
        ("max-num-seqs = " + "9" * 5000, "is not TOML: Exceeds the limit"),
        ("max-num-seqs = 0x" + "f" * 5000, "a number of thousands of digits"),
        ("mesh = [[0x" + "f" * 5000 + "]]", "a number of thousands of digits"),
        ("no-prefix-cache = 0x" + "f" * 5000, "a number of thousands of digits"),
        ("serve = 0x" + "f" * 5000, "options of serve stand in a table"),
        ("x" * 10**6 + " = 1", "is no option of serve"),
        ("mesh = '" + "x" * 10**6 + "'", "is not DATAxMODEL"),
        ("['" + "x" * 10**6 + "']", "is no command"),
        ('"a\\nb" = 1', "a\\nb is no option of serve"),
        ('"a\\u2028b" = 1', "a\\u2028b is no option of serve"),
        ('host = "a\\u0000b"', "host in"),
        ('allowed-host = ["a\\u0000b"]', "got text with a NUL"),
        ("port = 1979-05-27", "is not an integer"),
        ("port = inf", "'inf' is not an integer"),
        ("served-model-name = [{a = 1}]", "got {'a': 1}; write it as on the command line"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, capsys, text, says):
    (tmp_path / "a.toml").write_text(text)
    told = error(capsys, "serve", "--config", str(tmp_path / "a.toml"))
    assert says in told
    assert len(told) < 600 + len(str(tmp_path))


def test_what_is_wrong_with_the_environment_is_one_line(capsys, monkeypatch):
    assert "--config /nowhere.toml: No such file" in error(capsys, "serve", "--config", "/nowhere.toml")
    assert "~nobody-of-this-name/a: No such file" in error(
        capsys, "serve", "--config", "~nobody-of-this-name/a"
    )
    monkeypatch.setenv("MTP_JAX_MAX_NUM_SEQS", "many")
    assert "MTP_JAX_MAX_NUM_SEQS of the environment: 'many' is not an integer" in error(capsys, "serve")
    monkeypatch.delenv("MTP_JAX_MAX_NUM_SEQS")
    monkeypatch.setenv("MTP_JAX_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("MTP_JAX_SERVICE_HOST", "10.0.0.1")
    cli.make_parser().parse_args(["serve"])
    assert capsys.readouterr().err == (
        "warning: MTP_JAX_MAX_NUM_SEQ is no option's variable; do you mean MTP_JAX_MAX_NUM_SEQS?\n"
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1e5", 100_000), ("1.5K", 1536), ("2m", 2 * 10**6)],
)
def test_a_length_may_be_written_as_other_servers_take_it(tmp_path, text, count):
    parse = cli.make_parser().parse_args
    assert parse(["serve", "--max-model-len", text]).max_model_len == count
    (tmp_path / "a.toml").write_text(f"max-model-len = {text if text in ('4096', '1e5') else repr(text)}")
    assert parse(["serve", "--config", str(tmp_path / "a.toml")]).max_model_len == count


@pytest.mark.parametrize("text", ["4q", "k", "", "1.5", "inf", "nan", "infk", "1e400", "9" * 5000, "0x10"])
def test_what_is_no_length_is_said_in_our_words(capsys, text):
    assert "is not an integer; write 4096, 4K, 4k for 4000, or 1e5" in error(
        capsys, "serve", "--max-model-len", text
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
