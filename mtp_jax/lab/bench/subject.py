"""The subject of a measurement: a model in memory, engines over it, and prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
from tokenizers import Tokenizer

from mtp_jax import checkpoint
from mtp_jax.api.demo import DEMO, path_of
from mtp_jax.api.local import local_engine
from mtp_jax.api.options import LoadFormat
from mtp_jax.decode.law import Acceptance
from mtp_jax.engine.config import Dtype, EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench import corpus
from mtp_jax.lab.bench.report import Report, marked
from mtp_jax.lab.bench.synthetic import random_prompts
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_rows import shares_table
from mtp_jax.model.draft_vocab import listed
from mtp_jax.model.family import config_of_file
from mtp_jax.model.params import Params


@dataclass(frozen=True)
class Subject:
    """A model; engines of several depths share its parameters.

    Attributes:
        draft_vocab: tokens that its drafts choose among; None: all.
        random_weights: whether its weights are random numbers.
    """

    name: str
    directory: Path
    config: ModelConfig
    params: Params
    dtype: Dtype
    draft_vocab: tuple[int, ...] | None = None
    random_weights: bool = False

    def engine(
        self,
        depth: int,
        slots: int,
        max_model_len: int,
        adaptive: bool = False,
        synthetic_acceptance: Acceptance | None = None,
        draft_vocab: int | None = None,
    ) -> Engine:
        """An engine of one depth; at depth 0 without the NextN layers, so that they cost nothing.

        It keeps no prefixes: the same prompts are measured again and again. synthetic_acceptance: at depths
        above 0. draft_vocab: as the option of ``LLM``. Raises ConfigError for a depth above 0 of a model
        without NextN layers.
        """
        tokens = self.draft_vocab if draft_vocab is None else self.tokens(draft_vocab)
        sizes = EngineConfig(
            num_speculative_tokens=depth,
            max_num_seqs=slots,
            max_model_len=max_model_len,
            page_size=self.config.usual_page,
            dtype=self.dtype,
            adaptive_depth=adaptive,
            prefix_cache=False,
            synthetic_acceptance=synthetic_acceptance if depth else None,
            draft_vocab=tokens if depth else None,
        )
        return local_engine(self.config, self.params, sizes)

    def tokens(self, draft_vocab: int) -> tuple[int, ...] | None:
        """That number of the commonest tokens of its list; None for 0. Raises ConfigError for more."""
        return listed(draft_vocab, [self.directory], self.config.vocab_size)

    def marked(self, report: Report) -> Report:
        """The report, which says wherever it ends up if the weights were random numbers."""
        note = "Random weights (--load-format): these figures say what steps cost, and the text is garbage."
        return marked(report, note, {"random_weights": True}) if self.random_weights else report


def load(model: str, drafts: bool = True, load_format: LoadFormat = "auto") -> Subject:
    """Load "demo" or a model directory, in float32 on a CPU and in the checkpoint's dtype elsewhere.

    drafts: whether the measurement needs NextN layers. load_format: as the option of ``LLM``.
    """
    directory = path_of(model)
    on_cpu = jax.default_backend() == "cpu"
    dtype = cast(Dtype, "float32" if on_cpu else config_of_file(directory / "config.json").dtype)
    nextn = None if drafts else 0
    if load_format == "dummy":
        checkpoint.check_no_weights(directory)
    read = checkpoint.load if load_format == "auto" else checkpoint.make_random
    loaded = read(directory, dtype=dtype, narrow="multiplied", num_nextn_layers=nextn)
    params, tokens = jax.block_until_ready(loaded.params), None
    if shares_table(params):
        tokens = listed(None, [directory], loaded.config.vocab_size)
    return Subject(model, directory, loaded.config, params, dtype, tokens, load_format != "auto")


@dataclass(frozen=True)
class EqualPrompts:
    """Prompts of equal length, and their origin."""

    ids: list[list[int]]
    source: str


def prompts_for(subject: Subject, count: int, length: int) -> EqualPrompts:
    """Prompts for the demo model: text held out of its training; for any other: random ids.

    Raises ConfigError if there is not enough text.
    """
    if count < 1:
        raise ConfigError(f"{count} prompts; expected at least 1")
    if subject.name != DEMO:
        return EqualPrompts(random_prompts(subject.config, count, length), "random token ids, seed 0")
    tokenizer = Tokenizer.from_file(str(subject.directory / "tokenizer.json"))
    files = corpus.read_files()
    held_out = corpus.split(files).held_out
    ids = corpus.held_out_prompts(tokenizer, held_out, count, length)
    digest = corpus.fingerprint(files)[:12]
    return EqualPrompts(ids, f"standard library files held out of training, corpus {digest}")
