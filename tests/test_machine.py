"""Compiled programs are kept apart by what they were compiled for."""

import os
import subprocess
import sys

import pytest

from mtp_jax import machine

NAME = "from mtp_jax.machine import program_folder; print(program_folder())"
FEW = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"


def named(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    ).stdout.strip()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux: sets affinities")
def test_a_process_on_one_core_has_a_folder_of_its_own():
    assert named(NAME) == machine.program_folder()
    assert named(FEW + NAME) == machine.program_folder().rpartition("-")[0] + "-1"
    assert machine.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("usable_cores", lambda: 1000),
        ("processor_features", lambda: frozenset({"sse2"})),
        ("version", lambda package: "0.0.1"),
    ],
)
def test_another_machine_or_jaxlib_has_another_folder(monkeypatch, name, other):
    ours = machine.program_folder()
    monkeypatch.setattr(machine, name, other)
    assert machine.program_folder() != ours


def test_without_an_affinity_mask_every_core_counts(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert machine.usable_cores() == os.cpu_count()


@pytest.mark.parametrize(
    ("features", "flags", "expected"),
    [
        ({"sse4_2", "f16c"}, "", True),
        ({"sse4_2", "f16c"}, "--xla_cpu_max_isa=AVX2", True),
        ({"sse4_2", "f16c"}, "--a=b --xla_cpu_max_isa=SSE4_2", False),
        ({"sse4_2", "avx"}, "", False),
        ({"asimd", "fphp"}, "", True),
        ({"Apple M4"}, "", True),
    ],
)
def test_float16_is_converted_where_the_processor_does(monkeypatch, features, flags, expected):
    monkeypatch.setattr(machine, "processor_features", lambda: frozenset(features))
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert machine.converts_float16() == expected
