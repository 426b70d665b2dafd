"""Text to ids and back: tokenizer.json or tiktoken.model read directly, incremental decoding.

transformers is left out on purpose: its version 5 replaces the pre-tokenizer of these files and loses every
space.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers

from mtp_jax.errors import CheckpointError, PromptTooLong, RequestError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.text import added_tokens, byte_level, tiktoken_file
from mtp_jax.text.chat_template import OWN_VARIABLES, ChatTemplate, first_line
from mtp_jax.text.damages import damages
from mtp_jax.text.messages import with_texts
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tools.conversation import for_template
from mtp_jax.text.tools.formats import format_named, format_of

_BYTES = 256  # values of a byte

JSON_FILE = "tokenizer.json"
FILES = (JSON_FILE, tiktoken_file.FILE)
"""Files of a tokenizer; a model directory needs one of them for text, and the first present is read."""

_END = "\ue000end\ue000"
"""A mark that no text has: the characters are for private use."""

_TEMPLATES = {
    family: Path(__file__).with_name(f"{family}.jinja") for family in ("deepseek_v32", "deepseek_v4")
}


class Tokenizer:
    """The tokenizer of one model directory. Immutable after loading: threads may share it.

    Attributes:
        backend: the `tokenizers.Tokenizer` underneath.
        thoughts: the borders of the model's thoughts.
        vocab_size: one more than the highest id that has a token. The model's own may be padded above it.
        bos_token, eos_token: text of these tokens, "" where the files name none.
        bos_id: id of bos, or None.
        chat_template: the template of conversations without tools; None where there is none.
        OWN_VARIABLES: variables of a chat template that nobody else can give.
        eos_ids: every id that ends a generation (generation_config.json may list several); for models whose
            config.json names none.
    """

    OWN_VARIABLES = OWN_VARIABLES

    def __init__(self, backend: tokenizers.Tokenizer, config: JsonMapping, generation: JsonMapping):
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise CheckpointError(
                f"tokenizer.json has the decoder {type(backend.decoder).__name__}; only ByteLevel, as in the "
                "DeepSeek releases, is supported: convert the tokenizer to byte-level BPE"
            )
        backend.no_truncation()  # a limit stored in the file would cut prompts silently
        backend.no_padding()
        self.backend, self.thoughts = backend, Thoughts.of(backend)
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: i for i, token in added.items()}
        tags = (Thoughts.OPEN, Thoughts.CLOSE)  # which show where a thought ends, special or not
        self._hidden = frozenset(i for i, t in added.items() if t.special and t.content not in tags)
        self._bytes = _token_bytes(backend)
        loses = _may_lose_text(backend, self._bytes)
        self._longest = 0 if loses else max(map(len, self._bytes))  # bytes of a token
        self.vocab_size = len(self._bytes)
        self.bos_token, self.eos_token = _content(config.get("bos_token")), _content(config.get("eos_token"))
        bos = _ids(backend.token_to_id(self.bos_token)) + _ids(generation.get("bos_token_id"))
        eos = _ids(backend.token_to_id(self.eos_token)) + _ids(generation.get("eos_token_id"))
        self.bos_id: int | None = bos[0] if bos else None
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos))
        self._add_bos = config.get("add_bos_token") is True and self.bos_id is not None
        self._template = ChatTemplate(config.get("chat_template"))
        self.chat_template = self._template.sources.get("default")

    @classmethod
    def from_dir(cls, path: str | Path, chat_template: str | Path | None = None) -> "Tokenizer | None":
        """Load a model directory; None when it has neither of ``FILES`` (ids in, ids out still works).

        chat_template: a file in the place of the model's own template.

        Raises:
            CheckpointError: one of its files is damaged, or the template cannot be read.
        """
        folder = Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        if (folder / JSON_FILE).exists():
            backend = _read_backend(folder / JSON_FILE)
            backend = added_tokens.with_added(backend, config, _read_json(folder / added_tokens.FILE))
        elif (folder / tiktoken_file.FILE).exists():
            backend = tiktoken_file.read_tiktoken(folder / tiktoken_file.FILE, config)
        else:
            return None
        config = {**config, "chat_template": templates_of(folder, config, chat_template)}
        return cls(backend, config, _read_json(folder / "generation_config.json"))

    @property
    def tool_format(self) -> str:
        """Name of the format that the chat template writes calls in. RequestError if there is none."""
        return format_of(self._template.source(with_tools=True))

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Ids of `text`. With `add_special_tokens` it begins with exactly one bos, if the model wants one.

        Special tokens written out in `text` become their ids. Pass False for a rendered chat prompt: the
        template prints bos itself. A text that is so long that it must have more than `most` tokens is not
        encoded.

        Raises:
            RequestError: `text` is not a string of valid characters.
            PromptTooLong: it has more than `most` tokens, whatever they are.
        """
        try:
            if not isinstance(text, str):
                raise TypeError
            if most is not None and (least := self._least_tokens(text)) > most:
                raise PromptTooLong(
                    f"at least {least}", most, f"shorten the prompt, which has {len(text)} characters"
                )
            # The encoder of batches lets other threads run meanwhile, which the encoder of one text does not.
            (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoded.ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError(
                f"the prompt must be text of valid Unicode characters, got {type(text).__name__} "
                f"{str(text)[:40]!a}; remove lone surrogates"
            ) from None
        if add_special_tokens and self.bos_id is not None:
            if self._add_bos and ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
            elif ids[:2] == [self.bos_id, self.bos_id]:  # the text has its own bos
                del ids[0]
        return ids

    def _least_tokens(self, text: str) -> int:
        """The least number of tokens that a text of this length can have, as each character is in a token."""
        return len(text) // self._longest if self._longest else 0

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD.

        An id without a token (a model's padded vocabulary has such ids) gives "".
        """
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode("utf-8", "replace")

    def decode_all(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens too."""
        return self.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes one id stands for: possibly a part of a character, b"" for an id without a token."""
        if not 0 <= token < self.vocab_size or (skip_special_tokens and token in self._hidden):
            return b""
        return self._bytes[token]

    @property
    def texts(self) -> Sequence[bytes]:
        """The bytes of every id [vocab_size]; special tokens have theirs, too."""
        return self._bytes

    def added_id(self, text: str) -> int | None:
        """The id of a text that was added to the vocabulary as one token; None if it was not."""
        return self._added.get(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._template.sources)

    def template_variables(self, with_tools: bool) -> frozenset[str]:
        """The variables that the chat template reads, beside messages, tools and variables that are set here.

        Raises RequestError for a template that is broken or missing, and Overloaded.
        """
        return self._template.variables(with_tools)

    def apply_chat_template(
        self,
        messages: Sequence[JsonMapping],
        tools: Sequence[JsonMapping] | None = None,
        add_generation_prompt: bool = True,
        tool_format: str | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render the conversation to a prompt; encode it with `add_special_tokens=False`.

        The checkpoint's own template runs in Jinja's immutable sandbox, in a process of its own. `kwargs`
        reach it as variables, for example `thinking=True`; they, messages and tools are values that JSON has.

        messages, tools: see OpenAI's API; parts of a content must be text. tool_format: the format of calls
        where the template does not write them; by default the template's own. continue_final_message: the
        prompt ends with the text of the last message, which the model continues, instead of opening a new
        answer.

        Raises:
            RequestError: the messages are not of that form; no template, a broken one, one above its limits,
                or one that refuses the messages.
            Overloaded: the machine is too busy to render it.
        """
        if taken := sorted(OWN_VARIABLES.intersection(kwargs)):
            raise RequestError(f"chat template variables {taken} are set here; leave them out")
        source = self._template.source(with_tools=tools is not None)
        messages = with_texts(messages)
        messages = _with_end_marked(messages) if continue_final_message else messages
        form = format_named(tool_format or format_of(source))
        variables = {
            "messages": for_template(source, form, messages, tools),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **kwargs,
        }
        prompt = self._template.render(variables)
        return _up_to_the_mark(prompt) if continue_final_message else prompt


class StreamDecoder:
    """Incremental `Tokenizer.decode`: the results of all pushes and the flush, joined, equal the full decode.

    Works on bytes, so a character whose bytes span tokens appears when its last byte does, and invalid bytes
    are replaced as soon as they are known to be invalid, never held for ever. One object per request.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Take any number of ids; return the characters they complete."""
        return self._utf8.decode(b"".join(self._tokenizer.token_bytes(i, self._skip) for i in token_ids))

    def flush(self) -> str:
        """End of the stream: "" or, for an unfinished character, U+FFFD. Then the object is as new."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def templates_of(folder: Path, config: JsonMapping, chat_template: str | Path | None) -> object:
    """The chat template, or the named templates, as ``ChatTemplate`` takes them.

    A further file of a name, such as tool_use, goes before the template of that name. config: of
    tokenizer_config.json. chat_template: a file in the place of all. Raises CheckpointError.
    """
    if chat_template is not None:
        return _read_text(Path(chat_template))
    default = _template(folder, config)
    further = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if not further:
        return default
    named = {**ChatTemplate(default).sources, **{file.stem: _read_text(file) for file in further}}
    return [{"name": name, "template": template} for name, template in named.items()]


def _template(folder: Path, config: JsonMapping) -> object:
    """The checkpoint's chat template, or ours of a family that comes with an encoder instead."""
    if (file := folder / "chat_template.jinja").exists():
        return _read_text(file)
    if found := _read_json(folder / "chat_template.json").get("chat_template"):  # of older processors
        return found
    family = str(_read_json(folder / "config.json").get("model_type"))
    if config.get("chat_template") or family not in _TEMPLATES:
        return config.get("chat_template")
    # The encoder is read and never run: V4's encoders differ in their efforts, and config.json does not tell.
    encoder = folder / "encoding" / "encoding_dsv4.py"
    three = encoder.exists() and "REASONING_EFFORT_PROMPTS" in _read_text(encoder)
    return ("{%- set three_efforts = true -%}\n" if three else "") + _read_text(_TEMPLATES[family])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not readable UTF-8 text: {first_line(error)}") from error


def _with_end_marked(messages: Sequence[JsonMapping]) -> list[JsonMapping]:
    """The messages, with a mark behind the text of the last. Raises RequestError if that has no text."""
    before, last = messages[:-1], messages[-1] if messages else {}
    text = last.get("content")
    if not isinstance(text, str) or not text.strip():
        raise RequestError("continue_final_message: the last message has no text; leave it out")
    return [*before, {**last, "content": text + _END}]


def _up_to_the_mark(prompt: str) -> str:
    """A prompt without the template's text after the last message. Raises RequestError."""
    found, mark, _ = prompt.rpartition(_END)
    if not mark:
        raise RequestError(
            "continue_final_message: the chat template leaves out or changes the last message; leave it out"
        )
    return found


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    with damages(lambda reason: f"{file} is damaged: {reason}; copy it again from the release"):
        return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every id [vocab_size].

    A token that is not written in the characters of byte-level BPE, and every added token, is plain text.
    """
    added = backend.get_added_tokens_decoder()
    vocab = backend.get_vocab(with_added_tokens=False)
    table = [b""] * (max([*vocab.values(), *added, -1]) + 1)
    for token, entry in added.items():
        table[token] = entry.content.encode()
        vocab.pop(entry.content, None)
    for token, text in zip(vocab.values(), byte_level.read_all(list(vocab)), strict=True):
        table[token] = text
    return table


def _may_lose_text(backend: tokenizers.Tokenizer, tokens: Sequence[bytes]) -> bool:
    """Whether a part of a text may be in no token: a normalizer shortens it, or there are too few tokens."""
    normalizer = backend.normalizer  # DeepSeek's files have an empty sequence
    if normalizer is not None and not (isinstance(normalizer, normalizers.Sequence) and not len(normalizer)):
        return True
    added = backend.get_added_tokens_decoder().values()
    takes_space = any(token.lstrip or token.rstrip for token in added)
    return takes_space or len({token for token in tokens if len(token) == 1}) < _BYTES


def _content(token: object) -> str:
    """A special token is written as its text or as an object with `content`."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else ""


def _ids(value: object) -> list[int]:
    """A token id entry as a list: absent, one id, or several."""
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if type(entry) is int and entry >= 0]


def _read_json(path: Path) -> JsonObject:
    """The object in a JSON file; {} when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: {first_line(error)}; copy it again from the release"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
