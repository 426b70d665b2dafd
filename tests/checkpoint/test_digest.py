"""Digests of checkpoint folders: what changes them, and what does not."""

from mtp_jax.checkpoint.digest import folder_digest


def test_a_folder_is_known_by_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = folder_digest(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("of this host alone")
    assert folder_digest(tmp_path) == before
    (tmp_path / "config.json").write_text("[]")
    assert folder_digest(tmp_path) != before


def test_weights_are_known_by_what_they_hold_from_beginning_to_end(tmp_path):
    path, size = tmp_path / "model.safetensors", 1 << 20
    path.write_bytes(bytes(size))
    before, whole = folder_digest(tmp_path, weights=True), folder_digest(tmp_path)
    (tmp_path / "README.md").write_text("x")
    assert folder_digest(tmp_path, weights=True) == before
    assert folder_digest(tmp_path) != whole
    found = {before}
    for begin, end in (
        (1000, 1001),
        (size // 2, size),
        (size - 1, size),
    ):
        path.write_bytes(bytes(begin) + b"x" * (end - begin) + bytes(size - end))
        found.add(folder_digest(tmp_path, weights=True))
    path.write_bytes(bytes(size + 1))
    found.add(folder_digest(tmp_path, weights=True))
    assert len(found) == 5
