"""Tools that an output may call: from a user's request to a grammar and a parser."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from mtp_jax.errors import RequestError, SchemaError
from mtp_jax.json_object import JsonMapping
from mtp_jax.text.grammar import MAX_GRAMMAR_LENGTH, StructuredOutput, embedded
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.text.tools.formats import FORMATS, Format, format_named
from mtp_jax.text.tools.grammar import Required, call_grammar
from mtp_jax.text.tools.parser import ToolParser
from mtp_jax.text.tools.rules import Vocabulary
from mtp_jax.text.tools.tool import Tool


@dataclass(frozen=True)
class ToolUse:
    """Which tools an output may or must call, in which format.

    Attributes:
        forced: whether the output must be a call.
        several: whether the output may have more than one call.
        also: further names that calls may use, and the tool of each; no grammar lets a model write them.
    """

    form: Format
    tools: tuple[Tool, ...]
    forced: bool
    several: bool
    also: Mapping[str, str] = field(default_factory=dict)

    FORMATS: ClassVar[tuple[str, ...]] = tuple(sorted(FORMATS))

    @classmethod
    def of(
        cls,
        form: str,
        tools: Sequence[Tool],
        choice: Literal["none", "auto", "required", "named"] = "auto",
        *,
        name: str | None = None,
        several: bool = True,
        also: Mapping[str, str] | None = None,
    ) -> "ToolUse | None":
        """The tools that an output may call; None where it may call no tool.

        form: one of ``FORMATS``. choice: "named" forces a call of the tool ``name``, "required" a call
        of any tool. also: see the class.

        Raises RequestError for a choice that does not go with the tools.
        """
        names = [tool.name for tool in tools]
        double = next((n for n, count in Counter(names).items() if count > 1), None)
        if double is not None:
            raise RequestError(f"tools: the name {double!r} is there twice; give each tool its own")
        forced = choice in ("required", "named")
        if forced and not tools:
            raise RequestError("tool_choice: asks for a call, and there are no tools; give some")
        if choice == "none" or not tools:
            return None
        if choice == "named":
            tools, several = [tool for tool in tools if tool.name == name], False
            if not tools:
                raise RequestError(f"tool_choice: {name!r} is not among the tools {', '.join(names)}")
        return cls(format_named(form), tuple(tools), forced, several, also or {})

    def parser(self) -> ToolParser:
        """The parser of one completion."""
        return ToolParser(self.form, {tool.name: tool.parameters for tool in self.tools}, self.also)

    def structured(self, tokenizer: Tokenizer, answer: StructuredOutput | None) -> StructuredOutput:
        """The form that the output must have. answer: the form of an output without a call.

        The grammar is written when it is compiled. Raises RequestError, and so may the compilation.
        """
        schema, widened = None, list[SchemaError]()
        if answer is not None and not self.forced:
            if answer.json_schema is None and not answer.json_object:
                raise RequestError(
                    "structured_outputs: with tools only JSON can be asked for; use response_format"
                )
            schema, widened = answer.enforced, answer.widened
        return StructuredOutput(lark=partial(self._grammar, tokenizer, schema, widened), widened=widened)

    def _grammar(
        self, tokenizer: Tokenizer, answer: JsonMapping | None, widened: list[SchemaError], thinking: bool
    ) -> str:
        vocabulary = Vocabulary(tokenizer.added_id, embedded, MAX_GRAMMAR_LENGTH, widened)
        asked = Required(self.forced, self.several, thinking, answer)
        try:
            return call_grammar(self.form, self.tools, vocabulary, asked)
        except RequestError:
            raise
        except (TypeError, ValueError, OverflowError, RecursionError) as e:  # of a schema that is none
            raise RequestError(f"the schemas of the tools are not valid: {e}") from e
