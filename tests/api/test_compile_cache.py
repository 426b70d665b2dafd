"""The compile cache is trusted, so its folder must be ours alone."""

import jax
import pytest

from mtp_jax.api.compile_cache import use_compile_cache
from mtp_jax.errors import ConfigError


def test_compile_cache_must_be_private(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    before = jax.config.values["jax_compilation_cache_dir"]
    with pytest.raises(ConfigError, match="writable by you alone"):
        use_compile_cache(shared)
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_compile_cache_is_created_private(tmp_path, monkeypatch):
    changed = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: changed.update({name: value}))
    use_compile_cache(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert changed["jax_compilation_cache_dir"] == str(tmp_path / "new")
