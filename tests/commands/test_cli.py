"""`mtp-jax`, in this process and on a small checkpoint."""

import functools
import io
import json
import re
import shutil
import signal
import sys
from dataclasses import replace

import pytest

import mtp_jax.api.llm
from mtp_jax import LLM, Thoughts, demo_model
from mtp_jax.api.outputs import CompletionOutput, RequestOutput, Timing
from mtp_jax.commands import cli, show
from mtp_jax.commands.compare import PlainSteps
from mtp_jax.engine.speculation import Speculation
from tests import golden, tiny_tokenizer
from tests.models import RATES

pytestmark = pytest.mark.usefixtures("shared_programs")

SIZES = ["--max-model-len", "96", "--page-size", "16", "--prefill-chunk", "16", "--max-num-seqs", "2"]
SIZES += ["--no-compile-cache", "--ignore-eos", "--fixed-depth"]
EXPECTED = golden.expected("rigged")
PROMPT = EXPECTED["input_ids"].tolist()
IDS = ",".join(map(str, PROMPT))
GREEDY = EXPECTED["greedy_ids"].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A golden checkpoint with a tokenizer."""
    return tiny_tokenizer.model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def opened():
    """LLM, but equal options give the same object, with what it has compiled."""
    return functools.cache(lambda model, given: LLM(model, **dict(given)))


@pytest.fixture
def run_with(monkeypatch, capsys, opened):
    """Makes what runs the command line; it gives (exit status, standard output, standard error)."""

    def run_with(**more):
        def open_llm(model, reporter, **given):
            return opened(model, tuple(sorted((given | more).items())))

        monkeypatch.setattr(mtp_jax.api.llm, "LLM", open_llm)

        def run(*argv, stdin=""):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
            status = cli.main([str(a) for a in argv])
            return (status, *capsys.readouterr())

        return run

    return run_with


@pytest.fixture
def run(run_with):
    """Runs the command line with a simulated model."""
    return run_with(simulate=RATES)


@pytest.fixture
def run_weights(run_with):
    """Runs it with the checkpoint's weights."""
    return run_with()


def test_generate_streams_ids_without_a_tokenizer(run_weights, monkeypatch):
    pieces = []
    monkeypatch.setattr(show, "write", lambda text, **_: pieces.append(text))
    status, _, err = run_weights(
        "generate", golden.model_dir("rigged"), "--token-ids", IDS, "--max-tokens", 24, *SIZES
    )
    assert status == 0
    assert "".join(pieces) == " ".join(map(str, GREEDY)) + " \n"
    assert len(pieces) > 5
    accepted = EXPECTED["spec_accept.3"].tolist()
    length = sum(accepted) / len(accepted) + 1
    *_, ready, numbers = err.splitlines()
    assert ready.endswith("3 layers and 1 NextN layer in float32, depth 3, cache for 224 tokens, 2 at a time")
    assert numbers.startswith("24 tokens (length), first after ")
    assert "tokens/s" in numbers
    assert f"acceptance length {length:.2f}, drafts accepted " in numbers


def test_generate_prints_text(run, model):
    status, out, err = run("generate", model, "-p", "def f", "--max-tokens", 24, "-q", *SIZES)
    from_stdin = run("generate", model, "--max-tokens", 24, "-q", *SIZES, stdin="def f\n")
    assert (status, err) == (0, "")
    assert len(out) > 24
    assert from_stdin == (status, out, err)


def test_generate_from_a_file(run, model, tmp_path):
    (tmp_path / "prompt").write_bytes(b"def f\r\n")
    from_file = run("generate", model, "-f", tmp_path / "prompt", "--max-tokens", 24, "-q", *SIZES)
    assert from_file == run("generate", model, "-p", "def f", "--max-tokens", 24, "-q", *SIZES)
    assert from_file == run("generate", model, "-f", "-", "--max-tokens", 24, "-q", *SIZES, stdin="def f")


