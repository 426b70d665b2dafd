"""A kind of head that this file declares is read, described, counted, refused, and drafts in an engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from mtp_jax import LLM, ConfigError, SamplingParams
from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.commands import cli
from mtp_jax.decode.drafter.drawn import chains
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.keys import Origin
from mtp_jax.heads import kinds
from mtp_jax.heads.outside import taken
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import Captures, DraftHead, StoredTensor, plain
from mtp_jax.model.layer_specs import Weight
from mtp_jax.model.spec import parameters
from tests import tiny_tokenizer
from tests.checkpoint.files import Raw, write_raw
from tests.models import SMALL, rigged

VOCAB, DRAFTS = SMALL.vocab_size, 3


@parameters
class Bigrams:
    """Scores of tokens after each token."""

    head: Weight  # [V, V]

    @property
    def blocks(self) -> tuple[()]:
        return ()

    merging = entries = property(lambda self: ())


@dataclass(frozen=True, kw_only=True)
class BigramConfig(DraftHead):
    """A head that knows one table."""

    drafts = f"{__name__}:drafter"
    taps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "bigram"

    @classmethod
    def reads(cls, raw: JsonObject, tensors: Mapping[str, StoredTensor]) -> bool:
        return raw.get("architectures") == ["Bigrams"]

    @classmethod
    def read(
        cls,
        raw: JsonObject,
        trunk: ModelConfig,
        tensors: Mapping[str, StoredTensor],
        captures: Captures | None,
    ) -> Self:
        if raw.get("vocab_size") != trunk.vocab_size:
            raise ConfigError(f"vocab_size = {raw.get('vocab_size')!r:.80}; expected {trunk.vocab_size}")
        return cls()

    @classmethod
    def names(cls, names: Any) -> dict[str, str]:
        return {name: name.removeprefix("toy.") for name in names}

    def specs(self, trunk: ModelConfig) -> Bigrams:
        return Bigrams(plain("after.weight", trunk.vocab_size, trunk.vocab_size))


class Drafter(Nothing):
    """Drafts by the table."""

    def propose(self, params: Any, own: Any, s: Any, rules: Any, on: Any) -> Any:
        def after(k, before):
            return params.drafter.head[before]

        return chains(s, rules, on, self.vocab, after, Origin.OTHER), own


def drafter(trunk: ModelConfig) -> Drafter:
    return Drafter(trunk.vocab_size)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose next token follows from the last one, and a head whose table is the model's."""
    model, head = (tmp_path_factory.mktemp("toy") / name for name in ("model", "head"))
    params = rigged(SMALL, seed=2, noise=0.3)
    save_checkpoint(model, SMALL, params, "float32")
    tiny_tokenizer.write(model, VOCAB)
    head.mkdir()
    table = np.asarray(params.embed @ params.table.T, np.float32)  # blocks are quiet beside the embedding
    write_raw(head / "model.safetensors", {"toy.after.weight": Raw("F32", [VOCAB] * 2, table.tobytes())})
    (head / "config.json").write_text(json.dumps({"architectures": ["Bigrams"], "vocab_size": VOCAB}))
    return model, head


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference of the kind, which is forgotten after the test."""
    monkeypatch.setattr(kinds, "_ADDED", [])
    return f"{__name__}:BigramConfig"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    status = cli.main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_the_head_drafts_and_the_text_is_the_models(folders, known):
    model, head = folders
    sizes: dict[str, Any] = {"num_speculative_tokens": DRAFTS, "max_num_seqs": 1, "max_model_len": 64}
    sizes |= {"page_size": 64, "prefill_chunk": 16, "compile_cache": None, "adaptive_depth": False}
    llm = LLM(model, draft_model=head, drafter=BigramConfig, **sizes)
    assert "drafter=bigram" in repr(llm)
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7]], greedy)
    tokens = list(output.outputs[0].token_ids)
    assert llm.score([5, 6, 7, *tokens]).logits[2:-1].argmax(-1).tolist() == tokens
    assert output.speculation.of(Origin.OTHER).acceptance_length > 2
    assert output.speculation.of(Origin.NEXTN).steps == 0


def test_a_kind_of_head_without_a_head_is_refused(folders, known):
    with pytest.raises(ConfigError, match=r"is a kind of head, and .*model has none; name the head's folder"):
        LLM(folders[0], drafter=known, num_speculative_tokens=1, compile_cache=None)


def test_info_describes_the_head(folders, known, capsys):
    model, head = folders
    text = run(capsys, "info", model, "--draft-model", head, "--drafter", known)
    assert "draft head          bigram\n" in text
    assert f"draft parameters    {VOCAB**2:,}\n" in text


def test_plan_counts_the_head(folders, known, capsys):
    model, head = folders

    load = "--gpus", 1, "--depths", "0,2", "--context", 64, "--requests", 1, "--json"
    plan = json.loads(run(capsys, "plan", model, "--draft-model", head, "--drafter", known, *load))
    with_head, trunk = sorted(plan["memory"], key=lambda side: not side["drafts"])
    assert with_head["weights"] - trunk["weights"] == 2 * VOCAB**2
    assert with_head["cache_bytes_per_token"] == trunk["cache_bytes_per_token"]
    assert [row["depth"] for row in plan["rows"]] == [0, 2]


def test_tune_head_refuses_the_head(folders, known, capsys, tmp_path):
    model, head = folders
    (tmp_path / "texts").write_text('{"text": "a"}\n')
    said = run(capsys, "tune-head", model, "--draft-model", head, "--drafter", known,
               "--prompts", tmp_path / "texts", "--out", tmp_path / "out")  # fmt: skip
    assert "bigram heads are not tuned here" in said


def test_a_head_that_no_kind_reads_is_no_head(folders, monkeypatch, capsys):
    monkeypatch.setattr(kinds, "_ADDED", [])
    model, head = folders
    assert "deepseek_v3" in run(capsys, "info", model, "--draft-model", head)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("nowhere:Drafter", "No module named 'nowhere'; expected package.module:name"),
        ("json", "expected package.module:name"),
        ("json:Nothing", "has no attribute 'Nothing'; expected package.module:name"),
        ("json:__name__", "is a str; expected a class"),
        (3, "drafter = 3; expected a class"),
    ],
)
def test_a_drafter_that_is_none_is_refused(drafter, message):
    with pytest.raises(ConfigError, match=message):
        taken(drafter)
