"""/v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import CompletionOutput, RequestOutput, Stream, Tokenizer
from serve.answers import chat_logprobs, token_extras, usage
from serve.bodies import read
from serve.calls import Call, Shown
from serve.generation import submit
from serve.reasoning import Splitter, ThoughtTokens, may_think
from serve.schema import ChatBody, Conversation
from serve.state import Server


class ChatPrompt:
    """Renders a conversation when called, off the event loop.

    Attributes:
        thinking: whether the prompt ends inside a think block.
    """

    def __init__(self, tokenizer: Tokenizer, conversation: Conversation) -> None:
        self._tokenizer, self._conversation = tokenizer, conversation
        self.thinking = False

    def __call__(self) -> list[int]:
        """Token ids. Raises RequestError."""
        options = self._conversation.chat_template_kwargs
        given = (
            options.model_dump(exclude_none=True, include=set(type(options).model_fields)) if options else {}
        )
        messages = [message.for_template() for message in self._conversation.messages]
        prompt = self._tokenizer.apply_chat_template(messages, **given)
        self.thinking = self._tokenizer.opens_thought(prompt)
        return self._tokenizer.encode(prompt, add_special_tokens=False)


async def chat_completions(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, ChatBody)
    prompt = ChatPrompt(server.tokenizer, body)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.params(most, body.stream, (body.top_logprobs or 0) if body.logprobs else None)
    streams = await submit(server, body, [prompt], params)
    return await _Chat(server, request, body, streams, prompt.thinking).respond()


class _Chat(Call):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self, server: Server, request: Request, body: ChatBody, streams: Sequence[Stream], thinking: bool
    ) -> None:
        super().__init__(server, request, body, streams)
        self.body, self._thinking = body, thinking
        self._tells_tokens |= body.logprobs is True
        self._may_think = may_think(server.tokenizer)
        self._splitters: dict[int, Splitter] = {}
        self._thoughts: dict[int, ThoughtTokens] = {}
        self._thought: set[int] = set()

    def take(self, output: RequestOutput) -> RequestOutput:
        """Counts the tokens of thoughts."""
        if self._thinking or self._may_think:
            for c in output.outputs:
                counted = self._thoughts.setdefault(c.index, ThoughtTokens(self.server.tokenizer))
                counted.push(c.token_ids)
        return super().take(output)

    def choice(self, index: int, output: RequestOutput, c: CompletionOutput, shown: Shown) -> dict[str, Any]:
        """A message, or what is new of it."""
        del output
        splitter = self._splitters.setdefault(index, Splitter(self._thinking, self._may_think))
        thought, answer = splitter.push(c.text)
        if c.finish_reason is not None:
            rest = splitter.flush()
            thought, answer = thought + rest[0], answer + rest[1]
        if thought:
            self._thought.add(index)
        message: dict[str, Any] = {} if self.body.stream and shown.begun else {"role": "assistant"}
        if thought:
            message |= {"reasoning": thought, "reasoning_content": thought}
        if answer or not self.body.stream:
            message["content"] = answer
        choice = {
            "index": index,
            "delta" if self.body.stream else "message": message,
            "logprobs": None,
            "finish_reason": c.finish_reason,
        }
        if c.logprobs is not None:
            top = self.body.top_logprobs or 0
            choice["logprobs"] = chat_logprobs(self.server.tokenizer, c.token_ids, c.logprobs, top)
        extras = token_extras(c, self.body.return_token_ids, self.body.return_token_origins)
        return choice | extras

    def usage(self, done: Sequence[RequestOutput]) -> dict[str, Any]:
        """With the tokens that went into thoughts, if there were any."""
        thoughts = [t.count for i, t in self._thoughts.items() if self._thinking or i in self._thought]
        return usage(done, sum(thoughts) if thoughts else None)
