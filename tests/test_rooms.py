"""docs/development.md says which tests a change of each room needs: the rooms of tests that import it."""

import functools
from collections import Counter, defaultdict

from mtp_jax import _HOMES
from tests.layers import LAYERS, ROOT, imports, modules

DEVELOPMENT = ROOT / "docs" / "development.md"
# Lowest layers: every room needs them, and `make test` is the answer.
EVERYWHERE = {*LAYERS[0], *LAYERS[1], "hub", "__init__", "__main__"}  # hub: tests/test_hub.py
# Files of a room of tests that must import the code for the room to be named: fewer import a helper.
SEVERAL = 3


def room(name: str) -> str | None:
    """The room of a dotted name of ours: `mtp_jax.engine.depth` is of "mtp_jax/engine"."""
    top, *below = name.split(".")
    if top in ("serve", "kernels_pallas"):
        return top
    if top != "mtp_jax" or not below:
        return None
    home = _HOMES.get(below[0], below[0]).split(".")[0]
    return (
        None
        if home in EVERYWHERE or home not in {n for layer in LAYERS for n in layer}
        else f"mtp_jax/{home}"
    )


@functools.cache
def needed() -> dict[str, list[str]]:
    """{room of the code: rooms of tests, its own first, then by the number of files that import it}."""
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for module, source in modules("tests").items():
        if len(parts := module.split(".")) > 2:
            for of in {room(name) for name in imports(module, source)} - {None}:
                files[str(of)][parts[1]] += 1
    own = {of: of.removeprefix("mtp_jax/").removesuffix("_pallas") for of in files}
    return {
        of: [
            own[of],
            *(
                r
                for r in sorted(counts, key=lambda r: (-counts[r], r))
                if r != own[of] and counts[r] >= SEVERAL
            ),
        ]
        for of, counts in sorted(files.items())
    }


def table() -> str:
    rows = [f"| `{of}` | {' '.join(f'`tests/{r}`' for r in tests)} |" for of, tests in needed().items()]
    return "\n".join(["| a change in | needs |", "| --- | --- |", *rows])


def test_the_table_of_rooms_is_that_of_the_imports():
    assert table() in DEVELOPMENT.read_text(encoding="utf-8"), f"docs/development.md needs:\n{table()}"


def test_every_room_has_tests_of_its_own():
    found = needed()
    rooms = {f"mtp_jax/{name}" for layer in LAYERS for name in layer if name not in EVERYWHERE}
    assert rooms | {"serve", "kernels_pallas"} == {*found}
    assert not [tests[0] for tests in found.values() if not (ROOT / "tests" / tests[0]).is_dir()]
