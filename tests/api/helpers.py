"""Prompts, and LLMs over the golden model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from mtp_jax import LLM, AsyncLLM, RequestOutput, SamplingParams
from tests import golden
from tests.models import RATES

RIGGED = golden.model_dir("rigged")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 9, 11], [7, 3, 2, 8, 6], [40, 41, 42, 43]]


def simulated() -> LLM:
    return LLM(RIGGED, max_num_seqs=2, max_model_len=128, page_size=16, prefill_chunk=16, simulate=RATES)


@asynccontextmanager
async def serving(llm: LLM, **limits: Any) -> AsyncIterator[AsyncLLM]:
    """A served LLM that must be idle, with every page free, at the end."""
    async with AsyncLLM(llm, **limits) as allm:
        yield allm
        await until(lambda: not llm.engine.busy)
    if allm.error is None:
        assert llm.engine.stats().pages_used == 0
        assert (allm.live, allm.admission.requests, allm.admission.tokens) == (0, 0, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


SIZES = {"max_num_seqs": 2, "max_model_len": 96, "page_size": 16, "prefill_chunk": 16, "compile_cache": None}
PROMPT = golden.expected("rigged")["input_ids"].tolist()
SCORED = replace(GREEDY, logprobs=2, prompt_logprobs=1)


def tokens(output, index=0):
    return output.outputs[index].token_ids
