"""Named scopes: the phase and part to which an instruction of a compiled program belongs.

``jax.named_scope`` puts a path into every instruction's ``op_name``; the compiler keeps it. The names below
are an interface: reports are keyed by them, and a test asserts that compiled programs have them.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

# Stages of a step, in order; stages that a chunk adds; and all stages, including the trunk's pass over a lone
# chunk and the scores of prompts.
STEP_PHASES = ("draft", "verify", "accept", "commit")
CHUNK_PHASES = ("prefill_drafter", "first_token")
PHASES = (*STEP_PHASES, *CHUNK_PHASES, "prefill_trunk", "prompt_logprobs")

# Innermost names, and their rows in the report.
PARTS = {
    "attention_project": "attention",
    "cache_write": "attention",
    "attend": "attention",
    "attention_out": "attention",
    "moe_route": "MoE route",
    "moe_experts": "experts",
    "moe_shared": "experts",
    "mlp": "MLP",
    "embed": "embedding",
    "merge": "NextN merge",
    "norm": "norm",
    "head": "head",
    "sample": "sample",
    "logprobs": "log-probabilities",
}
OTHER = "other"


@dataclass(frozen=True, order=True)
class Scope:
    """A phase of ``PHASES`` and a part of ``PARTS``; ``OTHER`` where the program names neither."""

    phase: str
    part: str


NOWHERE = Scope(OTHER, OTHER)

# Programs that run between steps: names in HLO, and their work.
BOOKKEEPING = "bookkeeping"
_BETWEEN_STEPS = {
    "jit_admit": "a request's row enters a slot",
    "jit_move": "a request moves to another slot",
    "jit_update": "slots and page tables are renewed",
    "jit_flush": "deferred NextN entries are written",
}


def scope_of_program(module: str) -> Scope:
    """The scope of a whole program that is no step: ``jit_update`` renews slots and page tables."""
    return Scope(BOOKKEEPING, _BETWEEN_STEPS.get(module, "another program"))


def scope_of(op_name: str) -> Scope:
    """The scope of a path such as ``jit(step_b1_k3_p4)/verify/layer_0/attend/dot_general``."""
    names = op_name.split("/")
    phase = next((n for n in names if n in PHASES), OTHER)
    # Outermost names first: the innermost is the most exact.
    part = next((PARTS[n] for n in reversed(names) if n in PARTS), OTHER)
    return Scope(phase, part)


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NAME = re.compile(r"%([\w.\-]+)")
_FUSION = re.compile(r" fusion\(.* calls=%?([\w.\-]+)")
_PRODUCT = re.compile(r" (?:dot|convolution)\(")
_ROUNDS = 4


def scopes_of(hlo: str) -> dict[str, Scope]:
    """Instruction name -> scope, from a compiled program's HLO text.

    The compiler drops the path of some instructions that it rewrites. Such an instruction has the scope of
    its callees (fusions, loops), else the scope of its users. A fusion has the path of its last operation;
    where it holds a matrix product, its time is that product's, hence its scope.
    """
    inside, mentions, scopes = _read(hlo)
    users: dict[str, list[str]] = defaultdict(list)
    for name, others in mentions.items():
        for other in others:
            users[other].append(name)
    for _ in range(_ROUNDS):
        for name in [n for n, s in scopes.items() if s.phase == OTHER]:
            called = [n for m in mentions[name] for n in inside.get(m, ())]
            for neighbours in (called, users[name], mentions[name]):
                if (near := _most(scopes.get(n, NOWHERE) for n in neighbours)) != NOWHERE:
                    scopes[name] = near
                    break
    return scopes


def _read(hlo: str) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, Scope]]:
    """Instructions of each computation, names that each instruction mentions, and its own scope."""
    inside: dict[str, list[str]] = defaultdict(list)
    mentions: dict[str, list[str]] = {}
    scopes: dict[str, Scope] = {}
    products: dict[str, Scope] = {}
    fusions: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if started := _COMPUTATION.match(line):
            computation = started[1]
        elif found := _INSTRUCTION.match(line):
            name, path = found[1], _OP_NAME.search(line)
            inside[computation].append(name)
            scopes[name] = scope_of(path[1]) if path else NOWHERE
            mentions[name] = _NAME.findall(found[2])
            if _PRODUCT.search(line) and scopes[name].part != OTHER:
                products[computation] = scopes[name]
            elif fusion := _FUSION.search(line):
                fusions[name] = fusion[1]
    scopes |= {name: products[called] for name, called in fusions.items() if called in products}
    return inside, mentions, scopes


def _most(scopes: Iterable[Scope]) -> Scope:
    """The most frequent scope; scopes that name a part come first."""
    counted = Counter(s for s in scopes if s.phase != OTHER)
    return max(counted, key=lambda s: (s.part != OTHER, counted[s]), default=NOWHERE)
