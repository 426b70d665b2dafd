"""The benchmark of whole steps, on a CPU: what it counts; its times mean something on a GPU only."""

import jax
import pytest

from mtp_jax.model.sharding import make_mesh
from mtp_jax.profiling.trace import Op, Trace
from tests.kernels import run_step
from tests.kernels.compile_step import abstract_params
from tests.kernels.random_weights import random_params


def test_a_layer_is_told_from_the_order_of_launches():
    """Three layers, one of another kind, with times in nanoseconds on two streams."""
    alike = [
        ("mla_decode_mosaic_gpu_kernel", 900),
        ("loop_pad_fusion_7", 20),
        ("router_mosaic_gpu_kernel", 40),
    ]
    other = [("mla_decode_mosaic_gpu_kernel", 500), ("loop_pad_fusion", 60)]
    last = [("mla_decode_mosaic_gpu_kernel", 1)]
    at, ops = 0, []
    for name, took in [("fusion.1", 3), *alike, *other, *alike[:2], ("router_mosaic_gpu_kernel", 60), *last]:
        ops.append(Op(at, at + took, "jit_step", "command", None, name))
        at += took
    found = run_step.launches(Trace(0, at, (tuple(ops[::2]), tuple(ops[1::2]))))
    assert found[0] == ("fusion", pytest.approx(3e-9))
    own = run_step.layer(found)
    assert [name for name, _ in own] == [
        "mla_decode_mosaic_gpu_kernel",
        "loop_pad_fusion",
        "router_mosaic_gpu_kernel",
    ]
    assert [seconds for _, seconds in own] == pytest.approx([900e-9, 20e-9, 50e-9])
    longest = run_step.kernels(found)[0]
    assert longest == ("mla_decode_mosaic_gpu_kernel", 4, pytest.approx(2301e-9))
    assert run_step.layer(found[:1]) == []


@pytest.mark.slow
def test_steps_of_a_model_of_random_weights_are_measured(monkeypatch):
    monkeypatch.setattr(run_step, "STEPS", 40)
    cfg = run_step.models(None)["tiny"]
    params = random_params(jax.random.key(0), abstract_params(cfg, make_mesh(1, 1)))
    engine = run_step.engine_of(cfg, params, depth=1, slots=4, rows=100)
    found = run_step.measure(engine, 1, 100, sampled=False)
    assert found.seconds.count == found.call.count == 40
    assert found.tokens == pytest.approx(1 + run_step.ACCEPTANCE[0], abs=0.1)
    assert sum(t for _, _, t in run_step.kernels(run_step.launches(found.trace))) > 0
