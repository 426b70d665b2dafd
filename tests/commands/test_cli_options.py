"""Every option of `mtp-jax` has an effect, and wrong ones are answered with one line."""

import functools
import io
import logging
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtp_jax.api.llm
from mtp_jax import LLM, SamplingParams, Terminal
from mtp_jax.api.admission import QueueLimits
from mtp_jax.api.options import LLMOptions
from mtp_jax.cluster.handover.options import HandoverOptions
from mtp_jax.cluster.on_ray.options import RayOptions
from mtp_jax.commands import cli, options
from mtp_jax.commands.flags import log_in_flags
from mtp_jax.commands.parser import Parser
from mtp_jax.errors import RequestError
from mtp_jax.hosts.options import Hosts
from mtp_jax.options import declared
from mtp_jax.text.grammar import StructuredOutput
from serve.base.settings import Settings
from tests import golden

V3 = golden.model_dir("v3")
OF_SERVERS = (Settings, QueueLimits, HandoverOptions, Hosts, RayOptions)

# What a flag is given, and what its field then is, where the kind of the option does not say it.
GIVEN = {
    "mesh": ("2x1", {"data": 2, "model": 1}),
    "synthetic_acceptance": ("1,0.5", (1.0, 0.5)),
    "stop": ("a", ("a",)),
    "stop_token_ids": ("4,5", (4, 5)),
    "logit_bias": ("7:2.5,8:-1", {7: 2.5, 8: -1.0}),
    "chat_template_kwargs": ('{"a": [1]}', {"a": [1]}),
    "api_keys": ("k", ("k",)),
    "model_names": ("m", ("m",)),
    "allowed_hosts": ("h", ("h",)),
    "allowed_origins": ("http://h", ("http://h",)),
    "peers": ("h:1,g:2", ("h:1", "g:2")),
    "allowed_token_ids": ("3,4", (3, 4)),
    "bad_words": ("h", ("h",)),
    "tree": ("4x3x12", "4x3x12"),
    "draft_vocab": ("5", 5),
}
MEMORY = ("--host-cache-gib", "1")
# Options that an option needs beside it.
BESIDE = {
    "suffix_store": ["--suffix-drafts"],
    "file_cache": (*MEMORY, "--file-cache-gib", "1"),
    "file_cache_gib": (*MEMORY, "--file-cache", "x"),
    "file_cache_seconds": (*MEMORY, "--file-cache", "x", "--file-cache-gib", "1"),
}


def flags(cls):
    """(name, option) of every option of a dataclass that has a flag."""
    return [pytest.param(n, o, id=n) for n, o in declared(cls).items() if o.flag is not None]


def example(name, option):
    """Arguments that change an option, and its value then: another than the default."""
    flag = options.flag_of(name, option)
    if option.kind is bool:
        return [flag], option.off is None
    if name in GIVEN:
        return [flag, GIVEN[name][0]], GIVEN[name][1]
    if option.choices:
        value = next(c for c in option.choices if c != option.default)
    elif option.kind in (int, float):
        value = option.kind(next(v for v in (1, 2, 0.5) if option.allows(v) and v != option.default))
    else:
        value = option.kind("x")
    return [flag, str(value)], value


# Nothing here gives options by a file or the environment, which a parser would remember.
PARSER = functools.cache(cli.make_parser)


def parse(*argv):
    return PARSER().parse_args(["generate", "m", "-p", "x", *argv])


@pytest.mark.parametrize(("name", "option"), flags(SamplingParams))
def test_sampling_options(name, option):
    argv, value = example(name, option)
    more = {"include_stop_str_in_output": ["--stop", "a"]}.get(name, [])
    more += ["--temperature", "1"] * (name in ("top_p", "top_k", "min_p", "seed"))
    params = options.sampling_params(parse(*argv, *more))
    assert getattr(params, name) == value
    assert getattr(options.sampling_params(parse()), name) != value


