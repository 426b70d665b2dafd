"""A simulated device in the place of a model: its configuration, tokenizer and template, and no weights."""

from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.model.config import ModelConfig
from mtp_jax.simulate.device import Simulated
from mtp_jax.simulate.language import Language
from mtp_jax.simulate.memory import SlotMemory
from mtp_jax.text.grammar import Grammars
from mtp_jax.text.tokenizer import Tokenizer

MARK = "SIMULATED"
"""The weight version of a simulated model, which has no weights."""

_TOKENS = 64
"""Mean number of tokens of a text: enough for a client to stream."""


def simulated_language(cfg: ModelConfig, rates: tuple[float, ...], tokenizer: Tokenizer | None) -> Language:
    """The language of a tokenizer's printable tokens; a text has 64 tokens on average."""
    words = tokenizer and _printable(tokenizer, cfg.vocab_size)
    ends = tuple(t for t in cfg.eos_token_ids if t < cfg.vocab_size)
    return Language(cfg.vocab_size, rates, 0, words or None, ends, 1 / _TOKENS if ends else 0.0)


def simulated_engine(
    cfg: ModelConfig, config: EngineConfig, language: Language, seconds: float, grammars: Grammars | None
) -> Engine:
    """An engine whose outputs are texts of the language. seconds: duration of a step."""
    memory = SlotMemory(config.max_num_seqs, config.pages_per_shard(1), config.page_size, 1)
    routing = cfg.moe_layers, cfg.num_experts_per_tok, cfg.n_routed_experts
    runner = Simulated(
        language, memory, seconds=seconds, margins=config.adaptive_verification, routing=routing
    )
    return Engine(cfg, config, runner, grammars, MARK)


def _printable(tokenizer: Tokenizer, vocab: int) -> tuple[int, ...]:
    """Tokens whose text is printable ASCII."""
    texts = ((t, tokenizer.decode([t])) for t in range(min(vocab, tokenizer.vocab_size)))
    return tuple(t for t, text in texts if text and text.isascii() and text.isprintable())
