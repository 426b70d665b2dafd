"""A GGUF file is converted once into the user's cache, wherever a model is named."""

from pathlib import Path

import pytest

import mtp_jax.checkpoint.gguf_llama as gguf_llama
from mtp_jax import LLM, ConfigError, SamplingParams
from mtp_jax.api.demo import demo_model
from mtp_jax.api.load import _located
from mtp_jax.api.model_folder import model_folder
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Silent
from mtp_jax.commands import cli
from tests.api.helpers import SIZES
from tests.checkpoint.gguf_files import write

rest = pytest.mark.rest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny-f32.gguf")


def conversions(home: Path) -> list[Path]:
    """Folders in the cache, also of conversions that have not ended."""
    return sorted(home.glob(".cache/mtp-jax/gguf/*"))


def test_a_file_is_converted_once(home, file, tmp_path, monkeypatch):
    assert model_folder(tmp_path) == tmp_path
    folder = model_folder(file)
    assert folder.name == "tiny-f32"
    assert conversions(home) == [folder.parent]
    assert folder.parent.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(gguf_llama, "write_gguf", None)
    assert model_folder(file) == folder
    renamed = file.rename(tmp_path / "without-an-ending")
    with pytest.raises(TypeError):  # a folder of another name: it would be converted
        model_folder(renamed)


def test_another_file_of_the_same_name_has_another_folder(home, file):
    first = model_folder(file)
    assert (
        model_folder(write(file, facts=None, kinds=lambda name, a: "F32" if a.ndim == 1 else "F16")) != first
    )
    assert len(conversions(home)) == 2


def test_an_interrupted_conversion_leaves_nothing(home, file, monkeypatch):
    whole = gguf_llama.write_gguf

    def interrupted(*args):
        whole(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_llama, "write_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model_folder(file)
    assert not conversions(home)


def test_of_two_conversions_at_a_time_either_serves(home, file, monkeypatch):
    whole = gguf_llama.write_gguf

    def overtaken(*args):
        monkeypatch.setattr(gguf_llama, "write_gguf", whole)
        model_folder(file)
        whole(*args)

    monkeypatch.setattr(gguf_llama, "write_gguf", overtaken)
    folder = model_folder(file)
    assert (folder / "config.json").is_file()
    assert conversions(home) == [folder.parent]


def test_without_a_home_it_says_so(file, monkeypatch):
    monkeypatch.setattr("os.path.expanduser", str)
    with pytest.raises(ConfigError, match="but there is no home folder; set HOME"):
        model_folder(file)


def test_a_model_may_be_named_by_its_file(home, file, capsys):
    assert cli.main(["info", str(file)]) == 0
    out, progress = capsys.readouterr()
    assert f"{conversions(home)[0]}/tiny-f32" in out
    assert "convert tiny-f32.gguf " in progress
    assert cli.main(["generate", "-q", "--model", str(file), "-p", "it", "--temperature", "-1"]) == 2
    assert capsys.readouterr().err.startswith("error: --temperature -1")


@rest
def test_llm_takes_a_file(home, file):
    llm = LLM(file, **SIZES)
    (output,) = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
    assert llm.folders == (model_folder(file),)


def test_demo_names_the_demo_model_unless_a_folder_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _located(LLMOptions("demo"), Silent()) == (demo_model(),)
    (tmp_path / "demo").mkdir()
    assert _located(LLMOptions("demo"), Silent()) == (Path("demo"),)
