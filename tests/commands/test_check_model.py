"""Options that do not fit the model or this computer are refused before jax is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from mtp_jax import machine
from mtp_jax.api.demo import demo_model
from mtp_jax.commands import check_model
from mtp_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("devices", "options", "says"),
    [
        (1, {"mesh": (2, 2)}, "needs 4 devices; this computer has no others .* counts as 1"),
        (4, {"mesh": (2, 2)}, None),
        (None, {"mesh": (2, 2)}, None),
        (None, {"mesh": (1, 5)}, "vocab = 8192 does not divide over 5 devices"),
        (8, {"mesh": (2, 1), "max_num_seqs": 3}, "max_num_seqs = 3 does not divide over a data axis of 2"),
        (1, {"max_model_len": 10**6}, "the model's positions end at 2048"),
        (1, {"kernels": "mosaic_gpu"}, "needs an NVIDIA GPU"),
        (None, {"kernels": "mosaic_gpu"}, None),
        (1, {"draft_model": Path("/no")}, "/no is not a directory"),
        (1, {}, None),
    ],
)
def test_options_that_do_not_fit_are_refused(monkeypatch, devices, options, says):
    monkeypatch.setattr(check_model, "cpu_devices", lambda: devices)
    options = {"max_num_seqs": 2, **options}
    if says is None:
        check_model.check_model(demo_model(), options)
        return
    with pytest.raises(ConfigError, match=says):
        check_model.check_model(demo_model(), options)


def test_devices_of_several_hosts_are_not_counted(monkeypatch):
    monkeypatch.setattr(check_model, "cpu_devices", lambda: 1)
    check_model.check_model(demo_model(), {"max_num_seqs": 2, "mesh": (2, 1)}, hosts=2)


@pytest.mark.parametrize(
    ("platforms", "flags", "count", "plugins", "wanted"),
    [
        ("cpu", "", None, ["cuda"], 1),
        ("", "", None, [], 1),
        ("", "", None, ["cuda"], None),
        ("cuda", "", None, [], None),
        ("cpu,cuda", "", None, [], None),
        ("cpu", "--xla_a=b --xla_force_host_platform_device_count=8", None, [], 8),
        ("cpu", "--xla_force_host_platform_device_count=8", "4", [], 4),
        ("cpu", "", "many", [], None),
    ],
)
def test_devices_are_counted_without_jax(monkeypatch, platforms, flags, count, plugins, wanted):
    monkeypatch.setattr(machine, "entry_points", lambda group: plugins)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    for name, value in (("JAX_PLATFORMS", platforms), ("XLA_FLAGS", flags), ("JAX_NUM_CPU_DEVICES", count)):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    assert machine.cpu_devices() is None  # JAX itself says it
    monkeypatch.setattr(machine, "modules", {})
    assert machine.cpu_devices() == wanted


@pytest.mark.rest
def test_the_command_line_imports_no_jax_for_it():
    told = (
        "import sys; from mtp_jax.commands.cli import main; sys.argv = ['mtp-jax', *{}]; status = main(); "
        "assert 'jax' not in sys.modules; sys.exit(status)"
    )
    for line in (["serve", "--mesh", "1x7"], ["generate", "--prompt", "a", "--max-model-len", "9000"]):
        ran = subprocess.run([sys.executable, "-c", told.format(line)], capture_output=True, text=True)
        assert ran.stderr.startswith("error: "), ran.stderr
        assert ran.stderr.count("\n") == 1
        assert ran.returncode
