"""Every option of `mtp-jax` has an effect, and wrong ones are answered with one line."""

import functools
import inspect
import io
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import mtp_jax.api.llm
from mtp_jax import LLM, SamplingParams
from mtp_jax.commands import cli, options
from mtp_jax.errors import RequestError
from mtp_jax.text.grammar import StructuredOutput
from tests import golden

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
    "--stop a --stop b": ("stop", ("a", "b")),
    "--stop-token-ids 4,5": ("stop_token_ids", (4, 5)),
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
    """--json-schema {"type":"null"}""": ("structured", StructuredOutput('{"type":"null"}')),
    "--json-object": ("structured", StructuredOutput(json_object=True)),
    "--regex [a-z]+": ("structured", StructuredOutput(regex="[a-z]+")),
    "--choice a --choice b": ("structured", StructuredOutput(choice=["a", "b"])),
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
    "--no-prefix-cache": ("prefix_cache", False),
    "--fixed-depth": ("adaptive_depth", False),
    "--kernels xla": ("kernels", "xla"),
    "--kv-cache-dtype fp8": ("kv_cache_dtype", "fp8"),
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


def test_a_coupled_verifier_decides_what_is_sampled_without_drafts_too(monkeypatch):
    given = opened_with(monkeypatch, "--num-speculative-tokens", "0", "--verifier", "coupled")
    assert (given["num_speculative_tokens"], given["verifier"]) == (0, "coupled")


def opened_with(monkeypatch, *argv, completions=3):
    seen = {}
    monkeypatch.setattr(mtp_jax.api.llm, "LLM", lambda model, **given: seen.update(given, model=model))
    options.open_llm(parse("-q", *argv), options.Silent(), completions)
    return seen


@pytest.mark.parametrize(("argv", "expected"), ENGINE.items())
def test_engine_options(argv, expected, monkeypatch):
    name, value = expected
    defaults = {n: p.default for n, p in inspect.signature(LLM).parameters.items()}
    given = opened_with(monkeypatch, *argv.split())
    got = dict(given[name].shape) if name == "mesh" else given[name]
    assert got == value
    assert value != (True if name == "adaptive_depth" else defaults[name])
    assert given["model"] == Path("m")


@pytest.mark.parametrize(("completions", "mesh", "slots"), [(1, "1x1", 1), (3, "2x1", 4), (50, "1x1", 8)])
def test_as_many_slots_as_completions(monkeypatch, completions, mesh, slots):
    assert opened_with(monkeypatch, "--mesh", mesh, completions=completions)["max_num_seqs"] == slots


def test_there_is_an_option_for_everything_and_a_test_for_every_option():
    sampling = {f.name for f in fields(SamplingParams)} - {"num_speculative_tokens", "output_kind"}
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


def test_an_empty_expression_is_one():
    assert options.sampling_params(parse("--regex", "")).structured == StructuredOutput(regex="")


def test_a_schema_may_come_from_a_file(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    params = options.sampling_params(parse("--json-schema", f"@{tmp_path}/schema.json"))
    assert params.structured == StructuredOutput('{"type": "integer"}')
    with pytest.raises(RequestError, match=r"--json-schema @nowhere.json: .*No such file"):
        options.sampling_params(parse("--json-schema", "@nowhere.json"))


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
    (
        ["generate", V3, "--num-speculative-tokens", 0, "--verifier", "block", "--temperature", 1, *IDS],
        "--verifier has no effect with --num-speculative-tokens 0",
    ),
    (
        ["serve", V3, "--port", 0, "--num-speculative-tokens", 0, "--fixed-depth", "-q"],
        "--fixed-depth has no effect with --num-speculative-tokens 0",
    ),
    (["generate", V3, "--json-schema", "", *QUIET], "the structured output is not valid"),
    (["generate", V3, "--include-stop-str-in-output", *IDS], "has no effect without --stop"),
    (
        ["generate", V3, "--lines", *IDS],
        "--lines splits -f FILE or standard input; leave out -p and --token-ids",
    ),
    (["generate", V3, "--runs", 2, *IDS], "--runs has no effect without --compare"),
    (["generate", V3, "--compare", "--runs", 0, *IDS], "'0' is not an integer of 1 or more"),
    (["generate", V3, "--compare", "--num-speculative-tokens", 0, *IDS], "--compare needs drafts"),
    (["generate", V3, "--compare", "-n", 2, *IDS], "--compare measures one completion"),
    (["generate", V3, "--compare", "--logprobs", 2, *IDS], "leave out --logprobs"),
    (
        ["generate", V3, "--num-speculative-tokens", 32, *QUIET],
        "num_speculative_tokens = 32; expected an integer from 0 to 31",
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
    (
        ["bench", "window", "--rounds", 0],
        "argument --rounds: '0' is not an integer of 1 or more; see `mtp-jax bench",
    ),
    (["bench", "acceptance", "--temperatures", "2,inf"], "--temperatures: '2,inf' is not a list of numbers"),
    (["bench", "soak", "--minutes", "nan"], "argument --minutes: 'nan' is not a number above 0"),
    (["profile", "--phase", "verify", "--steps", 0, "--out", "o"], "'0' is not an integer of 1 or more"),
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


def test_bytes_that_are_no_text_are_read_as_such(monkeypatch):
    """As `input` reads them in a chat, in locales where Python would raise an error."""
    stream = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdin", stream)
    assert cli.main(["version"]) == 0
    assert stream.readline() == "a\udcff\n"


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_an_empty_one(name, monkeypatch):
    """As after `<&-`, or under a supervisor that gives none: Python has None there."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, name, None)
        assert cli.main(["version"]) == 0
        assert cli.main(["generate", "no/model"]) == 2
        stream = getattr(sys, name)
        assert name != "stdin" or stream.read() == ""
        stream.close()
