"""The compile cache is trusted, so its folder must be ours alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.api import compile_cache as compile_cache_module
from mtp_jax.api.compile_cache import compile_cache, use_compile_cache
from mtp_jax.api.llm import LLM
from mtp_jax.api.local import local_runner
from mtp_jax.machine import program_folder
from tests.golden import model_dir


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    use_compile_cache(None)  # a model of another test may have asked for one
    yield
    use_compile_cache(None)


def test_the_last_folder_given_takes_what_is_compiled_then(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    first, second = tmp_path / "first", tmp_path / "second"

    def kept(factor: float) -> list[int]:
        jax.jit(lambda x: x * factor)(jnp.ones(3)).block_until_ready()
        return [sum(p.is_file() for p in folder.rglob("*")) for folder in (first, second)]

    use_compile_cache(first)
    (some, none) = kept(1.25)
    assert some
    assert not none
    use_compile_cache(second)
    (same, more) = kept(2.25)
    assert same == some
    assert more
    use_compile_cache(None)
    assert kept(3.25) == [same, more]
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_a_model_keeps_its_programs_in_the_folder_in_use(tmp_path):
    def kept(cache: Path | None) -> Path | None:
        return local_runner(
            LLM(model_dir("rigged"), compile_cache=cache, max_num_seqs=1, max_model_len=64).engine
        ).programs.kept.folder

    assert kept(None) is None
    assert kept(tmp_path) == compile_cache() == tmp_path / program_folder()


def compiled() -> None:
    jax.clear_caches()
    jax.jit(lambda x: x * 4.25)(jnp.ones(3)).block_until_ready()


def programs(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o2775, 0o770, 0o1777])
@pytest.mark.parametrize("linked", [False, True])
def test_below_a_folder_that_others_may_write_to_programs_lie_in_one_of_our_own(tmp_path, mode, linked):
    shared = volume = tmp_path / "volume"
    shared.mkdir()
    shared.chmod(mode)
    if linked:
        volume = tmp_path / "link"
        volume.symlink_to(shared)
    use_compile_cache(volume)
    own = shared / f"mtp-jax-{os.geteuid()}"
    assert compile_cache() == own / program_folder()
    assert stat.S_IMODE(own.stat().st_mode) & 0o777 == 0o700
    compiled()
    assert programs(own)
    # As a restarted pod finds them: by another number, if it is by number.
    before = programs(own)
    use_compile_cache(None)
    compile_cache_module._kept.clear()
    use_compile_cache(volume)
    compiled()
    assert programs(own) == before


def test_who_replaces_our_folder_changes_nothing(tmp_path):
    tmp_path.chmod(0o777)
    use_compile_cache(tmp_path)
    own = tmp_path / f"mtp-jax-{os.geteuid()}"
    own.rename(tmp_path / "aside")
    (own / program_folder()).mkdir(parents=True)
    compiled()
    assert programs(tmp_path / "aside")
    assert not programs(own)


def test_a_private_folder_that_others_could_put_another_for_is_used_by_number(tmp_path):
    tmp_path.chmod(0o777)
    use_compile_cache(tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "aside")
    (tmp_path / "mine" / program_folder()).mkdir(parents=True)
    compiled()
    assert programs(tmp_path / "aside")
    assert not programs(tmp_path / "mine")


def test_programs_that_others_could_change_are_deleted(tmp_path, caplog):
    """As kubelet opens all folders of a claim to a group, by ``fsGroup``."""
    tmp_path.chmod(0o2775)
    use_compile_cache(tmp_path)
    found = compile_cache()
    assert found is not None
    (found / "planted-cache").write_text("")
    (found / "folder").mkdir()
    (found / "folder" / "file").write_text("")
    found.chmod(0o2770)
    found.parent.chmod(0o2770)
    use_compile_cache(tmp_path)
    (told,) = caplog.messages
    assert "was open to others: the programs in it are deleted" in told
    assert compile_cache() == found
    assert not [*found.iterdir()]
    assert {stat.S_IMODE(f.stat().st_mode) & 0o777 for f in (found, found.parent)} == {0o700}


def refused(caplog: pytest.LogCaptureFixture, folder: Path | str) -> str:
    before = jax.config.values["jax_compilation_cache_dir"]
    use_compile_cache(folder)
    (told,) = caplog.messages
    assert "--no-compile-cache" in told
    assert "\n" not in told
    assert jax.config.values["jax_compilation_cache_dir"] == before
    return told


def test_a_link_in_the_place_of_our_folder_costs_the_cache_alone(tmp_path, caplog):
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    (tmp_path / "elsewhere").mkdir()
    (volume / f"mtp-jax-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    assert "Not a directory" in refused(caplog, volume) or "symbolic links" in caplog.text
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_without_numbers_of_folders_a_folder_in_a_strangers_hands_is_not_used(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(compile_cache_module, "_DESCRIPTORS", tmp_path / "no" / "proc")
    tmp_path.chmod(0o777)
    assert "others could put another folder in its place" in refused(caplog, tmp_path)


def test_another_owner_of_our_folder_costs_the_cache_alone(tmp_path, caplog, monkeypatch):
    """Also a file system that makes root's files somebody else's: root squash."""
    tmp_path.chmod(0o777)
    fstat = os.fstat

    def squashed(descriptor: int) -> os.stat_result:
        return os.stat_result([*fstat(descriptor)[:4], 65534, *fstat(descriptor)[5:10]])

    monkeypatch.setattr(os, "fstat", squashed)
    assert "belongs to uid 65534" in refused(caplog, tmp_path)


def test_without_a_home_folder_there_is_no_cache(caplog, monkeypatch):
    """A pod's uid that no passwd entry knows, without HOME."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert "home" in refused(caplog, "~/.cache/mtp-jax/xla")


def test_a_system_without_owners_of_files_has_no_cache(tmp_path, caplog, monkeypatch):
    monkeypatch.delattr(os, "geteuid")
    assert "on this system" in refused(caplog, tmp_path / "new")


def test_a_folder_that_cannot_be_made_costs_the_cache_alone(tmp_path, caplog):
    before = jax.config.values["jax_compilation_cache_dir"]
    (tmp_path / "file").write_text("")
    use_compile_cache(tmp_path / "file" / "cache")
    (told,) = caplog.messages
    assert "cannot be used (Not a directory)" in told
    assert "--no-compile-cache" in told
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_compile_cache_is_created_private(tmp_path, monkeypatch):
    changed = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: changed.update({name: value}))
    use_compile_cache(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert changed["jax_compilation_cache_dir"] == str(tmp_path / "new" / program_folder())
    assert (tmp_path / "new" / program_folder()).stat().st_mode & 0o777 == 0o700
