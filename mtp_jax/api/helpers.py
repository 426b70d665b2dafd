"""Processes beside the engine's, which try grammars and render chat templates."""

import logging
from contextlib import suppress

from mtp_jax.errors import MtpJaxError
from mtp_jax.text import child
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


def start_helpers(grammars: Grammars | None, tokenizer: Tokenizer | None) -> None:
    """Start them, by a little work for each."""
    if not child.limits():
        _LOG.warning("this system has no /proc: memory of grammars and templates is not limited")
    if grammars is not None:
        with suppress(MtpJaxError):
            grammars.matcher(StructuredOutput(choice=["a"]), ())
    if tokenizer is not None and tokenizer.has_chat_template:
        with suppress(MtpJaxError):  # a template may refuse so short a conversation
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
