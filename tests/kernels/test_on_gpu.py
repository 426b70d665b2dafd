"""What only a GPU can show; without one these are left out (`make test-gpu`)."""

import jax
import pytest

from kernels_pallas.checking.registry import cases
from kernels_pallas.checking.verify import verify
from mtp_jax import LLM, SamplingParams

pytestmark = pytest.mark.gpu
HOPPER = pytest.mark.skipif("not is_hopper()", reason="the kernels need a GPU of the Hopper generation")
CASES = {c.name: c for c in cases()}


def test_there_is_a_gpu():
    assert jax.default_backend() == "gpu", f"jax computes on {jax.default_backend()}"


@HOPPER
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_its_reference(name):
    case = CASES[name]
    assert verify(case, jax.random.key(0)).faults(case.tolerance) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_speculates(dtype):
    llm = LLM(dtype=dtype, max_num_seqs=4, compile_cache=None)
    prompts = ["def fibonacci(n):", "class Stack:", "import os\n", "for i in range(10):"]
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    drafted, plain = (m.generate(prompts, greedy) for m in (llm, llm.without_speculation()))
    assert sum(o.speculation.accepted for o in drafted) > sum(o.speculation.steps for o in drafted)
    if dtype == "float32":
        assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