@pytest.mark.parametrize(
    ("argv", "structured"),
    [
        (["--json-schema", '{"type":"null"}'], StructuredOutput('{"type":"null"}')),
        (["--json-object"], StructuredOutput(json_object=True)),
        (["--regex", "[a-z]+"], StructuredOutput(regex="[a-z]+")),
        (["--choice", "a", "--choice", "b"], StructuredOutput(choice=["a", "b"])),
    ],
)
def test_structured_output(argv, structured):
    assert options.sampling_params(parse(*argv)).structured == structured


def test_some_options_may_be_repeated():
    assert options.sampling_params(parse("--stop", "a", "--stop", "b")).stop == ("a", "b")
    assert options.sampling_params(parse("-n", "2")).n == 2


def test_a_coupled_verifier_decides_what_is_sampled_without_drafts_too(monkeypatch):
    given = opened_with(monkeypatch, "--num-speculative-tokens", "0", "--verifier", "coupled")
    assert (given["num_speculative_tokens"], given["verifier"]) == (0, "coupled")


def opened_with(monkeypatch, *argv, completions=3):
    seen = {}
    monkeypatch.setattr(mtp_jax.api.llm, "LLM", lambda model, **given: seen.update(given, model=model))
    monkeypatch.setattr(options, "adopted", lambda given: given)  # nor one of programs
    for name in ("model_dir", "check_model"):  # there is no folder
        monkeypatch.setattr(options, name, lambda *given: None)
    options.open_llm(parse("-q", *argv), options.Silent(), completions)
    return seen


@pytest.mark.parametrize(("name", "option"), flags(LLMOptions))
def test_engine_options(name, option, monkeypatch):
    argv, value = example(name, option)
    given = opened_with(monkeypatch, *argv, *BESIDE.get(name, ()), "--temperature", "1")
    assert (dict(given[name].shape) if name == "mesh" else given[name]) == value
    assert given["model"] == Path("m")
    if name not in ("adaptive_depth", "max_num_seqs"):  # for which the command has defaults of its own
        assert name not in opened_with(monkeypatch)
        assert value != option.default


def test_no_compile_cache(monkeypatch):
    assert opened_with(monkeypatch, "--no-compile-cache")["compile_cache"] is None


def test_depth_is_adaptive_unless_it_is_fixed(monkeypatch):
    assert opened_with(monkeypatch)["adaptive_depth"] is True


@pytest.mark.parametrize(("name", "option"), [option for cls in OF_SERVERS for option in flags(cls)])
def test_server_options(name, option):
    argv, value = example(name, option)
    args = PARSER().parse_args(["serve", *argv])
    for cls in (c for c in OF_SERVERS if name in declared(c)):
        assert options.given(args, cls) == {name: value}


def test_a_batch_gives_variables_to_the_template():
    args = PARSER().parse_args(["batch", "in", "out", "--chat-template-kwargs", '{"thinking": true}'])
    assert options.chosen(args, Settings, model_names="m").chat_template_kwargs == {"thinking": True}


@pytest.mark.parametrize(("completions", "mesh", "slots"), [(1, "1x1", 1), (3, "2x1", 4), (50, "1x1", None)])
def test_as_many_slots_as_completions(monkeypatch, completions, mesh, slots):
    assert opened_with(monkeypatch, "--mesh", mesh, completions=completions).get("max_num_seqs") == slots


def test_every_option_has_one_flag_and_every_flag_is_an_option_or_tested_elsewhere():
    """The others' effects are what test_cli.py tests."""
    own = "--model --config --prompt --file --token-ids --lines --json --compare --runs --quiet --help"
    own += " --json-schema --json-object --regex --choice --no-compile-cache --revision"
    commands = [a.choices for a in cli.make_parser()._actions if isinstance(a.choices, dict)]
    shown = [a.option_strings for a in commands[0]["generate"]._actions if a.option_strings]
    found = sorted(next(f for f in flags if f.startswith("--")) for flags in shown)
    both = [(n, o) for cls in (LLMOptions, SamplingParams, Hosts) for n, o in declared(cls).items()]
    assert found == sorted([*own.split(), *(options.flag_of(n, o) for n, o in both if o.flag is not None)])


