"""Programs of `mtp-jax compile`: the same tokens with nothing compiled; nothing else is taken for them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels_pallas import absent
from mtp_jax import LLM, RequestOutput
from mtp_jax.api.built import write_manifest
from mtp_jax.api.load import load_model
from mtp_jax.api.local import local_runner, make_runner
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Silent
from mtp_jax.commands import cli
from mtp_jax.decode import facts, lowering
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.decode.manifest import FILE, Manifest
from mtp_jax.engine.buckets import Buckets
from mtp_jax.errors import ConfigError
from mtp_jax.model.params import shapes
from tests import golden
from tests.api.helpers import GREEDY, PROMPT, RIGGED, last, serving, tokens
from tests.decode.helpers import compilations as compilations

IDS = ["--token-ids", "1,2", "-q"]
WANT = golden.expected("rigged")
SIZES = ["--max-num-seqs", "1", "--max-model-len", "64", "--page-size", "16", "--prefill-chunk", "16"]
ASKED = [*SIZES, "--num-speculative-tokens", "2", "--fixed-depth", "--no-compile-cache"]


def few(self: Buckets, structured: bool) -> tuple[list[StepKey], list[StepKey]]:
    """Programs that serve greedy prompts: a chunk, and a step."""
    del structured
    greedy, pages = SamplingMode(), self._config.columns
    return [StepKey(0, 0, pages, greedy, 16, 1), StepKey(1, 2, pages, greedy)], []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("built") / "programs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "server", few)
        assert cli.main(["compile", str(RIGGED), "--out", str(folder), "-q", *ASKED]) == 0
        yield folder


@pytest.fixture
def copied(built, tmp_path) -> Iterator[Path]:
    for path in built.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def opened(folder: Path | None, **options: Any) -> LLM:
    return LLM(RIGGED, programs=folder, compile_cache=None, **options)


def check(output: RequestOutput) -> None:
    """The golden tokens, drafted as often."""
    assert tokens(output) == WANT["spec_ids.2"].tolist()
    assert output.speculation.accepted == WANT["spec_accept.2"].sum() > 4


def test_a_server_answers_without_compiling_or_lowering(built, compilations):
    llm = opened(built)

    async def run() -> RequestOutput:
        async with serving(llm) as allm:
            return await last(allm.generate(PROMPT, GREEDY))

    check(asyncio.run(run()))
    assert not [event for event in compilations if "trace" not in event]
    kept = local_runner(llm.engine).programs.kept
    assert (kept.compiled, kept.loaded) == (0, len(kept_files(built)))
    assert llm.engine.config.max_num_seqs == 1


def kept_files(folder: Path) -> dict[str, str]:
    return json.loads((folder / FILE).read_text())["programs"]


def test_prompts_are_completed_by_the_programs_of_a_server(built, compilations):
    """Here a program of the very size that a prompt needs is not there."""
    (output,) = opened(built).generate([PROMPT[:3]], GREEDY)
    assert not [event for event in compilations if "trace" not in event]
    assert len(tokens(output)) == 24


def test_another_option_is_refused_by_its_name(built, capsys):
    assert cli.main(["generate", str(RIGGED), "--programs", str(built), "--max-num-seqs", "2", *IDS]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: --max-num-seqs 2, but the programs in ") or told.startswith(
        "error: max_num_seqs = 2, but the programs in "
    )
    assert "were compiled with 1; leave" in told
    for name, value in (("max_model_len", 32), ("num_speculative_tokens", 1), ("suffix_drafts", True)):
        with pytest.raises(ConfigError, match=f"{name} = .*, but the programs in .* were compiled with"):
            opened(built, **{name: value})


def test_another_fact_is_refused_by_its_name(built, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.99")
        with pytest.raises(ConfigError, match=r"do not fit this process: jax was '?0\.1.*here it is '?0\.99"):
            opened(built)
    config = json.loads((RIGGED / "config.json").read_text()) | {"rms_norm_eps": 0.25}
    for path in RIGGED.iterdir():
        (tmp_path / path.name).symlink_to(path.resolve())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"decoding.model.cfg.rms_norm_eps was 1e-06, here it is 0.25"):
        LLM(tmp_path, programs=built, compile_cache=None)


def test_the_command_line_takes_the_sizes_from_the_folder(built, monkeypatch, capsys):
    """Variables that change no program are no reason against it."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    asked = ["--programs", str(built), "--no-compile-cache", "--temperature", "0", "--max-tokens", "2"]
    assert cli.main(["generate", str(RIGGED), *IDS, *asked]) == 0
    assert capsys.readouterr().out.strip()


