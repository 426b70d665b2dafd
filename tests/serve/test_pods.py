"""The server starts as kubelet starts it: by its manifests, as a user whom nothing knows, on volumes."""

import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

import serve
from mtp_jax.api.demo import demo_model

ROOT = Path(serve.__file__).parent.parent
DEPLOY, KUBERNETES = ROOT / "serve" / "deploy", ROOT / "configs" / "kubernetes"
PYTHON = Path(sys.executable)
OWN, GROUP = 10001, 10001  # the image's user, and the manifest's fsGroup
# OpenShift and `docker run --user` choose any; no passwd entry has it.
ANY = 1_000_650_000
# Owner, group and mode of a volume, as kubelet and storage classes make them.
VOLUMES = {
    "emptyDir": (0, 0, 0o777),
    "emptyDir-fsGroup": (0, GROUP, 0o2777),
    "claim-fsGroup": (0, GROUP, 0o2775),
    "own-group": (OWN, GROUP, 0o770),
    "own": (OWN, GROUP, 0o700),
    "image": (0, 0, 0o1777),
    "nobody": (65534, 65534, 0o777),
    "read-only": (0, 0, 0o755),
}
REFUSES = {(OWN, "read-only"), (ANY, "read-only"), (ANY, "own"), (ANY, "own-group"), (ANY, "claim-fsGroup")}
CHECK = """
import json, logging, os, sys
import jax
from mtp_jax.api import compile_cache

told = []
logging.Handler.emit = lambda self, record: told.append(record.getMessage())
compile_cache._LOG.addHandler(logging.Handler())
found = {}
for name in sys.argv[1:]:
    compile_cache.use_compile_cache(name)
    kept = compile_cache.compile_cache()
    jax.clear_caches()
    jax.jit(lambda x: x * 2.5)(1.0).block_until_ready()
    found[name] = [kept and str(kept), kept and len(os.listdir(kept)), list(told)]
    told.clear()
    compile_cache.use_compile_cache(None)
print(json.dumps(found))
"""


def as_user(uid: int, groups: list[int]) -> list[str]:
    """The beginning of a command that runs as another user, whose further groups are those of volumes.

    The user may read all files, as in a container: here Python may lie in a home folder.
    """
    more = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
    reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"] if uid else []
    return ["setpriv", f"--reuid={uid}", "--regid=0", *more, *reads, "--no-new-privs", "--"]


@pytest.fixture(scope="module")
def outside() -> Iterator[Path]:
    """A folder that every user may pass through, unlike those of the tests."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip(
            "needs root, to become another user, and setpriv: run it as root; apt-get install util-linux"
        )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def environment(**more: str) -> dict[str, str]:
    """The environment of a container: the image's PATH, no HOME, and the manifest's variables."""
    path = re.search(r"^ENV PATH=(\S+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.M)
    assert path
    here = path[1].replace("/app/bin", str(PYTHON.parent)).replace("$PATH", "/usr/local/bin:/usr/bin:/bin")
    return {"PATH": here, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


def volume(folder: Path, name: str) -> Path:
    owner, group, mode = VOLUMES[name]
    made = folder / name
    made.mkdir()
    os.chown(made, owner, group)
    made.chmod(mode)
    return made


@pytest.mark.parametrize("uid", [OWN, ANY, pytest.param(0, marks=pytest.mark.rest)])
def test_every_user_keeps_programs_on_every_volume_or_is_told_why_not(outside: Path, uid: int):
    with pytest.raises(KeyError):
        pwd.getpwuid(ANY)
    with tempfile.TemporaryDirectory(dir=outside) as folder:
        os.chmod(folder, 0o755)
        volumes = {str(volume(Path(folder), name)): name for name in VOLUMES}
        home = "~/.cache/mtp-jax/xla"
        groups = [GROUP] if uid == OWN else []  # fsGroup is a supplementary group of every process
        ran = subprocess.run(
            [*as_user(uid, groups), PYTHON, "-c", CHECK, *volumes, *([home] if uid == ANY else [])],
            env=environment(),
            cwd="/",
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        found = json.loads(ran.stdout)
        if uid == ANY:
            kept, _, (told,) = found.pop(home)
            assert kept is None
            assert "home" in told
        for path, (kept, programs, told) in found.items():
            if (uid, volumes[path]) in REFUSES:
                assert kept is None
                assert len(told) == 1, told
                assert "Permission denied" in told[0]
                continue
            assert Path(kept).is_relative_to(path)
            assert (programs, told) == (1, []), path


@contextmanager
def pod(
    folder: Path, manifest: str, uid: int, volume_kind: str = "emptyDir"
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The server of a manifest, with its mounts in a folder, a simulated model and any port."""
    argv, container, groups = COMMANDS[manifest]()
    places = {
        "/model": folder / "model",
        "/cache": volume(folder, volume_kind),
        "/srv/model": folder / "model",
    }
    (folder / "model").mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model() / file, folder / "model" / file)
    places |= {"/var/cache/mtp-jax": places["/cache"]}
    words = [str(places.get(word, word)) for word in argv]
    assert words[0].endswith("mtp-jax")
    one_cpu = ["taskset", "--cpu-list", f"{min(os.sched_getaffinity(0))}"]
    running = subprocess.Popen(
        [
            *one_cpu,
            *as_user(uid, groups),
            PYTHON,
            "-m",
            "mtp_jax",
            *words[1:],
            "--simulate",
            "0.8",
            "--port",
            "0",
        ],
        env=environment(MTP_JAX_API_KEY="key"),
        cwd="/",
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    with running:
        try:
            yield running, container
        finally:
            running.kill()


def image() -> list[str]:
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.M)
    return json.loads(line)


