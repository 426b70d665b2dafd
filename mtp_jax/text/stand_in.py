"""A tokenizer for random weights without one, so that every route can be asked: a token for each byte.

Its texts mean nothing, as the tokens do.
"""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mtp_jax.text import byte_level
from mtp_jax.text.tokenizer import Tokenizer, templates_of

_BYTES = 256  # values of a byte
_PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
"""The template of a folder that has none: a line for each message."""


def stand_in(folder: Path, vocab_size: int, chat_template: str | Path | None = None) -> Tokenizer | None:
    """A tokenizer whose first 256 ids are bytes; the text of every other id is a space and its number.

    A prompt of n bytes has n tokens. chat_template: a file; None: the folder's, or a line for each message.
    Returns None for a vocabulary of less than 256 tokens. Raises CheckpointError.
    """
    if vocab_size < _BYTES:
        return None
    texts = [bytes([b]) if b < _BYTES else b" %d" % b for b in range(vocab_size)]
    vocab = {byte_level.written(text): token for token, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    template = templates_of(folder, {}, chat_template)
    return Tokenizer(backend, {"chat_template": template or _PLAIN}, {})
