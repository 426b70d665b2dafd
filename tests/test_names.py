"""A name between backticks, in docs, docstrings and comments, is that of code or of a file that is there.

A class or type has a name that stands in no other module. Counts of names that do may only fall.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prose import ROOT, comments, docstrings, pages, prose, sources

# Names of other programs, names that the code makes of parts, arrays in files, fields of JSON, terms.
FOREIGN = {
    *("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel", "speculators", "uniqueItems"),
    *("SGLANG_SIMULATE_ACC_LEN", "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "synthetic_acceptance_rates"),
    *("ray.data.Dataset.map_batches", "WebSearchTool", "bind_tools", "response_model", "namespace__name"),
    *("HF_ENDPOINT", "cuGraphLaunch", "cuTensorMapEncodeTiled", "xla_llvm_disable_expensive_passes", "relu"),
    *("prefill_t64x1_p16", "step_b8_k3_t64x4_p16", "nextn_entries", "computer__scroll"),
    *("OtelBatchSpanRecordProcessor", "OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_HEADERS"),
    *("metrics.speculative_decoding", "X.weight_shape", "text.format", "programmatic_tool_calling"),
    *("weight_scale_2", "v_scale"),
}

# Classes' and types' names that stand in two modules or more: all, and without a leading "_". Lower a number
# when the count is lower; never raise one.
MOST_SHARED, MOST_PUBLIC = 21, 12

CAMEL = re.compile(r"_?[A-Z]\w*[a-z]\w*")
QUOTED = re.compile(r"``([^`]+)``|`([^`\n]+)`")
FILE = re.compile(r"([\w/.-]*\.py)(?:: ?([\w.]+))?")
FOLDER = re.compile(r"[\w/.-]+/")
DOTTED = re.compile(r"([A-Za-z_][\w.]*)\.(\w+)(?:\(.*\))?")
WORD = re.compile(r"([A-Za-z]\w+)(?:\(\))?")


def defined(node: ast.AST) -> Iterator[str]:
    """Names that a statement defines where it stands."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    else:
        names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        yield from (n.id for n in names)


def imported(node: ast.AST) -> Iterator[str]:
    """Names that a statement imports."""
    yield from (n.asname or n.name for n in ast.walk(node) if isinstance(n, ast.alias))


def without_prose(source: str, tree: ast.AST) -> str:
    """The lines of a source that are code."""
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for i in range(node.lineno - 1, node.end_lineno or 0):
                lines[i] = ""
    return re.sub(r"(?m)(^|\s)# .*", "", "\n".join(lines))