def test_defaults():
    params = options.sampling_params(parse())
    assert params == SamplingParams(temperature=0, max_tokens=128)


def test_an_empty_expression_is_one():
    assert options.sampling_params(parse("--regex", "")).structured == StructuredOutput(regex="")


def test_a_schema_may_come_from_a_file(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    params = options.sampling_params(parse("--json-schema", f"@{tmp_path}/schema.json"))
    assert params.structured == StructuredOutput('{"type": "integer"}')
    with pytest.raises(RequestError, match=r"--json-schema @nowhere\.json cannot be read: No such file"):
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
        "argument --max-tokens: 'x' is not an integer; write 4096, 4K, 4k for 4000, or 1e5; see `mtp-jax gen",
    ),
    (["generate", V3, "-p", "x", *IDS], "argument --token-ids: not allowed with argument -p/--prompt"),
    (["generate", V3, "--token-ids", "1,x"], "'1,x' is not a list of integers; write 1,2,3"),
    (["generate", V3, "--mesh", "8", *IDS], "'8' is not DATAxMODEL; write 2x4 for eight devices"),
    (["generate", V3, "--mesh", "0x1", *IDS], "'0x1' is not DATAxMODEL"),
    (
        ["serve", "--chat-template-kwargs", "[1]"],
        "'[1]' is not a JSON object; write '{\"enable_thinking\": false}'",
    ),
    (
        ["serve", "--chat-template-kwargs", '{"tools": 1}'],
        "--chat-template-kwargs has tools, which the server sets",
    ),
    (["generate", V3, "--logit-bias", "3", *IDS], "'3' is not ID:BIAS,...; write 17:2.5,4:-100"),
    (["generate", V3, "--compile-cache", "c", "--no-compile-cache", *IDS], "not allowed with argument"),
    (["generate", V3, "--dtype", "int4", *IDS], "invalid choice: 'int4'"),
    (["generate", "deepseek-ai/DeepSeek-V3", *IDS], "the cache of the hub does not have all of deepseek"),
    (["generate", "nowhere", *IDS], "nowhere is not a directory; name one with config.json and safetensors"),
    (
        ["generate", V3, "-p", "x"],
        "v3/model has no tokenizer.json or tiktoken.model; give --token-ids, and no --stop",
    ),
    (
        ["generate", V3, "--stop", "x", *IDS],
        "has no tokenizer.json or tiktoken.model; give --token-ids, and no --stop",
    ),
    (["generate", V3, "--temperature", -1, *IDS], "--temperature -1.0; expected a number from 0"),
    (["generate", V3, "--max-tokens", 0, *IDS], "--max-tokens 0; expected an integer from 1"),
    (
        ["generate", V3, "--top-p", 0.5, *IDS],
        "--top-p has no effect with --temperature 0; raise that, or leave",
    ),
    (["generate", V3, "--seed", 1, *IDS], "--seed has no effect with --temperature 0"),
    (["generate", V3, "--verifier", "block", *IDS], "--verifier has no effect with --temperature 0"),
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
    (
        ["serve", V3, "--cpus", 2, "--routing", "even"],
        "--cpus, --routing without effect on this process alone; add",
    ),
    (
        ["batch", "i", "o", "--min-replicas", 2],
        "--min-replicas without effect on this process alone; add --ray",
    ),
    (["generate", V3, "--json-schema", "", *QUIET], "the structured output is not valid"),
    (["generate", V3, "--include-stop-str-in-output", *IDS], "has no effect without --stop"),
    (
        ["generate", V3, "--host-cache-gib", 4, "--no-prefix-cache", *IDS],
        "--host-cache-gib 4.0 with --no-prefix-cache: without prefixes no pages are kept; leave one of",
    ),
    (
        ["generate", V3, "--file-cache", "/srv/pages", "--file-cache-gib", 1, *IDS],
        "--file-cache /srv/pages with --host-cache-gib 0.0: pages pass through the host's memory; give both",
    ),
    (
        ["generate", V3, "--file-cache", "/srv/pages", "--host-cache-gib", 1, *IDS],
        "--file-cache /srv/pages with no --file-cache-gib: files take room; give both, or neither",
    ),
    (
        ["generate", V3, "--file-cache-gib", 1, "--host-cache-gib", 1, *IDS],
        "--file-cache-gib 1.0 with no --file-cache: it is the size of that folder; give both, or neither",
    ),
    (
        ["generate", V3, "--file-cache", "/srv", "--file-cache-gib", 0, "--host-cache-gib", 1, *IDS],
        "--file-cache-gib 0.0; expected a number above 0",
    ),
    (
        ["generate", V3, "--file-cache", __file__, "--file-cache-gib", 1, "--host-cache-gib", 1, *IDS],
        "test_cli_options.py is no folder; name another",
    ),
    (
        ["generate", V3, "--adaptive-verification", *IDS],
        "--adaptive-verification with --max-num-seqs 1: a step chooses among the drafts of several rows; "
        "take --max-num-seqs 2 or more, or leave the other out",
    ),
    (
        ["serve", V3, "--port", 0, "--simulate", "0.5", "--mesh", "1x2"],
        "--mesh with --simulate: a simulated model has no weights and no devices; leave one of them out",
    ),
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
        "--num-speculative-tokens 32; expected an integer from 0 to 31",
    ),
    (
        ["generate", V3, "--max-model-len", 9999, *QUIET],
        "the model's positions end at 2560",
    ),
    (["generate", V3, "--mesh", "9x9", *QUIET], "vocab = 160 does not divide over 9 devices"),
    (
        ["chat", V3],
        "v3/model has no tokenizer.json or tiktoken.model, so it cannot chat; use `mtp-jax generate`",
    ),
    (["chat", V3, "--logprobs", 2], "unrecognized arguments: --logprobs 2"),
    (["info", "nowhere"], "nowhere is not a directory"),
    (["compile", "--out", __file__], "is a file; name a folder"),
    (["compile", "--out", "o", "--programs", "p"], "unrecognized arguments: --programs"),
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
    (["bench", "serve", "URL", "--timeout", "nan"], "argument --timeout: 'nan' is not a number above 0"),
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
        (",".join("3" * 8), "shorten the prompt, or raise --max-model-len"),
    ):
        err = failing(capsys, monkeypatch, *argv, "--token-ids", ids)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err


