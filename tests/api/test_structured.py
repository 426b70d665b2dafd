"""Structured output through the Python API; random schemas on the embedded model."""

import asyncio
import json
import random
import re
import threading
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from mtp_jax import LLM, RequestError, SamplingParams, StructuredOutput, Thoughts
from tests import tiny_tokenizer
from tests.api.helpers import last, serving, until
from tests.models import RATES

SIZES = {"max_num_seqs": 2, "max_model_len": 240, "page_size": 16, "prefill_chunk": 16, "simulate": RATES}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "id": {"type": "string", "pattern": "^[a-f]{2,4}$"}},
    "required": ["ok", "id"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=200, structured=StructuredOutput(json_schema=SCHEMA))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(tiny_tokenizer.model(tmp_path_factory.mktemp("structured") / "model"), **SIZES)


def test_greedy_is_valid_and_the_same_without_speculation(llm):
    (output,) = llm.generate("def", GREEDY)
    (plain,) = llm.generate("def", replace(GREEDY, num_speculative_tokens=0))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)
    assert output.outputs[0].finish_reason == "stop"
    assert output.speculation.accepted > 5


def test_after_a_free_thought_and_the_same_without_speculation(llm, monkeypatch):
    prompt, free = "def <think>\n", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    text = llm.generate(prompt, free)[0].outputs[0].text
    end = text[30:33]
    thought = text[: text.index(end) + len(end)]
    monkeypatch.setattr(Thoughts, "CLOSE", end)
    (output,) = llm.generate(prompt, GREEDY)
    (plain,) = llm.generate(prompt, replace(GREEDY, num_speculative_tokens=0))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.outputs[0].text.startswith(thought)
    jsonschema.validate(json.loads(output.outputs[0].text.removeprefix(thought)), SCHEMA)
    assert output.outputs[0].finish_reason == "stop"
    assert output.speculation.accepted > 10


def test_a_grammar_that_is_being_compiled_holds_up_nobody(llm, monkeypatch):
    """The event loop goes on, and its tables are made before there is a request."""
    served, grammars = threading.Event(), llm.engine.grammars
    monkeypatch.setattr(grammars._trials, "run", lambda _: served.wait(60) and 0)
    new = replace(GREEDY, structured=StructuredOutput(choice=["a grammar of this test"]))

    async def run() -> str:
        async with serving(llm) as allm:
            assert "compiled" in vars(grammars._table)
            shaped = asyncio.create_task(allm.submit("def", new))
            await until(lambda: bool(grammars._compiling))
            await last(allm.generate("def", SamplingParams(temperature=0, max_tokens=3)))
            assert not shaped.done()
            served.set()
            return (await last(await shaped)).outputs[0].text

    vars(grammars._table).pop("compiled", None)
    assert asyncio.run(run()) == "a grammar of this test"


def test_several_completions_of_one_prompt(llm):
    params = replace(GREEDY, temperature=1.0, n=3, seed=4, structured=StructuredOutput(regex="[a-z]{12}"))
    (output,) = llm.generate("def", params)
    assert len({c.text for c in output.outputs}) > 1
    assert all(re.fullmatch("[a-z]{12}", c.text) for c in output.outputs)


def test_a_stop_string_cuts_the_output_short(llm):
    whole = llm.generate("def", GREEDY)[0].outputs[0].text
    cut = llm.generate("def", replace(GREEDY, stop='"id"'))[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index('"id"')]


def test_streams_with_and_without_a_grammar(llm):
    """Opening a second stream compiles what the two need together."""
    free = llm.stream("abc", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    next(free)
    structured = StructuredOutput(regex="[0-9]{3}-[0-9]{4}")
    *_, last = llm.stream("def", SamplingParams(temperature=0, structured=structured))
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", last.outputs[0].text)
    *_, other = free
    alone = llm.generate("abc", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_bad_schema_is_refused_before_anything_is_generated(llm):
    bad = SamplingParams(structured=StructuredOutput(json_schema={"type": "date"}))
    with pytest.raises(RequestError, match=r"prompt 2 of 2: .*Invalid type: date"):
        llm.generate(["a", "b"], [GREEDY, bad])
    assert not llm.engine.busy


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose documents all end within a few hundred tokens."""
    leaves = ["integer", "boolean", "null", "string", "pattern", "enum", "const", "date"]
    kind = rng.choice(leaves + ["array", "object", "object", "anyOf"] * (depth > 0))
    if kind == "integer":
        low = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "string":
        low = rng.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{1,6}$", "^(x|yz){1,4}$", r"^\d{3}-\d{2}$"])}
    if kind == "date":
        return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", "été", 1, 2.5, None, True, 'a "b"\n'], rng.randint(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["fixed text", 42, {"a": [1, 2]}])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    names = rng.sample(["id", "name", "the value", "x1", "naïve", "items"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


@pytest.mark.slow
def test_two_hundred_random_schemas():
    rng = random.Random(0)
    schemas = [
        {
            "type": "object",
            "properties": {"it": random_schema(rng)},
            "required": ["it"],
            "additionalProperties": False,
        }
        for _ in range(200)
    ]
    begin = ["# The record as JSON:\n", "import json\n\nDATA = ", "def f():\n    return ", "x = "]
    prompts = [begin[i % 4] for i in range(200)]
    wanted = [StructuredOutput(json_schema=s) for s in schemas]
    params = [SamplingParams(temperature=0, max_tokens=900, structured=w) for w in wanted]
    undrafted = [replace(p, num_speculative_tokens=0) for p in params]
    llm = LLM(max_model_len=1000)
    deep, plain = (llm.generate(prompts, each) for each in (params, undrafted))
    for schema, a, b in zip(schemas, deep, plain, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(a.outputs[0].text), schema)
    steps = sum(o.speculation.steps for o in deep)
    accepted = sum(o.speculation.accepted for o in deep)
    tokens = sum(len(o.outputs[0].token_ids) for o in deep)
    print(f"{tokens} tokens, acceptance length {1 + accepted / steps:.2f}")
    assert accepted > steps

    hot = [replace(p, temperature=1.0, seed=i) for i, p in enumerate(params)]
    for schema, o in zip(schemas, llm.generate(prompts, hot), strict=True):
        assert o.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(o.outputs[0].text), schema)