def test_a_folder_that_everybody_may_write_to_is_refused(copied):
    copied.chmod(0o777)
    with pytest.raises(ConfigError, match="with mode 777, and its files are executed"):
        opened(copied)
    copied.chmod(0o700)


def test_programs_of_other_options_are_deleted(copied):
    """They would lie there for ever."""
    old = copied / f"step-{'0' * 64}-program"
    old.write_bytes(b"")
    manifest = Manifest.read(copied)
    write_manifest(copied, manifest.options, manifest.facts, manifest.programs)
    assert not old.exists()
    assert {path.name for path in copied.glob("*-program")} == {*manifest.programs}


def test_a_damaged_file_or_manifest_is_refused(copied):
    found = json.loads((copied / FILE).read_text())
    step = next(copied.glob("step*-program"))  # a server would load it once requests come
    kept = step.read_bytes()
    step.write_bytes(kept[:100] + b"x" + kept[101:])
    with pytest.raises(ConfigError, match=f"{step.name} cannot be used: it is damaged, or was replaced"):
        opened(copied)
    step.write_bytes(kept)
    path = copied / next(name for name in found["programs"] if name.startswith("empty"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ConfigError, match=f"{path.name} cannot be used: it is damaged, or was replaced"):
        opened(copied)
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot be used: .*No such file"):
        opened(copied)
    for text, told in (("{}", "is damaged"), ("[", "is damaged"), ('{"format": 2}', "has format 2")):
        (copied / FILE).write_text(text)
        with pytest.raises(ConfigError, match=told):
            opened(copied)
    (copied / FILE).unlink()
    with pytest.raises(ConfigError, match=r"cannot be read .*; name a folder that mtp-jax compile"):
        opened(copied)


@pytest.mark.rest
def test_a_program_that_is_not_there_is_compiled_and_named(built, compilations, caplog):
    llm = opened(built)
    assert len(llm.draft(PROMPT, 2).token_ids) == 2
    assert compilations
    assert any("draft_k2_p" in told and "not among the programs" in told for told in caplog.messages)


def test_shapes_that_config_json_announces_are_these_of_the_files():
    """So programs that were compiled without weights fit."""
    options = LLMOptions(RIGGED, max_model_len=64, compile_cache=None)
    found = [load_model(options, Silent(), abstract=abstract) for abstract in (True, False)]
    told = [facts.named(jax.devices()[:1], decoding=m.decoding, weights=shapes(m.params)) for m in found]
    assert told[0] == told[1]


@pytest.mark.rest
def test_a_state_whose_order_in_memory_is_said_gives_the_same_tokens(monkeypatch):
    """TPUs have one; here it is a processor's own order, and the programs that say it run."""
    monkeypatch.setattr(lowering, "platform", lambda: "tpu")
    llm = opened(None, max_num_seqs=1, max_model_len=64, num_speculative_tokens=2)
    runner = local_runner(llm.engine)
    assert runner.programs.lowering.ordered
    check(*llm.generate([PROMPT], GREEDY))
    orders = [a.format.layout.major_to_minor for a in jax.tree.leaves(runner.state)]
    assert all(order == tuple(sorted(order)) for order in orders)


def test_a_mesh_that_no_host_of_tpus_has_is_one_line(tmp_path, capsys, monkeypatch):
    """The number is wrong whether or not libtpu is there."""
    monkeypatch.setattr(absent, "prepare", lambda: None)
    asked = ["--device", "v5e", "--mesh", "1x3", "--out", str(tmp_path / "out"), "-q"]
    assert cli.main(["compile", str(RIGGED), *asked]) == 2
    assert capsys.readouterr().err == "error: mesh = 1x3 is 3 chips of v5e; a host has 1 or 4 or 8\n"


def test_shapes_for_devices_that_are_not_here_put_nothing_on_them():
    """Rows for drafts, on a mesh, whose devices stand in for absent ones."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    model = load_model(LLMOptions(mesh=mesh, compile_cache=None), Silent(), abstract=True)
    runner = make_runner(model.decoding, model.params, model.engine, allocate=False)
    assert model.engine.draft_vocab
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(runner.params))


def test_a_card_without_its_compiler_is_one_line(tmp_path, capsys, monkeypatch):
    def none(*given: Any) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(absent, "mesh_of", none)
    monkeypatch.setattr(absent, "prepare", lambda: None)
    assert cli.main(["compile", str(RIGGED), "--device", "h200", "--out", str(tmp_path / "out"), "-q"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "error: device = 'h200' needs jax's compiler for it (topology not implemented for cuda); install the "
        "extra gpu-compile"
    )
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()
