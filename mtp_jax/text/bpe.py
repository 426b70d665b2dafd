"""Training of the demo model's tokenizer: byte-level BPE in the release layout of DeepSeek-V3."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mtp_jax.errors import ConfigError

# The bar is U+FF5C and the low line U+2581, as in the released tokenizers.
BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT)  # in the order of their ids

MAX_TOKEN_CHARS = 32  # longer tokens would be rulers of dashes, a waste of a small vocabulary

# Patterns of pieces that BPE never merges across; the first alternative that matches applies.
PRE_TOKENS = "|".join(
    (
        r"\s*\n\s*",  # line ends with the indentation that follows: "\n        " can be one token
        r"\p{N}",  # every digit is a piece of its own
        r"[^\s\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+",  # a word with the sign before it: ".append", "(self", "_name"
        r" [\p{L}\p{M}]+",  # ... or the space before it
        r" ?[^\s\p{L}\p{M}\p{N}]+",  # operators: " ==", "):"
        r"\s+(?!\S)",  # blanks without the last, which belongs to the word after it
        r"\s+",
    )
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<\uff5cAssistant\uff5c>' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('role ' + message['role'] + ' is not one of system, user, assistant') }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with `vocab_size` ids in total, special tokens included.

    All 256 bytes are in the alphabet, hence every text decodes to itself.

    Raises:
        ConfigError: `vocab_size` leaves no room for the bytes and the special tokens.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: at least {smallest} (256 bytes, special tokens)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(content, special=True, normalized=False) for content in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=MAX_TOKEN_CHARS,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def write_tokenizer(folder: str | Path, tokenizer: Tokenizer, model_max_length: int = 2048) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model_max_length,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)},
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
