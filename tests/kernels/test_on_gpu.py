"""What only a GPU can show; without one these are left out (`make test-gpu`)."""

from dataclasses import replace

import jax
import pytest

from kernels_pallas.check.registry import cases
from kernels_pallas.check.verify import verify
from mtp_jax import LLM, SamplingParams
from mtp_jax.api.local import local_engine
from mtp_jax.engine.config import EngineConfig
from mtp_jax.lab.bench.synthetic import chain, complete, random_prompts
from mtp_jax.model.device import is_hopper
from tests.kernels import rigged

pytestmark = pytest.mark.gpu
HOPPER = pytest.mark.usefixtures("hopper")
CASES = {c.name: c for c in cases()}


@pytest.fixture
def hopper():
    if not is_hopper():
        pytest.skip("the kernels need a GPU of the Hopper generation")


def test_there_is_a_gpu():
    assert jax.default_backend() == "gpu", f"jax computes on {jax.default_backend()}"


@HOPPER
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_its_reference(name):
    case = CASES[name]
    assert verify(case, jax.random.key(0)).faults(case.tolerance) == []


@HOPPER
@pytest.mark.parametrize("kernels", ["auto", "xla"])
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_a_model_of_the_kernels_dimensions_speculates(weights, kernels):
    """Its greedy text is known, with prompts of more than a page, chunks, and drafts that come true."""
    cfg = rigged.config()
    given, following = random_prompts(cfg, 6, 100), chain(cfg)
    for depth in (0, 3):
        sizes = EngineConfig(
            num_speculative_tokens=depth,
            max_num_seqs=4,
            max_model_len=256,
            prefill_chunk=64,
            kernels=kernels,
            dtype="bfloat16",
        )
        requests = complete(local_engine(cfg, rigged.params(cfg, weights), sizes), given, 48)
        for prompt, request in zip(given, requests, strict=True):
            text = [prompt[-1]]
            for _ in range(48):
                text.append(int(following[text[-1]]))
            assert request.progress.output == text[1:]
        if depth:
            runs = [r.progress.speculation for r in requests]
            assert sum(s.accepted for s in runs) > sum(s.steps for s in runs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_speculates(dtype):
    llm = LLM(dtype=dtype, max_num_seqs=4, compile_cache=None)
    prompts = ["def fibonacci(n):", "class Stack:", "import os\n", "for i in range(10):"]
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    undrafted = replace(greedy, num_speculative_tokens=0)
    drafted, plain = (llm.generate(prompts, params) for params in (greedy, undrafted))
    assert sum(o.speculation.accepted for o in drafted) > sum(o.speculation.steps for o in drafted)
    if dtype == "float32":
        assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
