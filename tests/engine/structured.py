"""Engines of a model with the tiny tokenizer's vocabulary, compiled for rows with grammars and without."""

import functools
from dataclasses import replace
from typing import Any

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.model.params import Params
from mtp_jax.text.grammar import Grammars, StructuredOutput
from tests.models import TINY, make_engine, prepare, rigged

EOS = 1
CFG = replace(TINY, vocab_size=112, eos_token_ids=(EOS,))


@functools.cache
def params() -> Params:
    return rigged(CFG, noise=0.3)


def engine_with(grammars: Grammars | None, **config: Any) -> Engine:
    return make_engine(params(), CFG, grammars=grammars, max_model_len=248, **config)


def ready(grammars: Grammars, **config: Any) -> Engine:
    """An engine with programs that sample, which serve greedy rows, too: one set for every test."""
    engine, sampled = engine_with(grammars, **config), SamplingParams(temperature=1.0, logprobs=0)
    shaped = replace(sampled, structured=StructuredOutput(regex="[a-z]"))
    prepare(engine, [engine.make_request([5], options) for options in (sampled, shaped)])
    return engine
