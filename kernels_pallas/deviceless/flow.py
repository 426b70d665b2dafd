"""The instructions of a kernel, in PTX or in machine code, and the paths of a warp through them."""

import re
from dataclasses import dataclass

# A label, an instruction of the machine code with its address and predicate, and the label that it names.
_SASS = re.compile(r"^(\.L\w+):|/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*)")
_SASS_TARGET = re.compile(r"`\((\.L\w+)\)")
# A PTX statement: its predicate, its operation, its operands.
_PTX = re.compile(r"(@!?[%\w]+\s+)?([a-z_][\w.:]*)\s*(.*)", re.DOTALL)
_PTX_LABEL = re.compile(r"([$\w]+):\s*")
_LOC = re.compile(r"\.loc\s+(\d+) (\d+)")
_FILE = re.compile(r"\.file\s+(\d+) \"([^\"]*)\"")
# Instructions after which no warp goes on.
_ENDS = re.compile(r"(EXIT|RET|KILL)\b|(ret|exit|trap)\b")
# Instructions that go to an address in a register: their targets are unknown.
_UNKNOWN = re.compile(r"(BRX|JMX|CALL\.ABS)\b|(brx|call)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        place: file and line of the kernel's source, or the address in the machine code.
        guarded: whether a predicate may leave it out.
        name: the operation, with its qualifiers.
        operands: text of the operands.
        after: indices of the instructions that may follow.
    """

    place: str
    guarded: bool
    name: str
    operands: str
    after: tuple[int, ...]


Code = tuple[Instruction, ...]


@dataclass(frozen=True)
class _Statement:
    place: str
    guarded: bool
    name: str
    operands: str
    target: str | None


def sass(text: str) -> Code:
    """The instructions of one kernel's machine code, as nvdisasm prints them."""
    labels: dict[str, int] = {}
    found: list[_Statement] = []
    for match in filter(None, map(_SASS.search, text.splitlines())):
        label, address, guard, name, operands = match.groups()
        if label:
            labels[label] = len(found)
            continue
        target = _SASS_TARGET.search(operands)
        # A second predicate among a branch's operands: ``@P1 BRA P2, `(.L_x_1)``.
        guarded = bool(guard) or bool(name.startswith("BRA") and re.match(r"!?U?P\d", operands))
        found.append(_Statement(f"0x{address}", guarded, name, operands, target and target[1]))
    if not found:
        raise ValueError("the machine code has no instruction in the form of nvdisasm")
    return _linked(found, labels)


def ptx(text: str) -> Code:
    """The instructions of the one kernel of a PTX module.

    Blocks in braces are inline assembly. Their branches stay inside of them and only wait: they are left out.
    """
    labels: dict[str, int] = {}
    found: list[_Statement] = []
    files = {number: path.rsplit("/", 1)[-1] for number, path in _FILE.findall(text)}
    place, depth = "", 0
    begin = text.find(".entry")
    if begin < 0:
        raise ValueError("the PTX has no .entry, so no kernel")
    for line in text[begin:].splitlines():
        line = line.split("//")[0].strip()
        if loc := _LOC.match(line):
            place = f"{files.get(loc[1], 'file ' + loc[1])}:{loc[2]}"
            continue
        for piece in line.split(";"):
            depth, piece = _inside(depth, piece.strip())
            if label := _PTX_LABEL.match(piece):
                if depth == 1:
                    labels[label[1]] = len(found)
                piece = piece[label.end() :]
            statement = _PTX.match(piece)
            if depth == 0 or statement is None:
                continue
            guard, name, operands = statement.groups()
            branch = name.split(".")[0] == "bra"
            if branch and depth > 1:
                continue
            found.append(_Statement(place, bool(guard), name, operands, operands.strip() if branch else None))
    if depth:
        raise ValueError(f"braces of the PTX do not match: {depth} are open at its end")
    return _linked(found, labels)


def _inside(depth: int, piece: str) -> tuple[int, str]:
    """The number of open braces, and the statement without the braces before it."""
    while piece[:1] in ("{", "}"):
        depth += 1 if piece[0] == "{" else -1
        piece = piece[1:].strip()
    return depth, piece


def _linked(statements: list[_Statement], labels: dict[str, int]) -> Code:
    def after(i: int, s: _Statement) -> tuple[int, ...]:
        if _UNKNOWN.match(s.name):
            raise ValueError(f"{s.place}: {s.name} goes to a place that the code does not name")
        if s.target is not None and s.target not in labels:
            raise ValueError(f"{s.place}: {s.name} goes to {s.target!r}, which is no label of the code")
        # A call returns, and code goes on after both sides of a divergent branch meet (BSSY names the place).
        goes = s.target is not None and re.match(r"BRA|bra|JMP", s.name) and not s.guarded
        ends = _ENDS.match(s.name) and not s.guarded
        following = () if goes or ends or i + 1 == len(statements) else (i + 1,)
        return (*following, *(() if s.target is None else (labels[s.target],)))

    return tuple(
        Instruction(s.place, s.guarded, s.name, s.operands, after(i, s)) for i, s in enumerate(statements)
    )
