"""`serve --ray` and `batch --ray` without a cluster: what is refused, and in how many words."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_jax.cluster.commands import ray_app, ray_serve
from mtp_jax.cluster.commands.ray_options import ray_options
from mtp_jax.cluster.on_ray import start
from mtp_jax.cluster.on_ray.options import RayOptions
from mtp_jax.commands import cli
from mtp_jax.errors import ConfigError
from tests import golden

ROOT = Path(start.__file__).parents[3]
V3 = golden.model_dir("v3")


def parse(*argv):
    return cli.make_parser().parse_args([*map(str, argv)])


@pytest.fixture
def with_ray(monkeypatch):
    """As if it were installed."""
    monkeypatch.setattr(start, "find_spec", lambda name: object())


@pytest.mark.parametrize("argv", [["serve", V3, "--ray"], ["batch", "in.jsonl", "out.jsonl", V3, "--ray"]])
def test_without_ray_one_line_says_what_to_install(argv, monkeypatch, capsys):
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    assert cli.main([*map(str, argv)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "error: --ray needs Ray with its parts serve and data; run: pip install 'ray[serve,data]'\n"
    )


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="needs an environment without Ray")
def test_in_an_environment_without_ray():
    """The process, not only the function; and what is fit for machines without Ray imports none."""
    command = [sys.executable, "-m", "mtp_jax", "serve", "--ray"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: --ray needs Ray with its parts serve and data; run: pip install 'ray[serve,data]'"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rank 1", "--rank cannot be with --ray"),
        ("--hosts 2 --coordinator h:1", "--coordinator cannot be with --ray"),
        ("--role prefill", "--role cannot be with --ray"),
        ("--admin-key k", "an admin key cannot be with --ray"),
        ("--max-replicas 1 --min-replicas 2", "--max-replicas 1; expected --min-replicas 2 or more"),
        ("--target-requests 2", "--target-requests has no effect on a fixed number of engines; add --max"),
        ("--host 0.0.0.0", "there is no API key"),
        ("--min-replicas 0", "--min-replicas 0; expected an integer from 1"),
        ("--num-speculative-tokens 0 --fixed-depth", "--fixed-depth has no effect with"),
    ],
)
@pytest.mark.usefixtures("with_ray")
def test_options_that_cannot_be(options, message, capsys, monkeypatch):
    monkeypatch.delenv("MTP_JAX_API_KEY", raising=False)
    monkeypatch.delenv("MTP_JAX_ADMIN_KEY", raising=False)
    assert cli.main(["serve", str(V3), "--ray", *options.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.usefixtures("with_ray")
def test_what_a_replica_is_given_depends_on_no_folder_and_no_device(tmp_path, monkeypatch):
    monkeypatch.chdir(V3.parent)
    argv = ["--ray", "--hosts", 2, "--mesh", "2x4", "--compile-cache", "cache", "--max-queued-requests", 7]
    args = parse("serve", V3.name, *argv, "--max-replicas", 3)
    spec = ray_serve.engine_spec(args)
    assert (spec.model, spec.hosts, spec.devices) == (V3, 2, 8)
    assert spec.options["compile_cache"] == V3.parent / "cache"
    assert (spec.options["mesh"], spec.options["max_num_seqs"]) == ((2, 4), 8)
    assert (spec.max_queued_requests, spec.settings.model_name) == (7, V3.name)
    options = ray_options(args)
    assert options == RayOptions(ray=True, max_replicas=3)
    assert options is not None
    assert options.scales


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Nothing of Ray's in it, and nothing stays that a test sets."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", kept | {"HOME": str(tmp_path)})
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_cluster_of_ours_asks_for_a_token_and_reports_nothing(environment):
    start.protect()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    first = os.environ.pop("RAY_AUTH_TOKEN")
    assert len(first) == 64
    start.protect()
    assert os.environ["RAY_AUTH_TOKEN"] != first


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", ""])
def test_a_token_that_is_given_stays(environment, name):
    if name:
        os.environ[name] = "mine"
    else:
        (environment / ".ray").mkdir()
        (environment / ".ray" / "auth_token").write_text("mine")
    start.protect()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ.get("RAY_AUTH_TOKEN") == ("mine" if name == "RAY_AUTH_TOKEN" else None)


def test_who_wants_no_token_has_none(environment):
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "1"}
    start.protect()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_the_builder_needs_a_command_for_ray():
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]' -c constraints.txt")
    with pytest.raises(ConfigError, match="the command must have --ray"):
        ray_app.application({"command": f"serve {V3}"})
