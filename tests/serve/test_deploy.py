"""The files of serve/deploy name flags, routes, paths and metrics that exist."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import serve
from mtp_jax.commands import cli
from serve.base.settings import Settings
from serve.routes.table import ROUTES
from tests.serve.helpers import NAME

ROOT = Path(serve.__file__).parent.parent
DEPLOY = ROOT / "serve" / "deploy"
DOCS = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
IMAGE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
DRAIN = 30 + 6  # the default of --drain-seconds, and what run.py adds


def read(name: str) -> Any:
    found = [*yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))]
    return found[0] if len(found) == 1 else found


def entry() -> list[str]:
    """Arguments of the command of the image."""
    return command()[1:]


def command() -> list[str]:
    (line,) = [line for line in IMAGE.splitlines() if line.startswith("ENTRYPOINT ")]
    return json.loads(line.removeprefix("ENTRYPOINT "))


def test_the_image_starts_a_server_and_copies_what_there_is():
    args = cli.make_parser().parse_args([*entry(), "/model"])
    assert (args.host, args.compile_cache, args.model) == ("0.0.0.0", Path("/cache"), Path("/model"))
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert all((ROOT / line[1:]).exists() for line in ignored if line.startswith("!"))
    assert "USER 10001" in IMAGE
    assert "/health" in IMAGE
    for shell in ("ENV PATH=/app/bin:$PATH", "'PATH=/app/bin:$PATH' > /etc/profile.d/"):
        assert shell in IMAGE


def test_the_image_has_what_it_installs_and_runs():
    """The context holds all that the wheel is made of; arguments and probe name what there is."""
    kept = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml"}
    wanted |= {*project["project"]["license-files"], *re.findall(r"/source/([\w.]+)", IMAGE)}
    assert wanted == kept
    copied = re.findall(r"^COPY (?:--from=(\w+) )?(\S+) (\S+)$", IMAGE, re.MULTILINE)
    assert copied == [("", ".", "/source"), ("build", "/app", "/app")]
    assert "python -m venv /app " in IMAGE
    assert command()[0] == f"/app/bin/{next(iter(project['project']['scripts']))}"
    extras = {*re.findall(r"EXTRA='\[(\w+)\]'", IMAGE), *re.findall(r"\*(\w+)\*\)", IMAGE)}
    assert extras == {"cuda", "ray"} <= {*project["project"]["optional-dependencies"]}
    (probe,) = re.findall(r"^HEALTHCHECK .*? CMD (\[.*\])$", IMAGE, re.MULTILINE)
    program, option, code = json.loads(probe)
    assert (program, option) == ("/app/bin/python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", code)
    assert path in {route.path for route in ROUTES if route.access == "open"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_completes_a_prompt():
    """buildah needs no daemon. BUILDAH_ARGS are further arguments, such as volumes with settings of pip."""
    if not (tool := shutil.which("buildah")):
        pytest.skip("needs buildah, which builds images without a daemon")

    def run(*arguments: str) -> str:
        done = subprocess.run([tool, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()

    for base in {*re.findall(r"^FROM (\S+)", IMAGE, re.MULTILINE)}:
        if subprocess.run([tool, "from", "--name", "mtp-jax-base", base], capture_output=True).returncode:
            pytest.skip(f"needs {base} from a registry, or in buildah's store")
        run("rm", "mtp-jax-base")
    ignored = ["--ignorefile", str(DEPLOY / "Dockerfile.dockerignore"), "--isolation", "chroot"]
    more = shlex.split(os.environ.get("BUILDAH_ARGS", ""))
    image = run("build", "--quiet", *ignored, *more, "--file", str(DEPLOY / "Dockerfile"), ".").splitlines()[
        -1
    ]
    container = run("from", image)
    try:
        program, *arguments = command()
        inside = ["run", "--isolation", "chroot", container, "--"]
        assert "--drain-seconds" in run(*inside, program, *arguments, "--help")
        shown = run(*inside, program, "generate", "-p", "def ", "--max-tokens", "4", "--temperature", "0")
        assert shown.strip()
        assert run(*inside, "id", "-u") == "10001"
    finally:
        run("rm", container)
        run("rmi", image)


class Unit(configparser.ConfigParser):
    """With keys as they are written: systemd's have capitals."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def test_the_unit_of_systemd():
    unit = Unit(strict=False, interpolation=None)
    unit.read(DEPLOY / "mtp-jax.service")
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/bin/mtp-jax")
    args = cli.make_parser().parse_args(arguments)
    assert args.compile_cache == Path("/var/cache") / unit["Service"]["CacheDirectory"]
    assert unit["Service"]["CacheDirectoryMode"] == "0700"  # others must not write there
    assert int(unit["Service"]["TimeoutStopSec"]) > DRAIN


def test_kubernetes():
    deployment, service = read("kubernetes.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert cli.make_parser().parse_args([*entry(), *container["args"]])
    probes = [container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")]
    assert probes == ["/ready", "/ready", "/health"]
    assert {*probes} <= {route.path for route in ROUTES if route.access == "open"}
    assert pod["terminationGracePeriodSeconds"] > DRAIN
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    (port,) = service["spec"]["ports"]
    assert (port["targetPort"], container["ports"][0]["containerPort"]) == ("http", 8000)
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert [route.path for route in ROUTES if route.access == "metrics"] == [
        annotations["prometheus.io/path"]
    ]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounts["cache"] == entry()[entry().index("--compile-cache") + 1]
    probe = container["startupProbe"]
    assert f"--start-period={probe['periodSeconds'] * probe['failureThreshold']}s" in IMAGE


def test_compose_mounts_files_that_exist():
    compose = read("compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] if "/" not in source else (DEPLOY / source).exists()
    prometheus = read("prometheus.yml")
    (scrape,) = prometheus["scrape_configs"]
    mounted = {line.split(":")[1] for line in compose["services"]["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in (*prometheus["rule_files"], "prometheus.yml")} == mounted
    assert scrape["metrics_path"] in {route.path for route in ROUTES}
    assert scrape["static_configs"][0]["targets"] == ["mtp-jax:8000"]
    assert scrape["authorization"]["credentials_file"] in str(compose["services"]["prometheus"]["command"])
    assert compose["services"]["mtp-jax"]["read_only"] is True
    assert int(compose["services"]["mtp-jax"]["stop_grace_period"].rstrip("s")) > DRAIN
    assert read("grafana/datasources.yaml")["datasources"][0]["type"] == "prometheus"
    folder = read("grafana/dashboards.yaml")["providers"][0]["options"]["path"]
    assert f"../grafana:{folder}:ro" in compose["services"]["grafana"]["volumes"]


def test_the_page_names_flags_and_metrics_that_exist(capsys):
    with pytest.raises(SystemExit):
        cli.make_parser().parse_args(["serve", "--help"])
    known = capsys.readouterr().out
    assert not [flag for flag in {*re.findall(r"`(--[a-z-]+)", DOCS)} if flag not in known]
    code = (ROOT / "serve" / "watch" / "metrics.py").read_text(encoding="utf-8")
    assert NAME.findall(DOCS)
    assert not [name for name in NAME.findall(DOCS) if name.removesuffix("_total") not in code]
    assert Settings("m").drain_seconds + 6 == DRAIN


def test_services_that_may_be_applied_together_have_names_of_their_own():
    folders = DEPLOY, ROOT / "configs" / "kubernetes"
    found = [
        (document["kind"], document["metadata"]["name"])
        for path in (path for folder in folders for path in folder.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if document.get("kind") == "Service"
    ]
    assert len(found) >= 3
    assert len({*found}) == len(found)
