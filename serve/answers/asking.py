"""Submission of a conversation: its prompt, the tools that it may call, its place in the queue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from mtp_jax import LazyPrompt, RequestError, SamplingParams, Stream, ToolUse
from serve.answers.generation import submit
from serve.base.state import Server
from serve.bodies.reading import MOST_NAMED, ignore, printable, tell
from serve.bodies.schema import ChatBody, Conversation
from serve.bodies.tools import use_of

_VARIABLE = "chat_template_kwargs."


class ChatPrompt:
    """Renders a conversation when called, off the event loop.

    Attributes:
        thinking: whether the prompt ends inside a think block.
        unread: paths of the fields that have no effect on the chat template.
    """

    def __init__(self, server: Server, conversation: Conversation, most: int | None = None) -> None:
        """most: most tokens that are of use; None: any number."""
        self._tokenizer, self._conversation = server.tokenizer, conversation
        self._form, self._settings, self._most = server.tool_format, server.settings, most
        self.thinking, self.unread = False, list[str]()

    def __call__(self) -> list[int]:
        """Render the conversation and return its token ids. Raises RequestError."""
        told = self._conversation
        messages = told.turns()
        if "latest_reminder" not in (self._tokenizer.chat_template or "") and (
            told.task or any(message["role"] == "latest_reminder" for message in messages)
        ):
            raise RequestError(
                "task and latest_reminder are of DeepSeek-V4's encoder, and this model's chat template knows "
                "neither; leave them out"
            )
        # The prompt names no tools if the request forbids calls.
        tools = [tool.for_template() for tool in told.functions] if told.tool_choice != "none" else None
        prompt = self._tokenizer.apply_chat_template(
            messages,
            tools or None,
            tool_format=self._form,
            add_generation_prompt=told.add_generation_prompt is not False,
            continue_final_message=told.continues,
            **{**self._settings.chat_template_kwargs, **told.template_options()},
        )
        self._compare(self._tokenizer.template_variables(with_tools=bool(tools)))
        ids = self._tokenizer.encode(prompt, add_special_tokens=False, most=self._most)
        ids = told.cut(ids) if isinstance(told, ChatBody) else ids
        self.thinking = self._tokenizer.thoughts.open_after(ids, self._tokenizer.decode_all)
        return ids

    def _compare(self, reads: frozenset[str]) -> None:
        """Find the fields without effect on a template that reads these variables. Raises RequestError."""
        self.unread = self._conversation.unread(reads)
        other = next((path for path in self.unread if path.startswith(_VARIABLE)), None)
        if self._settings.strict and other:
            raise RequestError(
                f"{other:.80}: this model's chat template reads {', '.join(sorted(reads)) or 'no variable'}; "
                "leave it out"
            )
        for name in self._settings.chat_template_kwargs.keys() - reads:
            tell(f"--chat-template-kwargs {name}")

    def warn(self, request: Request) -> None:
        """Report fields that have no effect on the template, once it has rendered the conversation."""
        for path in self.unread[:MOST_NAMED]:
            ignore(request, printable(path))


async def counted(server: Server, request: Request, chat: ChatBody) -> int:
    """The number of tokens of a conversation's prompt. Raises RequestError, Overloaded."""
    rendered = ChatPrompt(server, chat)
    prompt = LazyPrompt(rendered, chat.characters)
    count = len(await server.allm.in_queue(prompt, prompt.make))
    rendered.warn(request)
    return count


@dataclass(frozen=True)
class Submitted:
    """A submitted conversation.

    Attributes:
        name: the id of its answer.
        params: parameters of its sampling.
        use: the allowed use of tools; None where no tool may be called.
        thinking: whether its prompt has opened a thought.
        custom: names of the tools that take a text instead of JSON arguments.
    """

    name: str
    streams: Sequence[Stream]
    params: SamplingParams
    use: ToolUse | None
    thinking: bool
    custom: frozenset[str]


async def ask(
    server: Server, request: Request, body: ChatBody, name: str, also: Mapping[str, str] | None = None
) -> Submitted:
    """Queue a conversation. Raises RequestError, Overloaded, EngineStopped.

    name: the id of its answer. also: further names that calls may use, and the tool of each.
    """
    use = use_of(server.tool_format, body.callable, body.choice, body.parallel_tool_calls, also or {})
    defaults = server.allm.about.sampling_defaults
    top = (body.top_logprobs or 0) if body.logprobs else None
    most = body.most_tokens(defaults.get("max_tokens"))
    params = body.params(most, body.stream, top, body.prompt_logprobs, defaults=defaults)
    # The thought is no part of the content, in which a client looks for its stop strings.
    stops = body.stop_in_thoughts is True
    params = replace(params, max_thinking_tokens=body.thinking_budget, stop_in_thoughts=stops)
    most = server.allm.about.engine.longest - 1
    prompt = ChatPrompt(server, body, most if body.truncate_prompt_tokens is None else None)
    lazy = LazyPrompt(prompt, body.characters)
    streams = await submit(server, request, body, [lazy], _with_tools(server, params, use), name)
    prompt.warn(request)
    return Submitted(name, streams, params, use, prompt.thinking, body.custom)


def _with_tools(server: Server, params: SamplingParams, use: ToolUse | None) -> SamplingParams:
    if use is None:
        return params
    structured = use.structured(server.tokenizer, params.structured)
    if not server.allm.about.structured and not use.forced and params.structured is None:
        structured = None  # without grammars, calls are parsed but not enforced
    # The tags of calls are special tokens, which the parser has to see.
    return replace(params, structured=structured, skip_special_tokens=False)
