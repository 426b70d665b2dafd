"""Engines of a model with the tiny tokenizer's vocabulary, compiled for rows with grammars and without."""

import functools
from dataclasses import replace
from typing import Any

from mtp_jax.decode.keys import StepKey
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.model.params import Params
from mtp_jax.text.grammar import Grammars, StructuredOutput
from tests.models import TINY, make_engine, rigged

EOS = 1
CFG = replace(TINY, vocab_size=112, eos_token_ids=(EOS,))
SAMPLED = SamplingParams(temperature=1.0, logprobs=0)
SHAPED = replace(SAMPLED, structured=StructuredOutput(regex="[a-z]"))


@functools.cache
def params() -> Params:
    return rigged(CFG, noise=0.3)


def engine_with(grammars: Grammars | None, **config: Any) -> Engine:
    return make_engine(params(), CFG, grammars=grammars, max_model_len=248, **config)


def lean(grammars: Grammars) -> Engine:
    """An engine that serves any request with a step for rows with grammars, and prompts alone."""
    engine = engine_with(grammars)
    keys = engine.buckets.prepare([engine.make_request([5], SHAPED)] * 4)
    engine.runner.compile(k for k in keys if isinstance(k, StepKey) and not (k.slots and k.tokens))
    return engine


def ready(grammars: Grammars, **config: Any) -> Engine:
    """An engine with programs that sample, which serve greedy rows, too: one set for every test.

    Rows with grammars and rows without have steps of their own; one program takes a prompt beside either.
    """
    engine = engine_with(grammars, **config)
    keys = engine.buckets.prepare([engine.make_request([5], options) for options in (SAMPLED, SHAPED)] * 4)
    engine.runner.compile(k for k in keys if isinstance(k, StepKey) and (k.mode.structured or not k.tokens))
    return engine