class Code:
    """Names of the code.

    Attributes:
        members: names in classes.
        bases: words of the bases of classes.
        modules: names in modules, by every end of the module's dotted name.
        homes: modules of each name of a class or a type.
        files: {path: text of the code} of Python files; tests' files with all their text.
        words: all words of the code.
        pairs: names that stand there as "a.b".
    """

    def __init__(self) -> None:
        self.members, self.modules = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        self.homes = defaultdict[str, list[str]](list)
        tests = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
        tests[Path(__file__)] = ""  # whose list of foreign names is no code
        self.files = {f"/{path.relative_to(ROOT)}": text for path, text in tests.items()}
        self.bases = defaultdict[str, set[str]](set)
        for path in sources():
            name = str(path.relative_to(ROOT))
            tree = ast.parse(source := path.read_text(encoding="utf-8"))
            lines = source.splitlines()
            self.files[f"/{name}"] = without_prose(source, tree)
            parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
            own = {n for node in tree.body for n in defined(node)}
            for n in filter(CAMEL.fullmatch, own if parts[0] != "examples" else ()):
                self.homes[n].append(name)
            own.update(n for node in tree.body for n in imported(node))
            for i in range(len(parts)):
                self.modules[".".join(parts[i:])] |= own
                self.modules[".".join(parts[i:-1])].add(parts[-1])
            for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
                text = "\n".join(lines[node.lineno : node.end_lineno])
                self.members[node.name].update(n for line in node.body for n in defined(line))
                self.members[node.name].update(re.findall(r"\bself\.(\w+)", text))
                self.bases[node.name].update(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
        configured = [ROOT / "Makefile", *ROOT.glob("configs/*/*.yaml"), *ROOT.glob("serve/deploy/*.y*ml")]
        text = "\n".join([*self.files.values(), *(path.read_text(encoding="utf-8") for path in configured)])
        self.words = {*re.findall(r"\w+", text)}
        self.pairs = {*re.findall(r"(?=\b(\w+\.\w+))", text)}
        self.pairs |= {path.name for path in (ROOT / "mtp_jax").rglob("*.jinja")}
        self.folders = {path.rsplit("/", 1)[0] + "/" for path in self.files}

    def has(self, of: str, member: str) -> bool:
        """Whether a class or one of its bases has a member."""
        above = (base for base in self.bases[of] - {of} if base in self.members)
        return member in self.members[of] or any(self.has(base, member) for base in above)

    def knows(self, name: str) -> bool:
        """Whether a name between backticks is right, or no name."""
        if name in FOREIGN:
            return True
        if found := FOLDER.fullmatch(name):
            return any(folder.endswith(f"/{name}") for folder in self.folders) or name[:-1] in self.words
        if found := FILE.fullmatch(name):
            texts = [text for path, text in self.files.items() if path.endswith(f"/{found[1]}")]
            wanted = found[2].split(".") if found[2] else []
            return any(
                all(re.search(rf"(def|class) {n}\b|^ *{n}\b.* = ", text, re.M) for n in wanted)
                for text in texts
            )
        if found := DOTTED.fullmatch(name):
            of, member = found[1].rsplit(".")[-1], found[2]
            if of in self.members:
                return self.has(of, member)
            if found[1] in self.modules:
                return member in self.modules[found[1]] or f"{of}.{member}" in self.pairs
            return {*re.findall(r"\w+", name.split("(")[0])} <= self.words
        return not (found := WORD.fullmatch(name)) or found[1] in self.words


@pytest.fixture(scope="module")
def code() -> Code:
    return Code()


def test_names_are_names_of_code(code):
    # A measurement keeps the names of its day.
    now = [path for path in pages() if path.parent.name != "measured"]
    texts = {path: prose(path.read_text(encoding="utf-8")) for path in now}
    for path in sources():
        source = path.read_text(encoding="utf-8")
        texts[path] = "\n\n".join([*docstrings(source), *comments(source)])
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        for name in {double or single for double, single in QUOTED.findall(text)}
        if not code.knows(name)
    ]
    assert not wrong, "mend the name; a name of another program belongs into FOREIGN"


def test_a_class_has_a_name_of_its_own(code):
    shared = {name: homes for name, homes in code.homes.items() if len(homes) > 1}
    public = {name: homes for name, homes in shared.items() if not name.startswith("_")}
    assert len(shared) <= MOST_SHARED, shared
    assert len(public) <= MOST_PUBLIC, public


def test_wrong_names_are_found(code):
    members = "Runner.read_pages NextN.propose LeaderRunner.gone verify.walks model.backend.gone"
    others = "GoneAway gone_away() config.jsonn"
    files = "no_such.py model/turns.py engine/turns.py:Turn step.py:Step.gone engine/drafter/"
    assert not [name for name in f"{members} {others} {files}".split() if code.knows(name)]


def test_right_names_pass(code):
    members = "Runner.do LeaderRunner.do Engine.step verify.walk model.backend.backend params.layers"
    others = "LLM load() config.json checkpoint.load(DIR) [B,T]"
    files = "turns.py engine/turns.py:Turns step.py:Step.verify model/attention/"
    assert not [name for name in f"{members} {others} {files}".split() if not code.knows(name)]
