"""The files of configs/kubernetes parse, and their commands are ones that the command line knows."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtp_jax.cluster.commands import ray_app, ray_serve
from mtp_jax.cluster.commands.ray_options import ray_options
from mtp_jax.cluster.on_ray import start
from mtp_jax.cluster.on_ray.options import RayOptions
from mtp_jax.commands import cli
from mtp_jax.hosts.options import Hosts
from serve.routes.table import ROUTES
from tests import golden

ROOT = Path(ray_serve.__file__).parents[3]
FOLDER = ROOT / "configs" / "kubernetes"
V3 = str(golden.model_dir("v3"))


def documents(name: str) -> dict[str, Any]:
    """The documents of a file by kind."""
    found = [*yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))]
    assert all(document["apiVersion"] and document["metadata"]["name"] for document in found)
    return {document["kind"]: document for document in found}


def parse(command: str, **values: str) -> Any:
    """A command of `mtp-jax`, its variables filled in."""
    filled = re.sub(r"\$(\w+)", lambda match: values[match[1]], command)
    return cli.make_parser().parse_args(shlex.split(filled))


def test_every_file_has_a_test():
    assert {path.name for path in FOLDER.iterdir()} == {
        *("rayservice.yaml", "leaderworkerset.yaml", "gateway.yaml")
    }


@pytest.fixture
def service(monkeypatch) -> Any:
    monkeypatch.setattr(start, "find_spec", lambda name: object())
    monkeypatch.setenv("MTP_JAX_API_KEY", "key")
    monkeypatch.delenv("MTP_JAX_ADMIN_KEY", raising=False)
    return documents("rayservice.yaml")["RayService"]["spec"]


def test_the_application_of_ray_serve(service):
    serving = yaml.safe_load(service["serveConfigV2"])
    (application,) = serving["applications"]
    module, _, name = application["import_path"].partition(":")
    assert module == ray_app.__name__
    assert callable(getattr(ray_app, name))
    assert application["args"].keys() == {"command"}
    args = parse(application["args"]["command"].replace("/model", V3, 1))
    options = ray_options(args)
    assert isinstance(options, RayOptions)
    spec = ray_serve.engine_spec(args)
    assert spec.settings.host == serving["http_options"]["host"]  # which decides whether a key is needed
    assert spec.settings.api_keys == ("key",)
    (workers,) = service["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["numOfHosts"] == spec.hosts
    assert (workers["minReplicas"], workers["maxReplicas"]) == (options.min_replicas, options.most)
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == options.gpus == spec.devices
    assert int(limits["cpu"]) >= options.cpus


def test_the_cluster_of_ray_asks_for_a_token_and_has_the_pinned_version(service):
    cluster = service["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        names = {variable["name"] for variable in container["env"]}
        assert names >= {"MTP_JAX_API_KEY", "RAY_USAGE_STATS_ENABLED"}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_engines_over_several_hosts(monkeypatch):
    found = documents("leaderworkerset.yaml")
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    size = template["size"]
    for rank, name in enumerate(("leaderTemplate", "workerTemplate")):
        (container,) = template[name]["spec"]["containers"]
        (line,) = container["args"]
        assert line.startswith("exec mtp-jax serve ")
        address = "mtp-jax-0.mtp-jax.default"
        given = {"LWS_GROUP_SIZE": f"{size}", "LWS_WORKER_INDEX": f"{rank}", "LWS_LEADER_ADDRESS": address}
        args = parse(line.removeprefix("exec mtp-jax "), **given)
        assert Hosts(args.hosts, args.rank, args.coordinator).address == (address, 9001)
        assert args.mesh[0] * args.mesh[1] == size * int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert {v["name"] for v in container["env"]} == {"MTP_JAX_SECRET", "MTP_JAX_API_KEY"}
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    (worker,) = template["workerTemplate"]["spec"]["containers"]
    probes = {leader[key]["httpGet"]["path"] for key in leader if key.endswith("Probe")}
    assert probes <= {route.path for route in ROUTES if route.access == "open"}
    assert not [key for key in worker if key.endswith("Probe")]  # it has no server
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels


def test_the_gateway_finds_the_leaders():
    found = documents("gateway.yaml")
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    assert container["command"] == ["smg"]
    at = arguments.index("--selector")
    labels = dict(pair.split("=") for pair in arguments[at + 1 : at + 3])
    leaders = documents("leaderworkerset.yaml")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert labels == leaders["leaderTemplate"]["metadata"]["labels"]
    (engine,) = leaders["leaderTemplate"]["spec"]["containers"]
    assert f"--service-discovery-port={engine['ports'][0]['containerPort']}" in arguments
    assert found["Service"]["spec"]["selector"] == found["Deployment"]["spec"]["selector"]["matchLabels"]
    account = found["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert (
        found["RoleBinding"]["subjects"][0]["name"] == found["ServiceAccount"]["metadata"]["name"] == account
    )
