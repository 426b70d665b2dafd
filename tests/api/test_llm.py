"""The Python API, on a checkpoint whose numbers another implementation computed."""

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from copy import copy
from dataclasses import replace
from typing import Any, get_origin

import numpy as np
import pytest

import mtp_jax
from mtp_jax import LLM, CheckpointError, ConfigError, RequestError, SamplingParams
from mtp_jax.api import load
from mtp_jax.decode.keys import StepKey
from mtp_jax.model.draft_vocab import FILE, write
from mtp_jax.text.chat_template import ChatTemplate
from tests import golden
from tests.api.helpers import GREEDY, PROMPT, SCORED, SIZES, tokens
from tests.checkpoint.files import drop_nextn, edit_tensors
from tests.models import RATES

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def llm(directory):
    """Most of the API needs no weights."""
    return LLM(directory, **SIZES, simulate=RATES)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """After every test all pages are free and no request lives."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        assert not engine.scheduler.busy
        assert engine.stats().pages_used == 0


def test_a_notebook_shows_which_engine_it_is(llm, directory):
    facts = "dtype=float32, drafter=1 NextN, depth=3, slots=2"
    assert repr(llm) == f"LLM({str(directory)!r}, {facts})"
    plain = LLM(directory, **{**SIZES, "num_speculative_tokens": 0}, simulate=RATES)
    assert "drafter=None, depth=0, slots=2" in repr(plain)


WRONG_CHATS: list[tuple[Any, str]] = [
    ("a", "messages = 'a'; expected a list of objects with role and content"),
    (5, "messages = 5; expected a list"),
    (["a"], "messages = 'a'; expected a list"),
    ([{"role": "user", "content": "a"}, "b"], r"messages\[1\] = 'b'; messages are a list of objects"),
    ([{"content": "a"}], r"messages\[0\]: role = None; expected a string"),
    ([{"role": "user"}], r"messages\[0\]: content: a message needs text"),
    ([{"role": "user", "content": 5}], r"content = 5; expected a string, or a list of text parts"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] = .*; only text is read"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "tool_calls holds .* JSON text"),
]


def test_chat_renders_the_template_and_generates(llm, monkeypatch):
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ messages[-1].content }}{{ mood }}"
    )
    with_template = copy(llm.tokenizer)
    with_template._template = ChatTemplate(template)
    monkeypatch.setattr(llm, "tokenizer", with_template)
    turn, tool = {"role": "user", "content": "ab"}, {"type": "function", "function": {"name": "f"}}
    (one,) = llm.chat([turn], GREEDY, tools=[tool], chat_template_kwargs={"mood": "!"})
    (same,) = llm.generate([llm.tokenizer.encode("[f]ab!", add_special_tokens=False)], GREEDY)
    assert tokens(one) == tokens(same)
    assert one.speculation.accepted > 0
    assert [tokens(o) for o in llm.chat([[turn], [turn]], GREEDY)] == [
        tokens(o) for o in llm.generate([llm.tokenizer.encode("ab", add_special_tokens=False)] * 2, GREEDY)
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (joined,), (whole,) = llm.chat([{"role": "user", "content": parts}], GREEDY), llm.chat([turn], GREEDY)
    assert joined.prompt_token_ids == whole.prompt_token_ids
    for wrong, message in WRONG_CHATS:
        with pytest.raises(RequestError, match=message):
            llm.chat(wrong)
    with pytest.raises(RequestError, match="chat_template_kwargs = 5; expected a dictionary"):
        llm.chat([turn], chat_template_kwargs=5)
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(RequestError, match="token ids"):
        llm.chat([turn])


def test_order_is_kept_for_mixed_prompts_with_params_of_their_own(llm):
    prompts = ["def f", PROMPT, "x", [5, 6, 7]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 3, 6, 1)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == ["def f", None, "x", None]
    assert [o.prompt_token_ids for o in outputs] == [llm.tokenizer.encode("def f"), PROMPT,
                                                     llm.tokenizer.encode("x"), [5, 6, 7]]  # fmt: skip
    assert [len(tokens(o)) for o in outputs] == [9, 3, 6, 1]
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert tokens(llm.generate(prompt, p)[0]) == tokens(output)


@pytest.mark.parametrize(
    "prompts", [[], "ab", ["ab"], [3, 4], [[3, 4]], np.array([3, 4]), [np.array([3, 4])]]
)
def test_one_prompt_or_many(llm, prompts):
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    assert [len(tokens(o)) for o in outputs] == [1] * (0 if isinstance(prompts, list) and not prompts else 1)


def test_n_completions_are_seeded_one_by_one(llm):
    # The golden model is sure of itself: at this temperature, too, but less so.
    seeded = SamplingParams(temperature=20, max_tokens=8, ignore_eos=True, seed=7)
    (output,) = llm.generate(PROMPT, replace(seeded, n=2))
    assert [c.index for c in output.outputs] == [0, 1]
    assert tokens(output) != tokens(output, 1)
    alone = llm.generate([PROMPT, PROMPT], [replace(seeded, seed=8), seeded])
    assert [tokens(o) for o in alone] == [tokens(output, 1), tokens(output)]


def test_stop_strings_cut_text_and_tokens(llm):
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    stop = whole.text[10:13]
    at = whole.text.index(stop)
    for keep in (False, True):
        params = replace(SCORED, stop=[stop], include_stop_str_in_output=keep)
        (output,) = llm.generate(PROMPT, params)
        cut = output.outputs[0]
        assert cut.text == whole.text[: at + len(stop) * keep]
        assert cut.finish_reason == "stop"
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert stop in llm.tokenizer.decode(cut.token_ids)
        assert stop not in llm.tokenizer.decode(cut.token_ids[:-1])
        assert len(cut.logprobs) == len(cut.token_ids)


def test_stop_strings_begin_after_min_tokens(llm):
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    repeated = next(c for c in whole.text if whole.text.count(c) > 1)
    early = next(i for i, text in enumerate(whole.token_texts) if repeated in text)
    params = replace(SCORED, stop=[repeated], min_tokens=early + 1)
    cut = llm.generate(PROMPT, params)[0].outputs[0]
    kept = len("".join(whole.token_texts[: early + 1]))
    assert cut.text == whole.text[: whole.text.index(repeated, kept)]
    assert llm.generate(PROMPT, replace(params, min_tokens=early))[0].outputs[0].num_tokens == early + 1


def test_a_stop_string_may_begin_within_min_tokens(llm):
    """It counts where it ends."""
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    pairs = [whole.token_texts[i : i + 2] for i in range(len(whole.token_ids) - 1)]
    alone = (i for i, pair in enumerate(pairs) if all(pair) and whole.text.count("".join(pair)) == 1)
    at = next(i for i in alone if i > 1)
    stop, before = "".join(pairs[at]), "".join(whole.token_texts[:at])
    for least, reached in ((at, True), (at + 1, True), (at + 2, False)):
        cut = llm.generate(PROMPT, replace(SCORED, stop=[stop], min_tokens=least))[0].outputs[0]
        assert cut.text == (before if reached else whole.text)
        assert cut.num_tokens == (at + 2 if reached else whole.num_tokens)


@pytest.mark.parametrize("keep", [False, True])
def test_stop_token_ends_the_output(llm, keep):
    expected = tokens(llm.generate(PROMPT, GREEDY)[0])
    params = replace(GREEDY, stop_token_ids=[expected[4]], include_stop_str_in_output=keep)
    output = llm.generate(PROMPT, params)[0].outputs[0]
    end = expected.index(expected[4])
    assert output.token_ids == expected[: end + 1]
    assert output.finish_reason == "stop"
    assert output.text == llm.tokenizer.decode(expected[: end + keep])
    assert "".join(output.token_texts) == output.text


def test_stream_grows_and_ends_as_generate_does(llm):
    seen = list(llm.stream(PROMPT, GREEDY))
    lengths = [len(tokens(o)) for o in seen]
    assert lengths == sorted(set(lengths))
    assert len(lengths) > 5
    assert all(b.outputs[0].text.startswith(a.outputs[0].text) for a, b in itertools.pairwise(seen))
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    assert tokens(seen[-1]) == tokens(llm.generate(PROMPT, GREEDY)[0])


def test_closing_a_stream_aborts(llm):
    updates = llm.stream(PROMPT, GREEDY)
    next(updates)
    assert llm.engine.stats().pages_used > 0
    updates.close()
    assert llm.engine.stats().pages_used == 0


def test_streams_may_be_interleaved_and_generate_called_meanwhile(llm):
    prompts = (PROMPT, "def f")
    alone = [llm.generate(p, GREEDY)[0].outputs[0] for p in prompts]
    updates = list(itertools.zip_longest(*(llm.stream(p, GREEDY) for p in prompts)))
    together = [[u for u in column if u][-1] for column in zip(*updates, strict=True)]
    assert [o.outputs[0] for o in together] == alone

    first = llm.stream(PROMPT, GREEDY)
    next(first)
    assert llm.generate("def f", GREEDY)[0].outputs[0] == alone[1]
    *_, last = first
    assert last.outputs[0] == alone[0]


def test_time_is_counted_from_submission_not_from_compilation(llm, monkeypatch):
    prepared, arrived = [], []
    prepare, submit = llm.engine.prepare, llm.engine.submit
    monkeypatch.setattr(llm.engine, "prepare", lambda *a: (prepare(*a), prepared.append(time.perf_counter())))
    monkeypatch.setattr(llm.engine, "submit", lambda r: (submit(r), arrived.append(r.progress.arrived)))
    timing = llm.generate(PROMPT, GREEDY)[0].timing
    assert arrived[0] >= prepared[0]
    assert 0 < timing.first_token < timing.finished


def test_warm_up_for_any_prompt(llm):
    llm.warm_up(None, GREEDY)
    compiled = llm.engine.runner.keys
    for length in (1, 17, llm.engine.config.max_model_len - 2):
        assert llm.generate([[5] * length], GREEDY)[0].outputs[0].token_ids
    assert llm.engine.runner.keys == compiled


def test_warm_up_prepares_and_serves_nothing(llm, monkeypatch):
    prepared = []
    monkeypatch.setattr(llm.engine, "prepare", lambda requests, update: prepared.extend(requests))
    llm.warm_up(["a", "bc"], replace(GREEDY, n=2))
    assert [r.prompt for r in prepared] == [tuple(llm.tokenizer.encode(p)) for p in ("a", "a", "bc", "bc")]
    assert not llm.engine.scheduler.busy


def test_kernels_without_a_gpu_are_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr("mtp_jax.checkpoint.load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="found cpu; take kernels=auto or kernels=xla"):
        LLM(golden.model_dir("rigged"), kernels="mosaic_gpu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate([[]]), "the prompt is empty"),
        (
            lambda m: m.generate(["ab", [999]]),
            "prompt 2 of 2: the prompt names token 999; expected ids from 0 to 159",
        ),
        (lambda m: m.generate([3, -1]), "token -1"),
        (lambda m: m.generate([[3, "x"]]), "holds 'x'; expected a string or a list of token ids"),
        (lambda m: m.generate([3] * 96), "96 tokens > 95 maximum"),
        (lambda m: m.generate("a\ud800"), "lone surrogates"),
        (lambda m: m.generate(["a", "b"], [GREEDY]), "2 prompts with 1 sampling_params"),
        (lambda m: m.generate("a", []), "1 prompts with 0 sampling_params"),
        (lambda m: m.generate("a", {"temperature": 0}), "expected SamplingParams"),
        (lambda m: m.generate("a", [{"temperature": 0}]), "expected SamplingParams"),
        (lambda m: m.generate({"prompt": "a"}), "give the value of 'prompt' alone"),
        (lambda m: m.generate([b"abc"]), "expected a string or a list of token ids"),
        (lambda m: m.generate(b"abc"), "expected a string or a list of token ids"),
        (lambda m: m.generate(None), "the prompt is None; expected"),
        (lambda m: m.generate(5), "the prompt is 5; expected"),
        (lambda m: m.generate({"prompt_token_ids": [5]}), "give the value of 'prompt_token_ids' alone"),
        (lambda m: m.generate([{"role": "user"}]), "chat takes messages"),
        (lambda m: m.generate([[True, False]]), "holds True"),
        (lambda m: m.draft([1, 2, 3], 1.5), "num_tokens = 1.5"),
        (lambda m: m.generate("a", SamplingParams(num_speculative_tokens=4)), "num_speculative_tokens = 4"),
        (lambda m: m.generate("a", SamplingParams(stop_token_ids=[160])), "stop_token_ids names token 160"),
        (lambda m: m.generate("a", SamplingParams(logit_bias={160: 1.0})), "logit_bias names token 160"),
        (lambda m: m.stream([999]), "token 999"),
        (lambda m: m.warm_up([999]), "token 999"),
        (lambda m: m.draft([3], 0), "num_tokens = 0; expected an integer from 1 to 31"),
        (lambda m: m.draft([3], 32), "num_tokens = 32; expected an integer from 1 to 31"),
        (lambda m: m.draft([3] * 90, 20), "90 prompt tokens and 20 drafts"),
    ],
)
def test_requests_that_cannot_be_served(llm, call, message):
    with pytest.raises(RequestError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop", 5, "stop = 5; expected non-empty strings"),
        ("stop", ["a", ""], "expected non-empty strings"),
        ("stop_token_ids", 5, "stop_token_ids = 5; expected integers"),
        ("logit_bias", [1], "expected token ids and numbers"),
        ("logit_bias", {5: "x"}, "logit_bias 5: 'x'; expected token id: number"),
        ("logit_bias", {5: float("nan")}, "expected token id: number"),
        ("temperature", 10**400, "expected a number from 0 to 1000000"),
        ("top_p", float("nan"), "expected a number from 0 to 1"),
        ("logit_bias", {True: 1.0}, "logit_bias True: 1.0; expected token id: number"),
        ("stop_token_ids", [True], "holds True"),
        ("ignore_eos", "no", "ignore_eos = 'no'; expected True or False"),
    ],
)
def test_sampling_params_of_wrong_types(name, value, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**{name: value})


def test_none_is_none_of_them_as_in_vllm():
    none: dict[str, Any] = dict.fromkeys(("stop", "stop_token_ids", "logit_bias"))
    assert SamplingParams(**none) == SamplingParams()


@pytest.mark.parametrize(
    ("variant", "options", "error", "message"),
    [
        (
            "rigged",
            {"max_model_len": 9999},
            ConfigError,
            "max_model_len = 9999; the model's positions end at 2560",
        ),
        ("rigged", {"max_model_len": 0}, ConfigError, "max_model_len = 0"),
        ("rigged", {"num_speculative_tokens": -1}, ConfigError, "num_speculative_tokens = -1"),
        ("rigged", {"dtype": "float64"}, ConfigError, "float64"),
        ("rigged", {"drafting": "often"}, ConfigError, "drafting = 'often'; expected one of"),
        ("rigged", {"num_nextn_layers": 0, "num_speculative_tokens": 1}, ConfigError, "no NextN layer"),
        ("rigged", {"num_nextn_layers": 0, "tree": "2x2x4"}, ConfigError, "no NextN layer"),
        ("rigged", {"num_nextn_layers": 2}, CheckpointError, "expected 0 to 1"),
        ("nothing", {}, ConfigError, "nothing/model is not a directory"),
    ],
)
def test_models_that_cannot_be_opened(variant, options, error, message):
    with pytest.raises(error, match=message):
        LLM(golden.model_dir(variant), **SIZES | options)


def test_without_speculation_the_folder_need_not_have_the_layers_it_declares(tmp_path):
    rigged = golden.model_dir("rigged")
    folder = edit_tensors(rigged, tmp_path / "model", drop_nextn(rigged))
    with pytest.raises(CheckpointError, match="or do without: num_speculative_tokens=0"):
        LLM(folder, **SIZES)
    options: dict[str, Any] = SIZES | {"num_speculative_tokens": 0}
    ids, params = [5, 9, 11], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llms = LLM(folder, **options), LLM(rigged, **options)
    (output,), (whole,) = (llm.generate([ids], params) for llm in llms)
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids
    assert len(output.outputs[0].token_ids) == 8
    with pytest.raises(RequestError, match="draft needs num_speculative_tokens of 1 or more"):
        llms[0].draft(ids, 1)


def test_drafts_choose_among_the_listed_tokens(tmp_path):
    folder = shutil.copytree(golden.model_dir("rigged"), tmp_path / "model")
    write(folder / FILE, [5, 9, 11])
    options: list[dict[str, Any]] = [
        *({}, {"draft_vocab": 2}, {"draft_vocab": 0}, {"num_speculative_tokens": 0})
    ]
    found = [LLM(folder, **{**SIZES, **o}).engine.config.draft_vocab for o in options]
    assert found == [(5, 9, 11), (5, 9), None, None]
    eagle = shutil.copytree(golden.model_dir("eagle3"), tmp_path / "eagle")
    write(eagle / FILE, [5, 9, 11])
    head: dict[str, Any] = {**SIZES, "draft_model": golden.model_dir("eagle3", "draft")}
    assert LLM(eagle, **head).engine.config.draft_vocab is None
    with pytest.raises(ConfigError, match="draft_vocab has 2 tokens, but the drafts of this model"):
        LLM(eagle, **{**head, "draft_vocab": 2})


@pytest.mark.parametrize("named", [{}, {"eos_token_id": None}, {"eos_token_id": 7}])
def test_the_tokenizer_names_the_end_of_text_where_the_model_does_not(tmp_path, directory, named):
    shutil.copytree(directory, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "model" / name
        path.write_text(
            json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "eos_token_id"})
        )
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    llm = LLM(tmp_path / "model", **SIZES)
    assert llm.tokenizer
    assert llm.tokenizer.eos_ids == (1,)
    assert llm.config.eos_token_ids == ((7,) if named.get("eos_token_id") else (1,))


def test_an_open_stream_is_prepared_for_once(directory):
    more: dict[str, Any] = SIZES | {"max_num_seqs": 4}
    llm = LLM(directory, **more, simulate=RATES)
    with contextlib.closing(llm.stream(PROMPT, GREEDY)) as stream:
        next(stream)
        (output,) = llm.generate(PROMPT, GREEDY)
        assert {k.slots for k in llm.engine.runner.keys if isinstance(k, StepKey)} == {0, 1, 2}
        *_, last = stream
    assert tokens(last) == tokens(output)


def test_text_needs_a_tokenizer():
    llm = LLM(golden.model_dir("rigged"), **SIZES)
    for prompt, params in (("text", GREEDY), ([3], SamplingParams(stop="x"))):
        with pytest.raises(RequestError, match=r"no tokenizer; give token ids"):
            llm.generate(prompt, params)


def test_the_package_offers_its_names_without_importing_jax():
    for name in mtp_jax.__all__:
        value = getattr(mtp_jax, name)
        assert get_origin(value) or value.__name__ == name  # a type alias has no name
    assert set(mtp_jax.__all__) <= set(dir(mtp_jax))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mtp_jax.nothing  # noqa: B018
    code = (
        "import sys, mtp_jax.commands.cli; from mtp_jax import SamplingParams; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arithmetic_in_bfloat16_is_refused_where_it_is_slow(directory, monkeypatch):
    monkeypatch.setattr(load, "multiplies_bf16", lambda: False)
    with pytest.raises(ConfigError, match=r"no matrix instructions for bfloat16 .* set it to 'auto'"):
        LLM(directory, dtype="bfloat16", **SIZES)
