"""The compile cache is trusted, so its folder must be ours alone."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.api.compile_cache import use_compile_cache
from mtp_jax.errors import ConfigError
from mtp_jax.machine import program_folder


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


def test_compile_cache_must_be_private(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    before = jax.config.values["jax_compilation_cache_dir"]
    with pytest.raises(ConfigError, match="writable by you alone"):
        use_compile_cache(shared)
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_a_folder_that_cannot_be_made_costs_the_cache_alone(tmp_path, caplog):
    before = jax.config.values["jax_compilation_cache_dir"]
    (tmp_path / "file").write_text("")
    use_compile_cache(tmp_path / "file" / "cache")
    (told,) = caplog.messages
    assert "cannot be made (Not a directory)" in told
    assert "--no-compile-cache" in told
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_compile_cache_is_created_private(tmp_path, monkeypatch):
    changed = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: changed.update({name: value}))
    use_compile_cache(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert changed["jax_compilation_cache_dir"] == str(tmp_path / "new" / program_folder())
    assert (tmp_path / "new" / program_folder()).stat().st_mode & 0o777 == 0o700
