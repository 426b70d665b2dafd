"""A conversation as a client sends it, and the parts of it that a chat template takes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag, model_validator

from mtp_jax import JsonObject
from serve.bodies.custom_tools import (
    AllowedChoice,
    CalledCustom,
    CustomChoice,
    CustomTool,
    OtherTool,
    ToolItem,
    ToolPick,
)
from serve.bodies.fields import Body, Name, Text, TextOr, one_of
from serve.bodies.tools import MOST_TOOLS, CalledTool, ToolBody, ToolChoice
from serve.bodies.unread import Unread, check_newest
from serve.bodies.variables import Switches

MAX_MESSAGES = 4096


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """A part of an answer in which a model of OpenAI declines."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.refusal


_Part = Annotated[
    Annotated[TextPart, Tag("a text")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[Unread, Tag("another part")],
    one_of({"text": "a text", "refusal": "a refusal"}, other="another part"),
]
_Call = Annotated[
    Annotated[CalledTool, Tag("a function")] | Annotated[CalledCustom, Tag("a custom tool")],
    one_of({"custom": "a custom tool"}, other="a function"),
]


class Message(Body):
    """A message of a conversation.

    Attributes:
        prefix, partial: whether the model continues this message, the last (DeepSeek's and Moonshot's names).
    """

    without_effect: ClassVar = frozenset({"annotations", "refusal"})

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: TextOr[_Part] | None = None
    tool_calls: Annotated[list[_Call], Field(fail_fast=True, max_length=1024)] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    prefix: bool | None = None
    partial: bool | None = None

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Fields without effect, of the message and its parts."""
        yield from super().unknown(prefix)
        for i, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if part.model_extra or isinstance(part, Unread):  # there may be thousands, which have neither
                yield from part.unknown(f"{prefix}content.{i}.")

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("content: a message needs text")
        if (self.model_extra or {}).get("function_call"):
            raise ValueError("function_call: not supported here; use tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"tool_calls: only an assistant's message has calls, not one of the role {self.role}"
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: the result of a tool says which call it belongs to")
        if self.continues and self.role != "assistant":
            raise ValueError(f"prefix: the model goes on with its own messages alone, not with {self.role}'s")
        return self

    @property
    def continues(self) -> bool:
        """Whether the model continues this message."""
        return self.prefix is True or self.partial is True

    @property
    def characters(self) -> int:
        """Length of its text, about as JSON has it."""
        if self.content is None or isinstance(self.content, str):
            return len(_JSON_TEXT) + len(self.content or "")
        return sum(len(_JSON_PART) + len(part.text) for part in self.content)

    def for_template(self) -> JsonObject:
        """The message as chat templates expect it: text as one string, "system" for "developer"."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        reasoning = self.reasoning_content or self.reasoning
        extra = {} if reasoning is None else {"reasoning_content": reasoning}
        extra |= {} if self.name is None else {"name": self.name}
        extra |= {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        if self.tool_calls:  # some templates recognise a message of calls by its missing text
            calls = [
                c.for_template() if isinstance(c, CalledCustom) else c.model_dump() for c in self.tool_calls
            ]
            return {"role": self.role, "content": content or None, "tool_calls": calls, **extra}
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content or "", **extra}


_BESIDE_TEXT = {name for name in Message.model_fields if name != "content"}
_JSON_TEXT, _JSON_PART = '"content":"",', '{"type":"text","text":""},'


def paired(messages: Sequence[Message]) -> list[Message]:
    """The messages, with each call's results right behind it, in the order of the calls.

    In templates that print results without ids, the place alone shows the call of a result. Raises ValueError
    for results and calls that do not go together.
    """
    turns: list[tuple[Message, dict[str, Message | None]]] = []
    waiting: dict[str, dict[str, Message | None]] = {}  # by newest call of an id: the results of its turn
    answered: set[str] = set()
    for message in messages:
        of = message.tool_call_id
        if message.role != "tool" or of is None:
            ids = [call.id for call in message.tool_calls or ()]
            results = dict[str, Message | None].fromkeys(ids)
            if len(results) < len(ids):
                raise ValueError(f"two calls of a message have the id {_double(ids)!r}; give each its own")
            waiting |= dict.fromkeys(ids, results)
            turns.append((message, results))
        elif of in waiting:
            waiting.pop(of)[of] = message
            answered.add(of)
        elif of in answered:
            raise ValueError(f"the call {of!r} has two results; send one")
        else:
            raise ValueError(
                f"there is a result of the call {of!r}, and no message before it has that call; send the "
                "assistant's message, too"
            )
    ordered: list[Message] = []
    for message, results in turns:
        given = [result for result in results.values() if result is not None]
        if given and len(given) < len(results):
            without = next(id for id, result in results.items() if result is None)
            raise ValueError(
                f"the call {without!r} has no result, and others of its message have; send one for each call"
            )
        ordered += [message, *given]
    return ordered


def _double(ids: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(id for id in ids if id in seen or seen.add(id))


class Conversation(Switches):
    """Fields that a chat template needs.

    Attributes:
        task: a task of DeepSeek-V4's encoder, of the last message.
    """

    messages: Annotated[
        list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), AfterValidator(paired)
    ]
    tools: Annotated[list[ToolItem], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolPick | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    task: Literal["action", "query", "authority", "domain", "title", "read_url"] | None = None

    @model_validator(mode="after")
    def _one_end(self) -> "Conversation":
        *before, last = self.messages
        if self.task and (self.continues or last.role != ("assistant" if self.task == "title" else "user")):
            raise ValueError(
                "task: belongs to the user's message at the end; a title is that of an answer at the end"
            )
        if any(message.continues for message in before):
            raise ValueError("prefix: only the last message can be gone on with; leave it out of the others")
        if self.continues:
            if self.add_generation_prompt:
                raise ValueError("continue_final_message: not with add_generation_prompt = true")
            if last.role != "assistant":
                raise ValueError("continue_final_message: the last message must be the assistant's")
            if last.tool_calls:
                raise ValueError(
                    "messages: the last one, the assistant's, has calls of tools; send their results"
                )
        return self

    @model_validator(mode="after")
    def _allows_what_there_is(self) -> "Conversation":
        if isinstance(self.tool_choice, AllowedChoice):
            known = sorted(tool.function.name for tool in self.functions)
            if unknown := next((name for name in self.tool_choice.names if name not in known), None):
                raise ValueError(f"tool_choice: {unknown!r} is not among the tools {', '.join(known)}")
        return self

    @model_validator(mode="after")
    def _reads_the_newest(self) -> "Conversation":
        before, last = [None, *self.messages][-2:]
        # A picture right behind the result of a tool is a part of it, as these may have none themselves.
        if last and last.role == "user" and not (before and before.role == "tool"):
            check_newest(last.content, f"messages.{len(self.messages) - 1}.content")
        return self

    @property
    def continues(self) -> bool:
        """Whether the model continues the last message instead of beginning a new one."""
        return self.continue_final_message is True or self.messages[-1].continues

    def turns(self) -> list[JsonObject]:
        """Turns the messages into the form that chat templates expect."""
        *before, last = [message.for_template() for message in self.messages]
        return [*before, last if self.task is None else {**last, "task": self.task}]

    @property
    def characters(self) -> int:
        """Approximate length of the rendered conversation: the length of its JSON."""
        # The texts are nearly all of it, and need not be written for their length.
        told = {"tools": True, "chat_template_kwargs": True, "messages": {"__all__": _BESIDE_TEXT}}
        return len(self.model_dump_json(include=told, exclude_none=True)) + sum(
            message.characters for message in self.messages
        )

    @property
    def _numbered(self) -> Iterator[tuple[int, str]]:
        """The places and names of functions among the tools."""
        return ((i, t.function.name) for i, t in enumerate(self.tools or ()) if isinstance(t, ToolBody))

    @property
    def functions(self) -> list[ToolBody]:
        """The tools that the prompt describes, as functions."""
        told = [tool.as_function if isinstance(tool, CustomTool) else tool for tool in self.tools or ()]
        return [tool for tool in told if isinstance(tool, ToolBody)]

    @property
    def custom(self) -> frozenset[str]:
        """Names of the tools that take a text instead of JSON arguments."""
        return frozenset(tool.custom.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def callable(self) -> list[ToolBody]:
        """Names of the functions that may be called."""
        if not isinstance(self.tool_choice, AllowedChoice):
            return self.functions
        names = self.tool_choice.names
        return [tool for tool in self.functions if tool.function.name in names]

    @property
    def choice(self) -> ToolChoice | None:
        """The choice of the function to call."""
        match self.tool_choice:
            case AllowedChoice() as some:
                return some.allowed_tools.mode
            case CustomChoice() as one:
                return one.as_function
            case other:
                return other

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Fields without effect, also of messages, and tools that are left out."""
        yield from super().unknown(prefix)
        for i, message in enumerate(self.messages):
            yield from message.unknown(f"{prefix}messages.{i}.")
        for i, tool in enumerate(self.tools or ()):
            yield from tool.left_out(f"{prefix}tools.{i}") if isinstance(tool, CustomTool | OtherTool) else ()