def test_json(run_weights, model):
    status, out, err = run_weights(
        "generate", model, "--token-ids", IDS, "--max-tokens", 24, "--json", *SIZES
    )
    result = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert result["prompt"] is None
    assert result["prompt_token_ids"] == PROMPT
    (completion,) = result["outputs"]
    assert completion["token_ids"] == GREEDY
    assert completion["finish_reason"] == "length"
    assert len(completion["text"]) >= 24
    accepted = EXPECTED["spec_accept.3"].tolist()
    assert result["speculation"]["accepted"] == sum(accepted)
    assert result["speculation"]["steps"] == len(accepted)
    assert result["speculation"]["accepted_per_position"] == [sum(a > i for a in accepted) for i in range(3)]
    assert 0 < result["seconds"]["first_token"] < result["seconds"]["finished"]
    assert "24 tokens of 1 completions" in err


SCORES = ["--token-ids", IDS, "--max-tokens", 24, "--logprobs", 2, "--prompt-logprobs", 1, "-q", *SIZES]


def test_json_with_scores(run, model):
    _, out, _ = run("generate", model, "--json", *SCORES)
    result = json.loads(out)
    tokens = result["outputs"][0]["token_ids"]
    assert [row[0]["token_id"] for row in result["outputs"][0]["logprobs"]] == tokens
    assert all(2 <= len(row) <= 3 for row in result["outputs"][0]["logprobs"])
    assert result["outputs"][0]["logprobs"][0][0]["rank"] == 1
    assert result["prompt_logprobs"][0] is None
    assert [row[0]["token_id"] for row in result["prompt_logprobs"][1:]] == PROMPT[1:]


def test_scores_are_printed(run, model):
    _, out, _ = run("generate", model, *SCORES)
    first = json.loads(run("generate", model, "--json", *SCORES)[1])["outputs"][0]["token_ids"][0]
    text, prompt, output = out.split("\nprompt:\n")[0], *out.split("\nprompt:\n")[1].split("\noutput:\n")
    assert len(text) >= 24
    assert len(prompt.splitlines()) == len(PROMPT) - 1
    assert len(output.splitlines()) == 24
    assert f"rank 1      {first} '" in output.splitlines()[0]
    assert "  |  " in output.splitlines()[0]


def test_every_line_a_prompt_results_in_order(run, model):
    lines = ["def f", "x = 1", "if y:"]
    argv = ["generate", model, "--lines", "--max-tokens", 24, "-q", *SIZES]
    _, out, _ = run(*argv, "--json", stdin="\n".join(lines) + "\n")
    results = [json.loads(line) for line in out.splitlines()]
    assert [r["prompt"] for r in results] == lines
    alone = run("generate", model, "-p", lines[1], "--max-tokens", 24, "-q", *SIZES)[1]
    assert results[1]["outputs"][0]["text"] == alone.removesuffix("\n")
    _, plain, err = run(*argv, stdin="\r\n".join(lines))
    assert err == ""
    texts = "".join(f"==> prompt {i}\n{r['outputs'][0]['text']}\n" for i, r in enumerate(results, 1))
    assert plain == texts


def test_several_completions(run, model):
    options = ["-n", 2, "--temperature", 20, "--seed", 7, "--max-tokens", 8]
    status, out, err = run("generate", model, "--token-ids", IDS, *options, *SIZES)
    assert status == 0
    first, second = out.split("==> prompt 1, completion 1\n")[1].split("==> prompt 1, completion 2\n")
    assert first != second
    assert "16 tokens of 2 completions in " in err


def test_stop_text(run, model):
    whole = run("generate", model, "-p", "def f", "--max-tokens", 24, "-q", *SIZES)[1]
    stop = whole[8:10]
    argv = ["generate", model, "-p", "def f", "--max-tokens", 24, "-q", "--stop", stop, *SIZES]
    assert run(*argv)[1] == whole[: whole.index(stop)] + "\n"
    assert run(*argv, "--include-stop-str-in-output")[1] == whole[: whole.index(stop) + 2] + "\n"


