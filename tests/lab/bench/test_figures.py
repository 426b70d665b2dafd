"""`mtp-jax info --machine`: the figures that a report of a defect carries."""

import json

import pytest

from mtp_jax import machine
from mtp_jax.commands import cli
from mtp_jax.lab.bench import figures
from mtp_jax.lab.bench.machine import Peaks
from mtp_jax.model import device
from tests.golden import model_dir


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "measure", lambda dtype: Peaks(2e12, 3e10, dtype))


@pytest.mark.usefixtures("peaks")
@pytest.mark.parametrize("sets", [{"avx2", "fma"}, {"avx512f", "amx_bf16"}], ids=["AVX2", "AMX"])
def test_forms_follow_the_processor(capsys, monkeypatch, sets):
    monkeypatch.setattr(figures, "_step_seconds", lambda: {"depth 0": 0.5})
    for module in (machine, device, figures):
        monkeypatch.setattr(module, "processor_features", lambda: frozenset({*sets, "unknown"}))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert cli.main(["info", "--machine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["instructions"]) == sets
    assert found["forms"]["bfloat16_matrices"] == ("amx_bf16" in sets)
    assert found["peaks"].keys() == ({"float32", "bfloat16"} if "amx_bf16" in sets else {"float32"})
    assert found["xla_flags"] == "--xla_cpu_max_isa=AVX2"
    assert found["compile_cache"] == machine.program_folder()
    assert cli.main(["info", "--machine"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {name: rows[name].strip() for name in ("step_seconds.depth 0", "forms.experts")} == {
        "step_seconds.depth 0": "0.5",
        "forms.experts": "CpuExperts",
    }


@pytest.mark.parametrize("argument", ["DIR", "--gpus=2", "--num-nextn-layers=1", "--draft-captures=inputs"])
def test_no_argument_is_ignored(capsys, tmp_path, argument):
    argument = str(tmp_path) if argument == "DIR" else argument
    assert cli.main(["info", "--machine", argument]) == 2
    assert "--machine describes this machine, no checkpoint; leave out: " in capsys.readouterr().err


@pytest.mark.rest
@pytest.mark.usefixtures("peaks")
def test_steps_are_measured_as_at_a_start(monkeypatch):
    monkeypatch.setattr(figures, "demo_model", lambda: model_dir("rigged"))
    found = figures.figures()["step_seconds"]
    assert isinstance(found, dict)
    assert list(found) == ["depth 0", "depth 1", "depth 3"]
    assert min(found.values()) > 0
