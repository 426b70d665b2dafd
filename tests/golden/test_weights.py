"""Assembled checkpoints are, byte for byte, those that the numbers were computed from."""

import hashlib

from tests.golden import GOLDEN, HEADS, V4, VARIANTS, model_dir


def test_every_checkpoint_has_the_bytes_it_was_made_with():
    root = model_dir("v3").parent.parent
    lines = (line.split() for line in (GOLDEN / "SHA256SUMS").read_text().splitlines())
    sums = {name: digest for digest, name in lines}
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.safetensors")}
    assert found.keys() == sums.keys()
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()} == sums
    assert {name.split("/")[0] for name in sums} == {*VARIANTS, *HEADS, *V4}


def test_settings_are_beside_the_weights():
    for variant in (*VARIANTS, *HEADS, *V4):
        for source in GOLDEN.glob(f"{variant}/*/*.json"):
            assert (model_dir(variant, source.parent.name) / source.name).read_bytes() == source.read_bytes()
