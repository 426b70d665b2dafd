"""Random histories of servers that share a folder of pages, whose files are damaged and vanish meanwhile."""

import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from mtp_jax.store import file_tier
from mtp_jax.store.file_tier import FileStats
from tests.simulate.histories import History


def server(seed: int, folder: Path, draws: int) -> History:
    """A server of the seed's model and sizes, with its own requests, some of which begin as another's do."""
    history = History(seed, folder=folder)
    history.random = random.Random(draws)
    history.device.compile(history.engine.warm_up_keys()[0])
    return history


def files(history: History) -> FileStats:
    assert history.engine.tier
    return history.engine.tier.stats().files


def settle(history: History) -> None:
    """Wait for the writer, so that the number of files does not depend on other work of the machine."""
    assert history.engine.tier
    assert history.engine.tier.files
    history.engine.tier.files.settle()


def damage(path: Path, draw: random.Random) -> None:
    """Change a file in one of the ways in which disks, people and programs do."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(max(1, len(data)))
    how = draw.randrange(7)
    if how == 0 and data:  # not cut to nothing before
        data[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        data[at:] = draw.randbytes(len(data) - at)
    elif how == 2:
        del data[at:]
    elif how == 3:
        data += b"x"
    elif how == 4:
        data[at:] = bytes(len(data) - at)
    path.unlink()
    if how == 5:
        os.mkfifo(path)
    elif how < 5:
        path.write_bytes(data)
    # else it has vanished


def newest(folder: Path) -> list[Path]:
    """The files that were used last, which are the likeliest to be used next."""
    found = []
    for path in folder.glob("*/*.page"):
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)[-8:] if path.is_file()]


def serve(seed: int, folder: Path, launches: int, damages: int) -> Counter[str]:
    """Two servers, one after the other starting anew on the same files."""
    draw, seen = random.Random(seed), Counter[str]()
    running = [server(seed, folder, 10 * seed), server(seed, folder, 10 * seed + 1)]
    for begun in range(3):
        while min(history.engine.launches for history in running) < launches:
            for history in running:
                history._happen()
                history.step()
                settle(history)
                if draw.random() < 0.1:
                    history.engine.flush_prefix_cache()  # so that pages come from files
                found = newest(folder)
                if len(found) > 1 and seen["damaged"] < damages and draw.random() < 0.3:
                    hurt, other = draw.sample(found, 2)
                    with suppress(FileNotFoundError):  # a server was faster
                        damage(hurt, draw)
                        seen["damaged"] += 1
                        if draw.random() < 0.5:
                            other.replace(hurt)
        for history in running:
            history.run(0)  # to the end: every text and every count of drafts is right
            seen += history.seen
            seen += Counter({f"lost: {reason}": n for reason, n in files(history).dropped.items()})
        running[begun % 2] = server(seed, folder, 10 * seed + 2 + begun)
    return seen


@pytest.mark.parametrize(
    ("seeds", "waits"),
    [(range(2), True), pytest.param(range(2, 12), False, marks=pytest.mark.rest)],
    ids=["first", "rest"],
)
def test_servers_on_one_damaged_folder_say_what_each_says_alone(
    seeds: range, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """waits: a prompt waits for its pages to the end, so that counts do not depend on the machine."""
    if waits:
        monkeypatch.setattr(file_tier, "_GLANCE_SECONDS", 60)
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += serve(seed, tmp_path / str(seed), launches=100, damages=120)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r:.500}") from error
    assert seen["damaged"] >= 100 * len(seeds)
    assert seen["fetched"] > 10 * len(seeds)
    assert all(seen[f"lost: {reason}"] > 0 for reason in ("room", "damaged", "foreign"))
    assert all(seen[kind] > 0 for kind in ("preempted", "length", "stop"))
