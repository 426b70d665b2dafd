"""Structured output with speculation on: the same tokens as without, whatever shares the batch."""

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, SamplingParams
from mtp_jax.grammar import Grammars, StructuredOutput
from mtp_jax.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.models import (
    TINY,
    accepted,
    chosen_logprobs,
    make_engine,
    prompts,
    rigged,
    serve,
)

EOS = 1
CFG = replace(TINY, vocab_size=112, eos_token_ids=(EOS,))
PROMPTS = prompts(8, vocab=104)
GREEDY = SamplingParams(temperature=0, max_tokens=200, logprobs=0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": None, "whitespace_flexible": False},
}
WANTED = {
    "schema": StructuredOutput(json_schema=SCHEMA),
    "regex": StructuredOutput(regex="[a-m ]{6,16}[x-z]"),
    "choice": StructuredOutput(choice=["a rather long choice!", "a rather lame one.", "other"]),
}


@functools.cache
def params():
    return rigged(CFG, noise=0.3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = Tokenizer.from_dir(tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), 104))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.backend, CFG.vocab_size, CFG.eos_token_ids)


def engine_with(grammars: Grammars, **config: Any) -> Engine:
    engine = make_engine(params(), CFG, max_model_len=248, **config)
    engine.grammars = grammars
    return engine


def text(tokenizer: Tokenizer, request: Request) -> str:
    return tokenizer.decode(request.output)


def check(wanted: StructuredOutput, written: str) -> None:
    """The output is what was asked for."""
    if wanted.json_schema is not None:
        jsonschema.validate(json.loads(written), SCHEMA)
    elif wanted.regex is not None:
        assert re.fullmatch(wanted.regex, written)
    else:
        assert written in (wanted.choice or ())


def jobs(options: SamplingParams = GREEDY) -> list[tuple[Sequence[int], SamplingParams]]:
    """Each grammar twice, and requests without one."""
    wanted = [*WANTED.values(), None, *WANTED.values(), None]
    return [(p, replace(options, structured=w)) for p, w in zip(PROMPTS, wanted, strict=True)]


@pytest.fixture(scope="module")
def plain(grammars) -> list[Request]:
    """Depth 0, one request at a time."""
    engine = engine_with(grammars, num_speculative_tokens=0)
    return [serve(engine, [job])[0] for job in jobs()]


@pytest.fixture(scope="module")
def mixed(grammars) -> list[Request]:
    """Depth 3, all together."""
    return serve(engine_with(grammars), jobs())


def test_greedy_tokens_are_those_of_depth_0(plain, mixed, tokenizer):
    for (_, p), want, got in zip(jobs(), plain, mixed, strict=True):
        assert got.output == want.output
        np.testing.assert_allclose(chosen_logprobs(got), chosen_logprobs(want), atol=1e-4)
        if p.structured:
            assert got.finish_reason == want.finish_reason == "stop"
            assert got.output[-1] == EOS
            check(p.structured, text(tokenizer, got))


def test_drafts_are_accepted(mixed):
    structured = [r for r in mixed if r.matcher]
    assert sum(map(sum, map(accepted, structured))) > 0.3 * sum(len(r.output) for r in structured)
