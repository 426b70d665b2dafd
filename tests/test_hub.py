"""Models by name, against a stand-in that speaks a hub's API: listings, redirects, ETags, error codes."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from mtp_jax import LLM
from mtp_jax.api.model_folder import model_folder
from mtp_jax.commands import cli
from mtp_jax.commands.cli import find_folders, make_parser
from mtp_jax.commands.server_options import settings_of
from mtp_jax.errors import ConfigError
from mtp_jax.hub import fetch, is_name
from tests.golden import model_dir

SHA = hashlib.sha1(b"release").hexdigest()
WEIGHTS = bytes(range(256)) * 64
FILES = {
    "config.json": b'{"model_type": "deepseek_v3"}',
    "tokenizer.json": b"{}",
    "additional_chat_templates/tools.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "modeling.py": b"raise SystemExit('code was run')",
    "pytorch_model.bin": b"pickle",
    "original/model.safetensors": b"in another layout",
}


@dataclass
class Hub:
    """Repositories by name, and the answers of the hub about them.

    Attributes:
        denied: the status, and the code of the header ``X-Error-Code``, of repositories that are not shown.
        cut: bytes after which the connection ends, of each of the next downloads of weights.
        asked: the paths of all requests, and for downloads their ranges.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    denied: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: list[int] = field(default_factory=list)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def downloads(self) -> set[str]:
        """The files that were asked for."""
        return {path.partition(f"/{SHA}/")[2] for path, _ in self.asked if "/resolve/" in path}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append((self.path, self.headers.get("Range")))
            path = self.path.partition("?")[0].strip("/").split("/")
            if path[0] == "cdn":
                return self.blob("/".join(path[1:3]), "/".join(path[3:]))
            name = "/".join(path[2:4] if path[0] == "api" else path[:2])
            if name in hub.denied:
                return self.answer(*hub.denied[name])
            if name not in hub.files:
                return self.answer(401, "RepoNotFound")
            if path[0] == "api" and path[4:5] == ["tree"]:
                return self.json([self.entry(p, data) for p, data in hub.files[name].items()])
            if path[0] == "api":
                if path[5:] not in ([], ["main"]):
                    return self.answer(404, "RevisionNotFound")
                return self.json({"id": name, "modelId": name, "sha": SHA, "siblings": [], "tags": []})
            return self.resolve(name, "/".join(path[4:]))

        def entry(self, path: str, data: bytes) -> dict[str, Any]:
            digest = hashlib.sha256(data).hexdigest()
            large = {"lfs": {"oid": digest, "size": len(data), "pointerSize": 130}}
            of = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            return of | (large if path.endswith(".safetensors") else {})

        def resolve(self, name: str, path: str) -> None:
            data = hub.files[name][path]
            if not path.endswith(".safetensors"):
                etag = hashlib.sha1(data).hexdigest()
                return self.answer(200, data=data, more={"X-Repo-Commit": SHA, "ETag": f'"{etag}"'})
            linked = {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": len(data)}
            # Another computer's address: a location without a host is a repository that was renamed.
            cdn = f"http://{self.headers['Host'].replace('127.0.0.1', 'localhost')}/cdn/{name}/{path}"
            where = {"X-Repo-Commit": SHA, "Location": cdn}
            return self.answer(302, more=where | linked)

        def blob(self, name: str, path: str) -> None:
            data, asked = hub.files[name][path], self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").partition("-")[0] or 0)
            last = len(data) - 1
            more = {"Content-Range": f"bytes {start}-{last}/{len(data)}"} if asked else {}
            self.answer(206 if asked else 200, data=data[start:], more=more, cut=hub.cut)

        def json(self, value: object) -> None:
            self.answer(200, data=json.dumps(value).encode(), more={"Content-Type": "application/json"})

        def answer(
            self,
            status: int,
            code: str = "",
            data: bytes = b"",
            more: dict[str, Any] | None = None,
            cut: list[int] | None = None,
        ) -> None:
            self.send_response(status)
            headers = {"Content-Length": len(data), "X-Error-Code": code or "none", **(more or {})}
            for key, value in headers.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "HEAD":
                return
            most = cut.pop(0) if cut else len(data)
            self.wfile.write(data[:most])
            self.close_connection = most < len(data)

    return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub with one release, and an empty cache of this test's own."""
    hub = Hub({"org/name": dict(FILES)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    at(monkeypatch, server.server_port)
    for module in (_http, file_download):  # they sleep before they try again
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)  # fewer bytes are not written if they are cut
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def at(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let the client ask the hub at a port of this computer; the environment is read at its import."""
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every connection be refused: nothing listens at port 9."""
    at(monkeypatch, 9)


def test_only_data_is_fetched_and_only_once(hub: Hub) -> None:
    folder = fetch("org/name")
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {
        "config.json",
        "tokenizer.json",
        "additional_chat_templates/tools.jinja",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    hub.asked.clear()
    assert fetch("org/name") == folder
    assert not hub.downloads()


def test_weights_may_be_left_out(hub: Hub) -> None:
    folder = fetch("org/name", weights=False)
    assert (folder / "config.json").exists()
    assert not list(folder.glob("*.safetensors"))
    assert not {name for name in hub.downloads() if name.endswith(".safetensors")}


def test_the_cache_serves_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("org/name")
    with monkeypatch.context() as patch:
        unreachable(patch)
        assert fetch("org/name") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/name") == folder


@pytest.mark.parametrize("offline", [False, True])
def test_a_cache_that_lacks_the_weights_is_told(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    fetch("org/name", weights=False)
    unreachable(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    why = "HF_HUB_OFFLINE keeps it from being asked" if offline else "the hub did not answer"
    for name in ("org/name", "org/never-seen"):
        with pytest.raises(ConfigError, match=f"the cache of the hub does not have all of {name}, and {why}"):
            fetch(name)


def test_a_download_that_is_cut_goes_on(hub: Hub) -> None:
    hub.cut = [1000]
    assert (fetch("org/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert [of for path, of in hub.asked if path.startswith("/cdn/")] == [None, "bytes=768-"]


def test_files_that_have_arrived_are_kept(hub: Hub) -> None:
    hub.cut = 20 * [0]  # more often than the client tries
    with pytest.raises(ConfigError, match=r"the download of org/name ended: .*the same command goes on"):
        fetch("org/name")
    hub.cut = []
    hub.asked.clear()
    assert (fetch("org/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads() == {"model.safetensors"}, "whole files were fetched again"


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (401, "RepoNotFound", "neither a folder nor, for this user, a model of the hub.*HF_TOKEN"),
        (404, "RepoNotFound", "neither a folder nor, for this user, a model of the hub"),
        (403, "GatedRepo", "is gated: accept its terms.*hf auth login"),
        (500, "", "does not have all of org/closed, and the hub .*HfHubHTTPError"),
    ],
)
def test_a_model_that_is_not_shown(hub: Hub, status: int, code: str, told: str) -> None:
    hub.denied["org/closed"] = status, code
    with pytest.raises(ConfigError, match=told) as caught:
        fetch("org/closed")
    assert "\n" not in str(caught.value)


def test_a_revision_that_is_not_there(hub: Hub) -> None:
    assert fetch("org/name", "main") == fetch("org/name", SHA)
    with pytest.raises(ConfigError, match="no revision 'v9'"):
        fetch("org/name", "v9")


def test_pickles_alone_are_refused(hub: Hub) -> None:
    hub.files["org/pickles"] = {name: FILES[name] for name in ("config.json", "pytorch_model.bin")}
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors.*never pickles"):
        fetch("org/pickles")
    assert "pytorch_model.bin" not in hub.downloads()


def release(hub: Hub, name: str, folder: Path) -> None:
    """Put a folder on the hub."""
    hub.files[name] = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.rest
def test_a_model_is_generated_with_by_its_name(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    release(hub, "tiny/v3", model_dir("v3"))
    release(hub, "tiny/draft", model_dir("v3", "nextn"))
    command = ["generate", "--token-ids", "5,9", "--max-tokens", "4", "-q"]
    assert cli.main([*command, "--model", str(model_dir("v3"))]) == 0
    told = capsys.readouterr().out
    assert cli.main([*command, "--model", "tiny/v3", "--draft-model", "tiny/draft"]) == 0
    assert capsys.readouterr().out == told


def test_a_command_finds_the_folders_of_its_models(hub: Hub) -> None:
    release(hub, "tiny/v3", model_dir("v3"))
    release(hub, "tiny/draft", model_dir("v3", "nextn"))
    args = ["serve", "tiny/v3", "--draft-model", "tiny/draft", "--revision", SHA, "-q"]
    found = make_parser().parse_args(args)
    find_folders(found)
    assert settings_of(found).model_name == "tiny/v3"
    for folder, own in ((found.model, model_dir("v3")), (found.draft_model, model_dir("v3", "nextn"))):
        assert {p.name for p in folder.iterdir()} == {p.name for p in own.iterdir() if p.is_file()}


def test_a_model_is_loaded_by_its_name(hub: Hub) -> None:
    release(hub, "tiny/v3", model_dir("v3"))
    llm = LLM("tiny/v3", revision="main", simulate=(0.5,))
    assert llm.config == LLM(model_dir("v3"), simulate=(0.5,)).config
    found = make_parser().parse_args(["serve", "tiny/v3", "--load-format", "dummy"])
    find_folders(found)
    assert (found.model / "config.json").exists()
    assert not {name for name in hub.downloads() if name.endswith(".safetensors")}


def test_facts_of_a_model_need_no_weights(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    release(hub, "tiny/v3", model_dir("v3"))
    for command in (["info", "tiny/v3"], ["plan", "tiny/v3", "--gpus", "1", "--context", "512"]):
        assert cli.main(command) == 0, capsys.readouterr().err
    assert not {name for name in hub.downloads() if name.endswith(".safetensors")}
    capsys.readouterr()
    for name, told in (
        ("tiny/v3", "tiny/v3 has no revision 'v9'"),
        ("demo", "--revision is of a model of a hub"),
    ):
        assert cli.main(["info", name, "--revision", "v9"]) == 2
        err = capsys.readouterr().err
        assert told in err
        assert err.count("\n") == 1


def test_a_path_has_no_revision() -> None:
    with pytest.raises(ConfigError, match="revision = 'v1' is of a model of a hub"):
        model_folder(model_dir("v3"), revision="v1")


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_name("deepseek-ai/DeepSeek-V3.2")
    assert is_name(Path("org/name"))
    for other in ("demo", "/org/name", "./name", "org/", "a/b/c", "and / or", "-x/y"):
        assert not is_name(other)
    (tmp_path / "org/name").mkdir(parents=True)
    assert not is_name("org/name")