def test_compare_needs_a_model_with_drafts(run_weights, model):
    undrafted = "--num-nextn-layers", 0, *SIZES
    status, _, error = run_weights("generate", model, "--token-ids", IDS, "--compare", *undrafted)
    assert (status, error.splitlines()[-1].partition(";")[0]) == (
        2,
        "error: --compare needs drafts to compare with none, and the model has no NextN layers",
    )


def test_compare(run, model):
    argv = ["generate", model, "--token-ids", IDS, "--max-tokens", 24, "--compare", "--runs", 2, *SIZES]
    status, out, _ = run(*argv)
    *text, blank, speed, why, end, counts = out.splitlines()
    assert status == 0
    assert len("\n".join(text)) >= 24
    assert blank == ""
    assert speed.startswith("depth 3: ")
    assert "| depth 0: " in speed
    assert re.search(r"\| \d+\.\d\dx \(.*\) of too few runs to tell, same tokens$", speed)
    assert end.startswith("end to end: ")
    assert re.fullmatch(
        r"a step's drafts save \d\.\d\d steps without drafts, and take as long as \d+\.\d\d of them", why
    )
    assert counts.startswith(
        "48 tokens, greedy, medians and quartiles of 2 alternating runs; drafts accepted "
    )

    options = ("--temperature", 0.8, "--seed", 3, "--verifier", "coupled")
    assert ", same tokens" in run(*argv, *options)[1]

    adaptive = [a for a in argv if a != "--fixed-depth"]
    speed = run(*adaptive)[1].splitlines()[-4]
    assert speed.startswith("depth 0 to 3: ")
    assert speed.endswith(", same tokens")

    status, out, _ = run(*argv, "--json")
    result = json.loads(out)
    assert status == 0
    assert result["same_tokens"] is True
    assert result["runs"] == 2
    assert (result["with"]["depth"], result["without"]["depth"]) == (3, 0)
    assert result["speedup"] > 0
    assert result["within_noise"] is True
    told = json.loads(run("generate", model, "--token-ids", IDS, "--max-tokens", 24, "--json", *SIZES)[1])
    assert result["output"]["outputs"][0]["token_ids"] == told["outputs"][0]["token_ids"]


@pytest.mark.parametrize(
    ("slower", "runs", "says"),
    [
        ((), 6, "| 2.00x (2.00-2.00), same tokens"),
        ((2, 9, 12), 15, "| 2.00x (2.00-2.00), same tokens"),
        ((2, 5, 9, 12), 15, "| the same within noise, 2.00x (1.25-2.00), same tokens"),
        (range(15), 6, "| 0.50x (0.50-0.50), same tokens"),
    ],
)
def test_compare_says_only_as_much_as_its_runs_show(run, model, monkeypatch, slower, runs, says):
    seen = []

    def rate(output):
        """The rates of the two sides by turns, however often they are asked for."""
        if all(output is not one for one in seen):
            seen.append(output)
        turn, plain = divmod(next(i for i, one in enumerate(seen) if one is output), 2)
        return 2.0 if plain else 1.0 if turn in slower else 4.0

    monkeypatch.setattr(show, "decode_rate", rate)
    monkeypatch.setattr(show, "stream", lambda *_: None)
    argv = ["generate", model, "--token-ids", IDS, "--max-tokens", 2, "--compare", *SIZES]
    status, out, _ = run(*argv)
    assert status == 0
    assert says in out
    assert f"medians and quartiles of {runs} alternating runs" in out


def test_compare_takes_prompts_and_seeds_by_turns(run, model, monkeypatch):
    done, generate = [], LLM.generate

    def watched(self, prompts, sampling_params):
        done.append((*prompts, sampling_params.seed, sampling_params.num_speculative_tokens))
        return generate(self, prompts, sampling_params)

    monkeypatch.setattr(LLM, "generate", watched)
    argv = ["generate", model, "--compare", "--lines", "--runs", 3, "--max-tokens", 8, "--temperature", 0.8]
    argv += ["--seed", 5, "--verifier", "coupled", *SIZES]
    status, out, _ = run(*argv, stdin="def f\nimport\n")
    assert status == 0
    turns = [("def f", 5), ("def f", 5), ("import", 6), ("def f", 7)]
    assert done == [(*turn, most) for turn in turns for most in (None, 0)]
    assert "24 tokens, temperature 0.8, seeds from 5 on, medians and quartiles of 3 " in out
    assert " alternating runs of 2 prompts" in out
    assert ", same tokens\n" in out


