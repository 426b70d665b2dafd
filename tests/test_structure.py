"""Counts of the source's structure. Each may only fall: a feature is a room, not branches in many files."""

import ast
from collections.abc import Iterator

import pytest

from tests.layers import ROOT
from tests.prose import parsed, sources

# Facts that tell families of models and kinds of attention apart; a branch on one belongs to a family's file.
FAMILY = {"compressed", "gqa", "hyper", "indexer"}
# Kinds of layers, heads and weights; a method of theirs answers, where it makes the code smaller.
KINDS = {"Moe", "Mlp", "Narrow", "Bf16", "Fp8", "Fp4", "Int4", "MlaConfig", "GqaConfig", "CompressedConfig"}
KINDS |= {"IndexerConfig", "DraftHead", "BlockConfig", "BlockHead", "Eagle3Config", "Eagle3", "StagesConfig"}
LONG, LONGER, MANY = 15, 20, 8
MOST = {
    "branches on the family": 9,
    "files that branch on the family": 7,
    f"functions with more than {LONG} branches": 15,
    f"functions with more than {LONGER} branches": 3,
    f"functions with {MANY} parameters or more": 18,
    "isinstance on kinds": 42,
}


def branches(function: ast.AST) -> int:
    """Places where a function may go on in more than one way; loops of comprehensions are among them."""
    found = 0
    for node in ast.walk(function):
        match node:
            case ast.If() | ast.IfExp() | ast.For() | ast.While() | ast.ExceptHandler() | ast.match_case():
                found += 1
            case ast.BoolOp():
                found += len(node.values) - 1
            case ast.comprehension():
                found += 1 + len(node.ifs)
    return found


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters, ``self`` included."""
    a = function.args
    return len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)


def on_family(tree: ast.AST) -> int:
    """Conditions on attributes that tell families apart."""
    tests: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case ast.If() | ast.IfExp() | ast.While():
                tests.append(node.test)
            case ast.comprehension():
                tests += node.ifs
    return sum(isinstance(n, ast.Attribute) and n.attr in FAMILY for test in tests for n in ast.walk(test))


def on_kinds(tree: ast.AST) -> int:
    """Calls of ``isinstance`` with kinds of layers, heads or weights."""
    asked = [
        node.args[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    ]
    return sum(any(isinstance(n, ast.Name) and n.id in KINDS for n in ast.walk(types)) for types in asked)


@pytest.fixture(scope="module")
def counts() -> dict[str, list[str]]:
    """The places that each count is of."""

    def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for name, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{name}:{node.name}", node

    trees = {str(path.relative_to(ROOT)): parsed(path.read_text(encoding="utf-8")) for path in sources()}
    elsewhere = {name: tree for name, tree in trees.items() if not name.startswith("mtp_jax/model/family/")}
    family = [name for name, tree in elsewhere.items() for _ in range(on_family(tree))]
    sizes = {f"{name}:{node.lineno}": (branches(node), parameters(node)) for name, node in functions()}
    found = [
        family,
        sorted(set(family)),
        [name for name, (n, _) in sizes.items() if n > LONG],
        [name for name, (n, _) in sizes.items() if n > LONGER],
        [name for name, (_, n) in sizes.items() if n >= MANY],
        [name for name, tree in trees.items() for _ in range(on_kinds(tree))],
    ]
    return dict(zip(MOST, found, strict=True))


@pytest.mark.parametrize("name", MOST)
def test_a_count_only_falls(counts, name):
    assert len(counts[name]) <= MOST[name], f"{name}: {counts[name]}"


def test_structure_is_counted():
    code = """
def f(self, a, b, *, c=0):
    for x in a if b and c else b:
        y = [z for z in x if z.gqa]
    match a:
        case 1: pass
    return y if a.hyper and a.compressed or isinstance(a, Fp8 | Narrow) else isinstance(b, str)
"""
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef)
    assert (branches(function), parameters(function)) == (9, 4)
    assert (on_family(function), on_kinds(function)) == (3, 1)
