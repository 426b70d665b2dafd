"""Outputs with calls of tools, as a grammar in llguidance's Lark syntax."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_jax.json_object import JsonMapping
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tools.arguments import free, held
from mtp_jax.text.tools.formats import GAP, NAME, Format, slips
from mtp_jax.text.tools.rules import Rules, Vocabulary, one_of
from mtp_jax.text.tools.tool import Tool


@dataclass(frozen=True)
class Required:
    """The form of an output that a user asks for.

    Attributes:
        forced: whether the output is a call whose arguments fit the tool's schema; else it is any text,
            which may contain thoughts and calls.
        several: whether the output may have more than one call.
        thinking: whether the output begins inside a thought, which ends with its tag or with a call.
        answer: JSON Schema of an output without a call; None: such an output is text.
    """

    forced: bool
    several: bool
    thinking: bool = False
    answer: JsonMapping | None = None


def call_grammar(form: Format, tools: Sequence[Tool], vocabulary: Vocabulary, asked: Required) -> str:
    """The grammar of one output, in which a call that begins as its format says names a tool and is complete.

    Raises RequestError for a tool whose schema is no JSON Schema, or must be enforced and cannot be in this
    format.
    """
    at_once = asked.forced or asked.answer is not None
    return _Output(form, Rules(vocabulary, exact=at_once), asked, at_once).grammar(tools)


class _Output:
    def __init__(self, form: Format, rules: Rules, asked: Required, at_once: bool) -> None:
        """at_once: whether the output begins with a call or the answer, without text before."""
        self._form, self._rules, self._asked, self._at_once = form, rules, asked, at_once

    def grammar(self, tools: Sequence[Tool]) -> str:
        thoughts = [self._rules.token(t) for t in (Thoughts.OPEN, Thoughts.CLOSE)]
        tags = [tag for tag in thoughts if tag]  # an empty tag is text
        before = f"(TEXT {one_of(tags)})*" if tags else ""
        self._rules.name("call", self._call(tools))
        any_text = f"{self._begun(before)}{'*' if self._asked.several else '?'} {before} TEXT"
        self._rules.name("start", self._from_the_start() if self._at_once else any_text)
        return self._rules.text

    def _begun(self, before: str = "") -> str:
        """The rule for any text that ends with calls. before: rules for thoughts before the text."""
        return one_of(f"{before} {self._rules.up_to(t)} {self._behind(t)}" for t in self._form.opens)

    def _behind(self, tag: str) -> str:
        """Rules for the text behind a tag that opens calls."""
        form, declared = self._form, self._rules.declared
        several = self._asked.several and bool(form.blocks or self._at_once)
        more = f"({declared(form.between + form.call)} call)*" if several else ""
        if tag == form.call:
            end = f"({self._end(form.before_block_end + form.block_ends[0])})?" if form.blocks else ""
            return f"call {more} {end}"
        end = form.before_block_end + form.block_ends[form.blocks.index(tag)]
        return f"{declared(form.after_block + form.call)} call {more} {self._end(end)}"

    def _end(self, text: str) -> str:
        """The rule for the end of a call or a block, also as models slip."""
        return one_of(map(self._rules.declared, slips(text)))

    def _from_the_start(self) -> str:
        """The rule for calls, or an answer, behind the thought that the output begins with, if it does."""
        tag, rules = self._form.opens[0], self._rules
        ways = [f"LINES? {rules.literal(tag)} {self._behind(tag)}"]
        if self._asked.answer is not None:
            rules.charge(self._asked.answer)
            ways.append(f"{'LINES?' if self._asked.thinking else ''} {rules.json(self._asked.answer)}")
        if not self._asked.thinking:
            return one_of(ways)
        rules.name("THOUGHT", Thoughts.terminal())
        return f"{rules.up_to(Thoughts.CLOSE, 'THOUGHT')} {one_of(ways)} | {self._begun()}"

    def _call(self, tools: Sequence[Tool]) -> str:
        """The rule for a call, from the end of its tag up to its own end."""
        form, rules = self._form, self._rules
        before, _, after = form.head.partition(NAME)
        end = self._end(GAP + form.end)
        ways, unheld = [], []
        for i, tool in enumerate(tools):
            rules.charge(tool.name)
            tool.check()
            name = json.dumps(tool.name)
            if tool.strict or self._asked.forced:
                own = held(form, rules, tool, f"arguments_{i}", end)
                ways.append(f"{name} {rules.declared(after)} {own}")
            else:
                unheld.append(name)
        if unheld:
            ways.append(f"{one_of(unheld)} {rules.declared(after)} {free(form, rules, end)}")
        prefix = f"({json.dumps(form.prefix)})?" if form.prefix else ""
        return f"{rules.declared(before)} {prefix} {one_of(ways)}"
