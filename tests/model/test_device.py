"""Options of XLA by device: tested by name here, their effect on a GPU by ``tests.kernels.compile_step``."""

import pytest

from mtp_jax.model import device

GRAPHS = "xla_gpu_enable_command_buffer"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return monkeypatch


def held(devices: int) -> set[str]:
    return {*device.compiler_options(devices=devices)[GRAPHS].split(",")}


@pytest.mark.usefixtures("on_gpu")
def test_a_step_is_one_graph():
    """Loops of sampling are part of it; collectives where there are several devices."""
    assert {"FUSION", "CUSTOM_CALL", "CONDITIONAL", "WHILE"} < held(1)
    assert held(8) == held(1) | {"COLLECTIVES"}


def test_a_user_who_names_graphs_decides(on_gpu):
    on_gpu.setenv("XLA_FLAGS", f"--xla_dump_to=x --{GRAPHS}=FUSION")
    assert device.compiler_options() == {}
    assert device.compiler_options(2).keys() == {"xla_gpu_experimental_parallel_collective_overlap_limit"}


def test_no_graphs_on_a_cpu():
    assert GRAPHS not in device.compiler_options(devices=8)
