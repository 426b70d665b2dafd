"""A tokenizer for grammars."""

import pytest
import tokenizers

from mtp_jax.text.grammar import Grammars
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.simulate.histories import CFG


@pytest.fixture(scope="session")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of one token per character."""
    folder = tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), 104)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Grammars(Tokenizer(backend, {}, {}), CFG.vocab_size, CFG.eos_token_ids)
