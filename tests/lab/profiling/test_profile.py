"""`mtp-jax profile` on a small checkpoint: what it writes, what the scopes are, and what it refuses."""

import gzip
import json
import re
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.commands import cli
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.engine import buckets
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import ConfigError, MtpJaxError
from mtp_jax.lab.bench import machine
from mtp_jax.lab.bench.subject import load
from mtp_jax.lab.profiling import run, scopes, workload
from mtp_jax.lab.profiling.run import Options
from mtp_jax.lab.profiling.trace import DISPATCH, HOST_GAP
from mtp_jax.model.products.cpu import CpuProducts
from mtp_jax.spread import Spread
from tests.models import TINY, gqa, tiny_params

MIXED = Options("mixed", batch=2, input_len=12, steps=3, depth=1, temperature=1.0)
CFG = gqa(
    replace(TINY, vocab_size=480, num_hidden_layers=1, first_k_dense_replace=0), qk_norm=False, bias=False
)
"""One layer with experts, and drafts by a dense one."""


@pytest.fixture(scope="module", autouse=True)
def _small():
    """The machine's peaks measured of small arrays, and prompts one by one: fewer programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_MATRIX", 256)
        patch.setattr(machine, "_BYTES", 1 << 24)
        patch.setattr(buckets, "SIZES", replace(buckets.SIZES, prompts=1))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, CFG, tiny_params(CFG), "float32")
    return str(folder)


@pytest.fixture(scope="module")
def subject(model):
    return load(model)


@pytest.fixture(scope="module")
def profiled(subject, tmp_path_factory):
    """(folder, profile) of steps that draft, verify and sample beside prompts; in a folder used before."""
    out = tmp_path_factory.mktemp("profile")
    for old in (out / "hlo" / "old.txt", out / "trace" / "plugins" / "profile" / "then" / "old.xplane.pb"):
        old.parent.mkdir(parents=True)
        old.write_text("old")
    for thread in threading.enumerate():  # a server of other tests may still compile, in this process
        if thread.name == "warm-up":
            thread.join()
    return out, run.profile(subject, MIXED, out)


def test_all_files_are_written(profiled):
    out, _ = profiled
    assert {p.name for p in out.iterdir()} == {
        *("trace", "perfetto.json.gz", "hlo", "cost.json", "memory.json", "compiles.jsonl", "report.md")
    }
    assert list((out / "trace").rglob("*.xplane.pb"))
    assert not list(out.rglob("old.*"))
    assert json.loads(gzip.decompress((out / "perfetto.json.gz").read_bytes()))["traceEvents"]
    assert {p.stem for p in (out / "hlo").iterdir()} >= {
        "step_b2_k1_t16x1_p1_sampled",
        "step_b2_k1_p1_sampled",
    }
    memory = json.loads((out / "memory.json").read_text())
    assert memory["weights_bytes"] > memory["cache_bytes"] > 0
    compiled = [json.loads(line) for line in (out / "compiles.jsonl").read_text().splitlines()]
    assert "jit(step_b2_k1_p1_sampled)" in {c["program"] for c in compiled}
    report = (out / "report.md").read_text()
    assert all(f"\n## Time by {what}\n" in report for what in ("scope", "phase", "part"))
    for expected in ("| attention ", "| MoE route ", "| experts ", "| sample ", "| host gap ", "| verify "):
        assert expected in report


def test_times_of_the_scopes_add_up(profiled):
    _, profile = profiled
    total, traced = sum(profile.scopes.values()), profile.traced
    # Of three steps the mean is two thirds of the median at least, and twice the upper quartile at most.
    assert 0.6 * traced.median <= total <= 2.2 * traced.high
    found = {scope.phase for scope in profile.scopes}
    assert found >= {*scopes.STEP_PHASES, *scopes.CHUNK_PHASES, DISPATCH.phase, HOST_GAP.phase}
    unknown = sum(t for s, t in profile.scopes.items() if s.phase == scopes.OTHER)
    assert unknown < 0.05 * total


def rows_of(report: str, title: str) -> dict[tuple[str, ...], float]:
    """The milliseconds of a table of the report, by the columns before them."""
    (section,) = (s for s in report.split("\n## ") if s.startswith(title))
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
    return {tuple(c.strip() for c in cells[:-2]): float(cells[-2]) for cells in lines[1:]}


@pytest.mark.parametrize("what", ["scope", "phase", "part"])
def test_rows_of_every_table_add_up_to_the_total_that_the_report_names(profiled, what):
    out, profile = profiled
    report = (out / "report.md").read_text()
    rows = rows_of(report, f"Time by {what}")
    total = next(ms for name, ms in rows.items() if name[0] == "total")
    assert total == pytest.approx(profile.wall * 1e3, abs=0.001)
    assert f"mean wall time of a traced step, {total:.3f} ms" in report
    parts = [ms for name, ms in rows.items() if name[0] != "total"]
    assert sum(parts) == pytest.approx(total, abs=0.001 * len(rows))
    assert not [name for name in rows if any(cell.startswith("jit_") for cell in name)]


def test_the_head_of_the_trunk_is_a_row_of_the_phase_that_runs_it(profiled):
    out, _ = profiled
    rows = rows_of((out / "report.md").read_text(), "Time by scope")
    assert rows["verify", "head"] > 0
    assert rows["draft", "head"] > 0
    assert ("accept", "head") not in rows


@pytest.mark.rest
def test_greedy_steps_that_look_at_the_vocabulary_in_parts_have_their_head_in_verify(subject, monkeypatch):
    monkeypatch.setattr(CpuProducts, "head_parts", lambda *_: 3)
    engine = subject.engine(1, slots=2, max_model_len=16)
    key = StepKey(2, 1, 1, SamplingMode())
    engine.runner.compile([key])
    hlo = local_runner(engine).programs.program(key).as_text()
    assert "/verify/greedy/head/" in hlo
    heads = {scopes.scope_of(path) for path in re.findall(r'op_name="([^"]*/head/[^"]*)"', hlo)}
    assert heads == {scopes.Scope("draft", "head"), scopes.Scope("verify", "head")}


def spread(ms: float) -> Spread:
    return Spread.of([ms / 1e3])


def test_the_report_says_what_speculation_gains(profiled):
    _, mixed = profiled
    tokens = mixed.speculation.acceptance_length
    assert 1 < tokens <= MIXED.depth + 1
    assert f"yields {tokens:.2f} tokens per slot; a step without drafts was not measured" in mixed.text()
    of_three = Speculation([2, 2], [2, 2])
    measured = replace(mixed, seconds=spread(6), plain=spread(4), speculation=of_three)
    assert "yields 3.00 tokens per slot and takes 1.50 times as long" in measured.text()
    assert "so it gains: 2.00 times the tokens per second" in measured.text()
    slow = replace(measured, seconds=spread(16))
    assert "so it loses: 0.75 times the tokens per second" in slow.text()
    without = replace(mixed, options={**mixed.options, "depth": 0})
    assert "none of these steps has drafts" in without.text()


@pytest.mark.rest
def test_steps_without_drafts_are_timed_beside_those_that_verify(subject):
    options = Options("verify", batch=1, input_len=8, steps=2, depth=1, temperature=0.0)
    plain = run._plain(subject, options)
    assert plain is not None
    assert plain.count == 2
    assert 0 < plain.low <= plain.high
    assert run._plain(subject, MIXED) is None


def test_launches_are_counted_and_costed(profiled):
    out, profile = profiled
    assert {p.name: p.launches for p in profile.programs} == {
        "step_b2_k1_t16x1_p1_sampled": MIXED.steps,
    }
    for program in json.loads((out / "cost.json").read_text())["programs"]:
        assert 0 < program["roofline_seconds"] < program["traced_seconds"]
        assert program["counted_by_xla"]["flops"] > 0
        assert program["memory_bytes"]["argument"] > program["bytes"] / 4


def test_named_scopes_are_in_the_metadata_of_compiled_programs(profiled):
    out, _ = profiled
    hlo = {path.stem: path.read_text() for path in (out / "hlo").iterdir()}
    step, mixed = hlo["step_b2_k1_p1_sampled"], hlo["step_b2_k1_t16x1_p1_sampled"]
    for phase in scopes.STEP_PHASES:
        assert f"/{phase}/" in step
    for phase in (*scopes.STEP_PHASES, *scopes.CHUNK_PHASES):
        assert f"/{phase}/" in mixed
    for part in set(scopes.PARTS) - {"logprobs"}:
        assert f"/{part}/" in step, part
    known = {s.phase for s in scopes.scopes_of(step).values()}
    assert known >= set(scopes.STEP_PHASES)


def test_a_compilation_among_the_measured_steps_is_an_error(subject, monkeypatch, tmp_path):
    def start(*given):
        work = begin(*given)

        def step():
            jax.jit(lambda x: x + len(shapes))(jnp.zeros(len(shapes)))
            shapes.append(0)
            work.step()

        return workload.Workload(work.engine, step)

    shapes, begin = [0], workload.start
    monkeypatch.setattr(workload, "start", start)
    with pytest.raises(MtpJaxError, match=r"compilations fell into the measured steps \(jit\(<lambda>\)"):
        run.profile(subject, Options("decode", 1, input_len=8, steps=2, depth=0, temperature=0.0), tmp_path)


def test_a_verifying_phase_needs_drafts(subject):
    with pytest.raises(ConfigError, match="--depth 1 or more"):
        workload.start(subject, "verify", batch=2, input_len=8, depth=0, steps=2, temperature=0.0)
    with pytest.raises(ConfigError, match="a depth of 0, not 2"):
        workload.start(subject, "decode", batch=2, input_len=8, depth=2, steps=2, temperature=0.0)
    limit = subject.config.max_position_embeddings
    with pytest.raises(ConfigError, match=f"--input-len {limit + 1}: the model's positions end at {limit}"):
        workload.start(subject, "decode", batch=2, input_len=limit + 1, depth=0, steps=2, temperature=0.0)


def test_the_command_prints_the_report(model, profiled, monkeypatch, capsys, tmp_path):
    _, profile = profiled
    asked = []
    monkeypatch.setattr(run, "profile", lambda *given: asked.append(given) or profile)
    common = ["--model", model, "--batch", "3", "--out", str(tmp_path)]
    assert cli.main(["profile", "--phase", "verify", *common]) == 0
    assert "## Time by scope" in capsys.readouterr().out
    assert asked[0][1:] == (Options("verify", 3, 128, 10, 3, 0.0), tmp_path)
    assert cli.main(["profile", "--phase", "decode", *common]) == 0
    assert asked[1][0].config.num_nextn_predict_layers == 0
    assert asked[1][1] == Options("decode", 3, 128, 10, 0, 0.0)
