"""A model's tokens as grammars see them, where text that spells a tag is text.

llguidance has text that a grammar leaves no choice about encoded, and allows these tokens alone. A tag among
them would be a token that it then refuses.
"""

import re
from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken

from mtp_jax.text.compile_grammar import TokenTable
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.text.tools.formats import DSML


def token_table(tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> TokenTable:
    """The tokens of a tokenizer. size: ids of the model, some of which may have no token.

    Tags, which are special tokens and added tokens in angle brackets, have no text here: grammars give them
    by their ids. ``DSML`` is text, as the tags that it stands in are.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    tags = {i for i, token in added.items() if _is_tag(token)}
    texts = [*tokenizer.texts, *[b""] * (size - tokenizer.vocab_size)]
    tokens = [TokenTable.tag(i) if i in tags or not text else text for i, text in enumerate(texts)]
    words = {token.content: i for i, token in added.items() if i not in tags}
    return TokenTable(tokens, eos, _PlainText(tokenizer.backend, words).encode)


def _is_tag(token: AddedToken) -> bool:
    text = token.content
    return text != DSML and (token.special or (text.startswith("<") and text.endswith(">")))


class _PlainText:
    """Encodes text as the model's tokenizer does that knows no tag."""

    def __init__(self, backend: tokenizers.Tokenizer, words: dict[str, int]) -> None:
        """words: added tokens that are text."""
        self._normalizer, self._splitter, self._model = (
            backend.normalizer,
            backend.pre_tokenizer,
            backend.model,
        )
        self._words = words
        longest_first = sorted(words, key=len, reverse=True)
        self._border = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if words else None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ids: list[int] = []
        for part in self._border.split(text) if self._border else [text]:
            word = self._words.get(part)
            ids += self._pieces(part) if word is None else [word]
        return ids

    def _pieces(self, text: str) -> list[int]:
        text = self._normalizer.normalize_str(text) if self._normalizer else text
        pieces = self._splitter.pre_tokenize_str(text) if self._splitter else [(text, (0, len(text)))]
        return [token.id for piece, _ in pieces for token in self._model.tokenize(piece)]
