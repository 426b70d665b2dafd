"""The realised speed-up against requests with and without drafts by turns: the embedded model, served."""

import asyncio
from dataclasses import replace

import pytest

from mtp_jax import LLM, AsyncLLM, SamplingParams

PROMPT = "def read_config(path):\n    "
SEEDS = range(6)


@pytest.mark.slow
def test_it_is_what_requests_by_turns_gain():
    """Both sides by the engine's own sums: tokens, and seconds of the steps that made them."""

    async def run() -> None:
        async with AsyncLLM(LLM(max_num_seqs=8, max_model_len=512)) as allm:
            while allm.warming:
                await asyncio.sleep(0.5)
            tokens, seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
            for seed in SEEDS:
                for drafts in (True, False):
                    params = SamplingParams(temperature=0.6, seed=seed, max_tokens=128, ignore_eos=True)
                    if not drafts:
                        params = replace(params, num_speculative_tokens=0)
                    before = allm.llm.engine.stats()
                    async for _ in allm.generate(PROMPT, params):
                        pass
                    after = allm.llm.engine.stats()
                    tokens[drafts] += after.generation_tokens - before.generation_tokens
                    seconds[drafts] += sum(after.step_seconds.values()) - sum(before.step_seconds.values())
            gained = tokens[True] / seconds[True] / (tokens[False] / seconds[False])
            found = allm.llm.engine.stats()
            assert found.accepted_tokens > 100
            assert found.realised_speedup == pytest.approx(gained, rel=0.15)

    asyncio.run(run())
