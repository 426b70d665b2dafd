"""Files of pages: whole or none, whatever other processes do to them, and no more bytes than the budget."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.store import page_files
from mtp_jax.store.page import checksum
from mtp_jax.store.page_files import PageFiles, PageKind, form_of
from tests.store.helpers import page, same

KIND = PageKind(b"k" * 32, form_of(page(0)))
OTHER = PageKind(b"o" * 32, KIND.form)
BYTES = 84 + 36  # of a file


def name(i: int) -> bytes:
    return bytes([i]) * 32


def filled(folder: Path, count: int, budget: int = 10**6) -> PageFiles:
    files = PageFiles(folder, budget)
    for i in range(count):
        assert files.write(KIND, name(i), page(i), checksum(page(i)))
    return files


def path_of(files: PageFiles, i: int) -> Path:
    return files.folder / KIND.identity.hex() / f"{name(i).hex()}.page"


def there(files: PageFiles, count: int) -> list[int]:
    """The pages that can be read."""
    found = [(i, files.read(KIND, name(i))) for i in range(count)]
    assert all(same(got[0], page(i)) and got[1] == checksum(page(i)) for i, got in found if got)
    return [i for i, got in found if got]


def test_another_process_reads_the_pages_that_one_wrote(tmp_path: Path):
    filled(tmp_path / "new" / "folder", 3)
    files = PageFiles(tmp_path / "new" / "folder", 10**6)
    assert there(files, 4) == [0, 1, 2]
    assert (files.hits, files.missed, files.read_bytes, files.dropped) == (3, 1, 3 * BYTES, {})
    assert files.read(OTHER, name(0)) is None
    files.look()
    assert files.held == 3 * BYTES
    assert files.folder.stat().st_mode & 0o777 == 0o700


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flip(at: int) -> Any:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)

    return change


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def page_of_another_name(path: Path) -> None:
    path.with_name(f"{name(0).hex()}.page").replace(path)


def page_of_other_weights(path: Path) -> None:
    files = PageFiles(path.parents[1], 10**6)
    files.write(OTHER, name(1), page(1), checksum(page(1)))
    (files.folder / OTHER.identity.hex() / path.name).replace(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *((change, "damaged") for change in (cut, lengthen, empty, pipe, folder)),
        *((flip(at), "damaged") for at in (0, 15, 80, 83, 84, 119)),
        *((flip(at), "foreign") for at in (16, 47, 48, 79)),
        (page_of_another_name, "foreign"),
        (page_of_other_weights, "foreign"),
        (link, "unreadable"),
    ],
)
def test_a_file_that_is_not_the_page_of_its_name_is_a_miss_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, reason: str
):
    files = filled(tmp_path, 3)
    change(path_of(files, 1))
    reader = PageFiles(tmp_path, 10**6)
    assert there(reader, 3)[-1] == 2
    assert reader.read(KIND, name(1)) is None
    assert reader.dropped[reason] >= 1
    assert caplog.text.count("file_cache:") == 1
    if change in (folder, link):
        return
    assert reader.write(KIND, name(1), page(1), checksum(page(1)))
    assert 1 in there(reader, 2)


def test_the_pages_not_used_for_longest_go_first(tmp_path: Path):
    files = filled(tmp_path, 10, budget=10 * BYTES)
    assert files.touch(KIND, name(0))
    assert not files.touch(KIND, name(77))
    files.write(KIND, name(10), page(10), checksum(page(10)))
    left = there(files, 11)
    assert 1 not in left
    assert {0, 9, 10} <= {*left}
    assert files.held == BYTES * len(left) <= files.budget
    assert files.dropped["room"] == 11 - len(left)
    assert not files.write(KIND, name(11), (page(0)[0].repeat(10_000),), 0)  # larger than the budget
    assert there(files, 11) == left


def test_servers_that_share_a_folder_share_its_budget(tmp_path: Path):
    """Each looks at the folder after a 64th of the budget that it wrote itself."""
    budget = 128 * BYTES
    servers = [PageFiles(tmp_path, budget) for _ in range(3)]
    for i in range(400):
        files = servers[i % 3]
        digest = i.to_bytes(32, "big")
        assert files.write(KIND, digest, page(i), checksum(page(i)))
        held = sum(p.stat().st_size for p in tmp_path.glob("*/*.page"))
        assert held <= budget + 2 * budget // 64
    assert sum(files.dropped["room"] for files in servers) == 400 - held // BYTES
    assert held > budget * 0.9


def test_a_file_that_vanishes_while_room_is_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another server has deleted it between the look at the folder and the deletion."""
    files = filled(tmp_path, 4, budget=4 * BYTES)
    found = [*files._found()]
    monkeypatch.setattr(files, "_found", lambda: [*found, (0, BYTES, str(tmp_path / "gone.page"))])
    assert files.write(KIND, name(4), page(4), checksum(page(4)))
    assert there(files, 5) == [2, 3, 4]


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path):
    """Somebody has named the wrong folder; a process was killed long ago, another one writes just now."""
    files = filled(tmp_path, 8, budget=8 * BYTES)
    mine = path_of(files, 0).parent
    others = [tmp_path / "photo.page", tmp_path / "thesis" / f"{'a' * 64}.page", mine / "notes.txt"]
    parts = [mine / f"{'0' * 16}.part", mine / f"{'1' * 16}.part"]
    for path in (*others, *parts):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * BYTES)
        os.utime(path, (1, 1))
    os.utime(parts[1], (time.time() - 60, time.time() - 60))
    (tmp_path / ("b" * 64)).symlink_to(tmp_path / "thesis")
    files.write(KIND, name(8), page(8), checksum(page(8)))
    assert all(path.exists() for path in others)
    assert [path.exists() for path in parts] == [False, True]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_a_folder_that_cannot_be_written_and_one_that_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    files = filled(tmp_path / "a", 2)
    with monkeypatch.context() as patch:
        patch.setattr(page_files, "_write_all", full)
        assert not files.write(KIND, name(2), page(2), checksum(page(2)))
        assert not files.write(KIND, name(3), page(3), checksum(page(3)))
    assert not [*tmp_path.rglob("*.part")]
    assert (files.dropped, caplog.text.count("No space left")) == ({"unwritable": 2}, 1)
    assert there(files, 4) == [0, 1]
    (tmp_path / "a").rename(tmp_path / "b")
    assert there(files, 4) == []
    assert not files.write(KIND, name(2), page(2), checksum(page(2)))
    files.look()
    assert (files.held, (tmp_path / "a").exists()) == (
        0,
        False,
    )  # a mount that is lost must not fill the disk below
    (tmp_path / "a").write_text("a file")
    assert there(files, 4) == []
    assert not files.write(KIND, name(2), page(2), checksum(page(2)))
    (tmp_path / "a").unlink()
    (tmp_path / "b").rename(tmp_path / "a")
    assert there(files, 4) == [0, 1]
    assert files.write(KIND, name(2), page(2), checksum(page(2)))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "a").write_text("a file")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(ConfigError, match=r"file_cache = '.*' cannot be made a folder .*; name another"):
            PageFiles(path, 10**6)


def test_a_process_killed_while_it_writes_leaves_no_page_that_is_not_whole(tmp_path: Path):
    """With SIGKILL, after each number of bytes of a file; the pages of before stay, and it goes on anew."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from mtp_jax.store import page_files
        from tests.store.test_page_files import KIND, checksum, name, page

        write, real = page_files._write_all, os.replace

        def killed_after(count):
            def some(file, data):
                nonlocal count
                data = memoryview(data).cast("B")
                write(file, data[:count])
                count -= len(data)
                if count < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            page_files._write_all = some
            files = page_files.PageFiles(Path(sys.argv[1]), 10**6)
            files.write(KIND, name(count % 251), page(count), checksum(page(count)))

        for count in range(0, 120, 3):
            if not (child := os.fork()):
                killed_after(count)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
    """
    filled(tmp_path, 2)
    subprocess.run([sys.executable, "-c", dedent(script), tmp_path], check=True)
    files = PageFiles(tmp_path, 10**6)
    assert there(files, 251) == [0, 1]
    assert len([*tmp_path.rglob("*.part")]) == 40
    assert files.write(KIND, name(3), page(3), checksum(page(3)))
    assert there(files, 251) == [0, 1, 3]