def timed(seconds: float, steps: int) -> RequestOutput:
    """An output with 40 tokens after the first, in these seconds and steps."""
    tokens, counts = [7] * 41, Speculation([40 // steps - 1] * steps, [3] * steps)
    completion = CompletionOutput(0, "", tokens, 41, "length", None, [""] * 41, [False] * 41, counts, seconds)
    return RequestOutput(None, [1], [completion], None, Timing(0.0, 1.0, 1.0 + seconds), 0, None)


@pytest.mark.parametrize(
    ("drafting", "says"),
    [
        # Ten steps of 4 tokens each, where a plain step takes a second.
        (20.0, "a step's drafts save 3.00 steps without drafts, and take as long as 1.00 of them"),
        (
            50.0,
            "no gain on this machine: a step's drafts save 3.00 steps without drafts, and take as long as "
            "4.00 of them; drafts pay where they save more than they cost",
        ),
    ],
)
def test_the_reason_of_a_gain_or_of_none(drafting, says):
    runs = [[timed(drafting, 10)] * 6, [timed(40.0, 40)] * 6]
    found = PlainSteps.of(runs)
    assert (found.tokens, found.cost) == (4.0, drafting / 10)
    assert found.tokens / found.cost == pytest.approx(40 / drafting)
    assert found.told([40 / drafting] * 6) == says
    assert found.told([2.0, 0.5] * 3).startswith("no gain beyond noise: a step's drafts save ")
    assert found.told([0.5] * 2).startswith("a step's drafts save ")


def test_failed_completions_are_told_and_the_status(run, model, monkeypatch):
    plain = LLM._outputs

    def failing(self, job):
        for output in plain(self, job):
            yield replace(output, outputs=[replace(c, finish_reason="error") for c in output.outputs])

    monkeypatch.setattr(LLM, "_outputs", failing)
    status, _, err = run("generate", model, "-p", "def f", "--max-tokens", 4, "-q", *SIZES)
    assert status == 1
    assert err.startswith("error: 1 of 1 completions failed: ")


def test_compare_prefills_in_every_run(run, model, monkeypatch):
    cached, generate = [], LLM.generate

    def watched(self, prompts, sampling_params=None):
        outputs = generate(self, prompts, sampling_params)
        cached.extend(o.cached_tokens for o in outputs)
        return outputs

    monkeypatch.setattr(LLM, "generate", watched)
    ids = ",".join(map(str, (PROMPT * 8)[:64]))
    argv = ["generate", model, "--token-ids", ids, "--max-tokens", 8, "--compare", "--runs", 1, *SIZES]
    assert run(*argv)[0] == 0
    assert cached == [0, 0, 0, 0]


def test_compare_looks_at_the_tokens_of_all_runs(run, model, monkeypatch):
    done, generate = [], LLM.generate

    def once_wrong(self, prompts, sampling_params=None):
        done.append(prompts)
        return generate(self, [[5, 6]] if len(done) == 3 else prompts, sampling_params)

    monkeypatch.setattr(LLM, "generate", once_wrong)
    argv = ["generate", model, "--token-ids", IDS, "--max-tokens", 24, "--compare", "--runs", 2, *SIZES]
    status, out, _ = run(*argv)
    assert status == 1
    assert "TOKENS DIFFER from number 0 on\n" in out


def test_compare_fails_if_tokens_differ(run, model, monkeypatch):
    generate = LLM.generate

    def wrong_without_drafts(self, prompts, sampling_params):
        plain = sampling_params.num_speculative_tokens == 0
        return generate(self, [[5, 6]] if plain else prompts, sampling_params)

    monkeypatch.setattr(LLM, "generate", wrong_without_drafts)
    argv = ["generate", model, "--token-ids", IDS, "--max-tokens", 24, "--compare", "--runs", 1, *SIZES]
    status, out, _ = run(*argv)
    assert status == 1
    assert "TOKENS DIFFER from number 0 on\n" in out
    assert json.loads(run(*argv, "--json")[1])["same_tokens"] is False


def chat(run, model, lines, *options):
    argv = ["chat", model, "--max-tokens", 24, *options, *SIZES]
    return run(*argv, stdin="".join(f"{line}\n" for line in lines))


@pytest.fixture
def prompts(monkeypatch):
    """Every prompt that reaches the model, decoded."""
    seen = []
    stream = LLM.stream
    monkeypatch.setattr(
        LLM, "stream", lambda self, ids, p: (seen.append(self.tokenizer.decode(ids)), stream(self, ids, p))[1]
    )
    return seen


def test_chat_remembers_and_forgets(run, model, prompts):
    status, out, err = chat(
        run, model, ["hi", "", "/system be brief", "a", "/reset", "b", "/what", "/exit", "c"]
    )
    assert status == 0
    assert len(out.splitlines()) >= 3
    assert err.count("tokens/s, acceptance length") == 3
    assert err.count("/exit ends") == 2
    assert prompts == [
        "user: hi\nassistant:",
        "system: be brief\nuser: a\nassistant:",
        "system: be brief\nuser: b\nassistant:",
    ]


def test_chat_answers_become_part_of_the_prompt(run, model, prompts):
    _, out, err = chat(run, model, ["a", "b"], "-q", "--system", "s", "--max-tokens", 3)
    assert err == ""
    assert prompts[1].startswith("system: s\nuser: a\nassistant: ")
    assert prompts[1].endswith("\nuser: b\nassistant:")
    answer = prompts[1].removeprefix("system: s\nuser: a\nassistant: ").removesuffix("\nuser: b\nassistant:")
    assert out.startswith(answer)


def test_chat_forgets_what_was_thought(run, model, prompts, monkeypatch):
    monkeypatch.setattr(Thoughts, "OPEN", "assistant:")
    chat(run, model, ["a", "b"], "-q", "--max-tokens", 3)
    assert prompts[1] == "user: a\nassistant: \nuser: b\nassistant:"  # it never ended


def test_ctrl_c_stops_one_answer(run, model, monkeypatch):
    write = show.write
    pressed = []

    def press_once(text, **more):
        write(text, **more)
        if not pressed:
            pressed.append(text)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(show, "write", press_once)
    # A background job starts with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status, _, err = chat(run, model, ["a", "a"])
        handler = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    first, second = [line for line in err.splitlines() if line.startswith("[")]
    assert status == 0
    assert "(stopped)" in first
    assert "[24 tokens (length)" in second
    assert handler is signal.default_int_handler


def test_a_chat_that_is_too_long_goes_on(run, model):
    status, _, err = chat(run, model, ["a" * 96, "b"], "--max-tokens", 3)
    assert status == 0
    assert "raise max_model_len = 96; /reset starts anew" in err
    assert "[3 tokens (length)" in err


def test_chat_says_what_the_demo_model_answers(run, model, tmp_path):
    assert "Try: " not in run("chat", model, *SIZES, stdin="/exit\n")[2]
    introduced = shutil.copytree(model, tmp_path / "model")
    shutil.copy(demo_model() / "introduction.json", introduced)
    status, _, err = run("chat", introduced, *SIZES, stdin="/exit\n")
    assert status == 0
    assert "The demo model answers with short Python functions" in err
    assert "Try: Set the value of an option." in err


def test_chat_needs_a_template(run, model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    tiny_tokenizer.write(tmp_path / "model", 160, template=None)
    assert run("chat", tmp_path / "model", *SIZES)[::2] == (
        2,
        f"error: {tmp_path}/model has no chat template, so it cannot chat; use `mtp-jax generate`\n",
    )
