"""Each part of a request has one owner that writes it. What was asked has none."""

import ast
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from functools import cache
from pathlib import Path

import pytest

from mtp_jax.engine.request import Progress, Request, Residence
from mtp_jax.engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
PACKAGES = [*ROOT.glob("mtp_jax/**/*.py"), *ROOT.glob("serve/**/*.py")]
OWNERS = {Progress: "mtp_jax/engine/engine.py", Residence: "mtp_jax/engine/scheduler.py"}
OTHERS = {"self", "reservation", "row", "soak", "self.counters"}
"""Names of objects of other classes that have fields of the same names."""
IN_PLACE = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}


@cache
def written_by_packages() -> list[tuple[Path, ast.Attribute]]:
    return [(path, a) for path in PACKAGES for a in written(ast.parse(path.read_text()))]


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, deleted or changed in place."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE
        ):
            targets.append(node.func.value)
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Subscript | ast.Starred):
                targets.append(target.value)
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) not in OTHERS:
                yield target


@pytest.mark.parametrize("part", OWNERS)
def test_one_file_writes_a_part(part: type):
    names = {f.name for f in fields(part)}
    found = {str(path.relative_to(ROOT)) for path, a in written_by_packages() if a.attr in names}
    assert found == {OWNERS[part]}


def test_nobody_writes_attributes_of_an_engine_or_a_scheduler():
    """Their own methods do, and an engine those of its scheduler."""
    for path, a in written_by_packages():
        written_of = ast.unparse(a.value).split(".")[-1].lstrip("_")
        inside = path.name == "engine.py" and ast.unparse(a) == "self.scheduler.held"
        assert inside or written_of not in ("engine", "scheduler"), (path, a.lineno)


@pytest.mark.parametrize(
    "line",
    [
        *("r.progress.unread += 1", "a, own.unread = 1, 2", "del r.progress.unread[1:]"),
        *("request.progress.unread.append(3)", "own.unread[0] = 4", "(r.unread) = 5"),
    ],
)
def test_a_write_is_seen(line: str):
    assert [a.attr for a in written(ast.parse(line))] == ["unread"]
    assert not [*written(ast.parse("self.unread = row.unread = r.unread + 1"))]


def test_nobody_writes_what_was_asked():
    request = Request(0, (1,), SamplingParams(), 0, 4, 3, 5)
    for field in fields(Request):
        with pytest.raises(FrozenInstanceError):
            setattr(request, field.name, None)