def test_input_that_cannot_be_read(capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
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


def test_sampling_that_was_given_is_not_said_to_be_the_models(capsys):
    """The embedded model's own temperature is 0.3; `make demo` gives another."""
    llm = LLM(simulate=(0.5,), max_model_len=64)
    options.ready(Terminal(), llm, Namespace())
    options.ready(Terminal(), llm, Namespace(temperature=0.5))
    usual, given = capsys.readouterr().err.splitlines()
    assert "temperature 0.3 unless given" in usual
    assert "temperature" not in given


def commands() -> Iterator[tuple[str, Parser]]:
    """Every command and command of a command, by its whole name."""
    waiting = [("", cli.make_parser())]
    while waiting:
        name, parser = waiting.pop()
        choices = next((a.choices for a in parser._actions if isinstance(a.choices, dict)), {})
        waiting += [(f"{name} {word}".strip(), sub) for word, sub in choices.items()]
        yield name, parser


def test_help_names_flags_and_readable_placeholders():
    for name, parser in commands():
        told = parser.format_help()
        named = [a for a in parser.flags if "_" in a and re.search(rf"(?<![\w.{{]){a}\b(?!\.\w)", told)]
        assert not named, name
        with_values = [a for a in parser._actions if a.option_strings and a.nargs != 0]
        unnamed = [a for a in with_values if not (a.choices or a.metavar) and "_" in a.dest]
        assert not unnamed, (name, unnamed)


def test_the_log_names_flags(caplog):
    before = logging.getLogRecordFactory()
    try:
        log_in_flags(lambda: {"draft_model": "--draft-model"})
        logging.getLogger("mtp_jax.api").warning("%s of draft_model", "a head")
        logging.getLogger("other").warning("draft_model")
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages == ["a head of --draft-model", "draft_model"]
