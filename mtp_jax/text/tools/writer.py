"""The grammar of a request with tools: written whole, and again without a schema that llguidance refuses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llguidance import LLMatcher

from mtp_jax.errors import RequestError, SchemaError
from mtp_jax.text.compile_grammar import in_words
from mtp_jax.text.tools.formats import Format
from mtp_jax.text.tools.grammar import Required, call_grammar
from mtp_jax.text.tools.rules import Vocabulary
from mtp_jax.text.tools.tool import Tool


@dataclass(frozen=True)
class ToolGrammar:
    """Writes the grammar of an output that may call tools.

    Attributes:
        asked: the form of the output; the grammar is for an output that begins inside a thought, or not.
    """

    form: Format
    tools: Sequence[Tool]
    vocabulary: Vocabulary
    asked: Required

    def written(self, thinking: bool) -> str:
        """The grammar. thinking: whether the output begins inside a thought. Raises RequestError."""
        return self._of(self.tools, thinking)

    def mended(self, thinking: bool, error: RequestError) -> str:
        """The grammar without the parts of schemas that keep it from being compiled, which it reports.

        Raises SchemaError for such a part of a strict tool, and the error of the grammar if no tool has one.
        """
        tools = [self._mended(tool) for tool in self.tools]
        if tools == [*self.tools]:
            raise error
        return self._of(tools, thinking)

    def _of(self, tools: Sequence[Tool], thinking: bool) -> str:
        try:
            return call_grammar(self.form, tools, self.vocabulary, replace(self.asked, thinking=thinking))
        except RequestError as e:
            e.option = e.option or "tools"
            raise
        except (TypeError, ValueError, OverflowError, RecursionError) as e:  # of a schema that is none
            raise RequestError(f"the schemas of the tools are not valid: {e}", "tools") from e

    def _mended(self, tool: Tool) -> Tool:
        fault = self._fault(tool)
        if not fault:
            return tool
        schema = dict(tool.parameters)
        known, around = schema.pop("properties", {}), {k: schema.get(k, {}) for k in ("$defs", "definitions")}
        mended = dict(known)
        for key, value in known.items():
            alone = replace(tool, parameters={"properties": {key: value}, **around})
            if why := self._fault(alone):
                self._leave_out(tool, ("properties", key), why)
                mended[key] = {}
        found = replace(tool, parameters={**tool.parameters, "properties": mended})
        if self._fault(found):
            self._leave_out(tool, (), fault)
            return replace(tool, parameters={})
        return found

    def _leave_out(self, tool: Tool, place: Sequence[str], why: str) -> None:
        fault = SchemaError(place, "", why, tool.name)
        if tool.strict:
            raise fault
        self.vocabulary.widened.append(fault)

    def _fault(self, tool: Tool) -> str:
        """The reason why llguidance refuses the grammar of a tool alone; "" if it does not."""
        quiet, asked = replace(self.vocabulary, widened=[]), replace(self.asked, answer=None)
        error = LLMatcher.validate_grammar(call_grammar(self.form, [tool], quiet, asked))
        return in_words(error) if error else ""