def kubernetes() -> tuple[list[str], dict[str, Any], list[int]]:
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    spec = deployment["spec"]["template"]
    (container,) = spec["spec"]["containers"]
    found = {**container, "annotations": spec["metadata"]["annotations"]}
    assert spec["spec"]["securityContext"]["runAsUser"] == OWN
    return [*image(), *container["args"]], found, [spec["spec"]["securityContext"]["fsGroup"]]


def compose() -> tuple[list[str], dict[str, Any], list[int]]:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert "command" not in services["mtp-jax"]  # so it is the image's alone, with the embedded model
    return image(), {}, []


def systemd() -> tuple[list[str], dict[str, Any], list[int]]:
    text = (DEPLOY / "mtp-jax.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    return shlex.split(line), {}, []


COMMANDS = {"kubernetes.yaml": kubernetes, "compose.yaml": compose, "mtp-jax.service": systemd}


def address_of(running: subprocess.Popen[str]) -> str:
    """The address, once the server is ready."""
    assert running.stderr
    said = []
    for line in running.stderr:
        said.append(line)
        if ready := re.match(r"ready in .*: http://[^:]*:(\d+)/v1", line):
            return f"http://127.0.0.1:{ready[1]}"
    raise AssertionError("".join(said))


@pytest.mark.parametrize(
    ("manifest", "uid"),
    [
        ("kubernetes.yaml", OWN),
        pytest.param("kubernetes.yaml", ANY, marks=pytest.mark.rest),
        pytest.param("kubernetes.yaml", 0, marks=pytest.mark.rest),
        pytest.param("compose.yaml", OWN, marks=pytest.mark.rest),
        pytest.param("compose.yaml", ANY, marks=pytest.mark.rest),
        pytest.param("mtp-jax.service", ANY, marks=pytest.mark.rest),
    ],
)
def test_a_manifest_starts_a_server_that_its_probes_and_prometheus_reach(outside: Path, manifest, uid):
    with tempfile.TemporaryDirectory(dir=outside) as folder:
        os.chmod(folder, 0o755)
        with pod(Path(folder), manifest, uid) as (running, container):
            address = address_of(running)
            paths = [container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")]
            about = container.get("annotations", {})
            if about.get("prometheus.io/scrape") == "true":
                paths.append(about["prometheus.io/path"])
                assert int(about["prometheus.io/port"]) == container["ports"][0]["containerPort"]
            for path in paths or ["/health"]:
                assert httpx2.get(f"{address}{path}").status_code == 200, path
            assert httpx2.get(f"{address}/v1/models").status_code == 401
            running.terminate()
            assert running.wait(60) == 0


def test_the_shell_of_a_pod_finds_the_command_and_fills_in_its_variables(tmp_path: Path):
    """Of engines over several hosts, whose pods run `sh -c`, by the PATH of the image."""
    documents = yaml.safe_load_all((KUBERNETES / "leaderworkerset.yaml").read_text(encoding="utf-8"))
    found = next(d for d in documents if d["kind"] == "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    program = tmp_path / "bin" / "mtp-jax"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    program.chmod(0o755)
    given = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.default"}
    env = environment(**given)
    env["PATH"] = env["PATH"].replace(str(PYTHON.parent), str(program.parent))
    for name in ("leaderTemplate", "workerTemplate"):
        (container,) = found[name]["spec"]["containers"]
        ran = subprocess.run(
            [*container["command"], *container["args"]], env=env, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        words = ran.stdout.split()
        assert words[:2] == ["serve", "/model"]
        assert words[words.index("--coordinator") + 1] == "leader.default:9000"
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts >= {"/model", words[words.index("--compile-cache") + 1]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["emptyDir", "claim-fsGroup"])
def test_a_restarted_pod_compiles_nothing_anew(outside: Path, kind: str):
    with tempfile.TemporaryDirectory(dir=outside) as folder:
        os.chmod(folder, 0o755)
        cache = volume(Path(folder), kind)
        argv = [
            *as_user(OWN, [GROUP]),
            PYTHON,
            "-m",
            "mtp_jax",
            "generate",
            "--compile-cache",
            cache,
            "--prompt",
            "def f",
            "-q",
        ]
        kept = []
        for _ in range(2):
            ran = subprocess.run(argv, env=environment(), cwd="/", capture_output=True)
            assert ran.returncode == 0, ran.stderr
            kept.append({*cache.rglob("*-cache")})
        assert kept[0]
        assert kept[0] == kept[1]
