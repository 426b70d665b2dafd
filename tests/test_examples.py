"""Every file of examples/ runs, and what it shows is true."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from mtp_jax import LLM, ConfigError, SamplingParams, demo_model
from mtp_jax.checkpoint import load, save_checkpoint
from mtp_jax.decode.keys import Origin
from mtp_jax.lab.bench import machine
from mtp_jax.model import trunk
from mtp_jax.simulate.device import Simulated
from tests import golden, tiny_tokenizer
from tests.layers import ROOT
from tests.models import RATES, SMALL, rigged
from tests.rounding import near, of_model

EXAMPLES = ROOT / "examples"
# Tags of tool calls, which the letters of the tiny tokenizer cannot spell.
TAGS = [
    f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose drafts are accepted; the examples name the embedded one, which takes longer."""
    folder = tmp_path_factory.mktemp("small") / "model"
    save_checkpoint(folder, SMALL, rigged(SMALL, seed=2, noise=0.3), "float32")
    tiny_tokenizer.write(folder, SMALL.vocab_size - len(TAGS))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(TAGS)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# One slot and a short context, for which few programs are compiled.
SIZES: dict[str, Any] = {
    **{"num_speculative_tokens": 3, "max_num_seqs": 1, "max_model_len": 256, "page_size": 64},
    **{"prefill_chunk": 16, "compile_cache": None, "seed": 0},
}


@pytest.fixture(scope="module")
def llm(small: Path) -> LLM:
    """A simulated model, whose text never ends by itself, for examples that show nothing of weights."""
    found = LLM(small, simulate=RATES, **SIZES)
    runner = found.engine.runner
    assert isinstance(runner, Simulated)
    runner.language = replace(runner.language, end_rate=0.0)
    return found


@pytest.fixture(scope="module")
def weighty(small: Path) -> LLM:
    sizes: dict[str, Any] = SIZES | {"num_speculative_tokens": 1}
    return LLM(small, **sizes)


def test_every_example_has_a_test():
    own = Path(__file__).read_text(encoding="utf-8")
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert len(names) >= 10
    assert not [name for name in names if f'example("{name}")' not in own]


def test_the_twelve_lines_of_the_documentation():
    text = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
    block = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(compile(block, "docs/research.md", "exec"), names)
    logits, drafts = names["both"](names["m"].params, names["ids"])
    assert logits.shape[1] == drafts.shape[1] + 1
    assert (logits[:, 1:].argmax(-1) == drafts.argmax(-1)).sum() == 3


def test_a_drafter_of_ones_own_drafts_what_followed_before(small, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sizes: dict[str, Any] = SIZES | {"adaptive_depth": False}
    llm = LLM(small, drafter="drafter:Follower", **sizes)
    assert "drafter=Follower" in repr(llm)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (first,) = llm.generate([[5, 6, 7]], params)
    (again,) = llm.generate([[5, 6, 7, *first.outputs[0].token_ids]], params)
    assert again.speculation.of(Origin.OTHER).acceptance_length > 2
    tokens = [5, 6, 7, *first.outputs[0].token_ids, *again.outputs[0].token_ids]
    assert llm.score(tokens).logits[2:-1].argmax(-1).tolist() == tokens[3:]
    shown = example("drafter").main(llm, 8)
    assert shown.speculation.drafted == shown.speculation.of(Origin.OTHER).drafted > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "a step without drafts verifies none"),
        ({"draft_model": "head"}, "draft_model = head beside drafter = Follower, which has no folder"),
        ({"simulate": RATES}, "a simulated model has no weights and no devices"),
        ({"tree": "2x2x3", "num_speculative_tokens": None}, "this model drafts with the drafter Follower"),
        (
            {"adaptive_verification": True, "adaptive_depth": True, "max_num_seqs": 2},
            "drafts are ranked by margins",
        ),
    ],
)
def test_options_that_a_drafter_of_ones_own_excludes_are_refused(small, monkeypatch, options, message):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(ConfigError, match=message):
        LLM(small, drafter="drafter:Follower", **(SIZES | options)).generate([[5, 6, 7]])


@pytest.mark.rest
def test_forward():
    logits, drafts = example("forward").main()
    assert logits.shape[1] == drafts.shape[1] + 1
    assert logits.dtype == drafts.dtype == jnp.float32
    assert (logits[:, 1:].argmax(-1) == drafts.argmax(-1)).sum() >= 3


@pytest.mark.rest
def test_a_step_against_the_gradient_lowers_the_loss():
    before, after = example("gradient").main()
    assert after < before


@pytest.mark.rest
def test_the_step_by_hand_gives_the_greedy_tokens(monkeypatch):
    """Teacher forcing: each token is the trunk's first choice after those before it."""
    module, model = example("step_by_hand"), load(demo_model())
    monkeypatch.setattr(module.trunk, "forward", jax.jit(trunk.forward, static_argnums=1))
    tokens, acceptance_length = module.main(24)
    logits = trunk.logits(model.params, trunk.forward(model.params, model.config, jnp.array([tokens])))[0]
    best = np.asarray(logits).argmax(-1)
    start = len(module.Tokenizer.from_dir(demo_model()).encode(module.PROMPT))
    assert len(tokens) >= start + 24
    assert best[start - 1 : -1].tolist() == tokens[start:]
    assert acceptance_length > 1.5


@pytest.mark.rest
def test_a_mesh_gives_the_logits_of_one_device(monkeypatch):
    logits, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda array: logits.append(get(array)) or logits[-1])
    difference = example("mesh").main()
    split, whole = logits
    assert difference == np.abs(split - whole).max()
    near(split, whole, of_model(load(demo_model()).config, whole.shape[1]))


def test_offline(llm):
    outputs = example("offline").main(llm, 12)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12] * 4
    assert sum(o.speculation.accepted for o in outputs) > 4


@pytest.mark.rest
def test_streaming(llm):
    text, drafted = example("streaming").main(llm, 16)
    assert text.strip()
    assert drafted > 4


@pytest.mark.rest
def test_tools(llm):
    arguments = example("tools").main(llm)
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] in range(1, 8)
    json.dumps(arguments)


@pytest.mark.rest
def test_logprobs(weighty):
    module = example("logprobs")
    engine, forced = module.main(weighty, 6)
    ids = weighty.tokenizer.encode(module.PROMPT)
    size = float(np.abs(weighty.score(ids).logits).max())
    near(engine, forced, of_model(SMALL, len(ids) + 6), size=size)


@pytest.mark.rest
def test_rollouts(weighty, small, monkeypatch):
    module = example("rollouts")
    monkeypatch.setattr(module, "demo_model", lambda: small)
    assert module.main(weighty, 8, probe=()) == ("0", "step-1")


@pytest.mark.rest
def test_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_MATRIX", 128)  # the machine's peaks, of small arrays
    monkeypatch.setattr(machine, "_BYTES", 1 << 20)
    report = example("profile_steps").main(tmp_path, str(golden.model_dir("rigged")), 2)
    assert "verify" in report
    assert (tmp_path / "trace").is_dir()
