"""The closed loop over the Python engine, its latencies, and acceptance that is forced and says so."""

import json
import sys

import pytest

from mtp_jax.commands import cli
from mtp_jax.errors import CheckpointError
from mtp_jax.lab.bench import report, sweep
from mtp_jax.lab.bench.latency import LatencySummary, Percentiles, Timeline, median_of, row
from mtp_jax.lab.bench.report import Report
from mtp_jax.lab.bench.subject import load as load_model
from tests import golden
from tests.checkpoint.files import drop_nextn, edit_tensors
from tests.lab.bench import small

pytestmark = pytest.mark.usefixtures("shared_programs")

SIZES = ["--prompt-tokens", "6", "--max-tokens", "24", "--requests", "5", "--rounds", "2"]
SIZES += ["--compile-cache", "none", "--concurrency", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(small.model(tmp_path_factory.mktemp("small") / "model"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory, model):
    """Runs `mtp-jax bench`; gives (JSON, path of the figure)."""

    def run(name, *given):
        out = tmp_path_factory.mktemp("bench") / "out.json"
        command = ["bench", name, "--model", model, *SIZES, "--json", str(out)]
        assert cli.main([*command, *given]) == 0
        return json.loads(out.read_text()), out.with_suffix(".png")

    return run


def test_without_drafts_a_folder_need_not_have_the_layers_it_declares(tmp_path):
    rigged = golden.model_dir("rigged")
    folder = str(edit_tensors(rigged, tmp_path / "model", drop_nextn(rigged)))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers = 1"):
        load_model(folder)
    assert load_model(folder, drafts=False).config.num_nextn_predict_layers == 0


def test_without_matplotlib_there_are_figures_in_numbers_alone(monkeypatch, capsys, tmp_path):
    done = Report("Load: x", ("a",), [(1,)])
    monkeypatch.setattr("mtp_jax.lab.commands.bench._depth", lambda args: iter([done]))
    monkeypatch.setattr("mtp_jax.lab.bench.plot.can_draw", lambda: False)
    out = tmp_path / "out.json"
    command = ["bench", "depth", "--compile-cache", "none", "--json", str(out)]
    assert cli.main(command) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    assert "no figure, as matplotlib is missing" in capsys.readouterr().err
    assert cli.main([*command, "--png", str(tmp_path / "out.png")]) == 2
    assert "--png needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_an_option_that_would_do_nothing_is_not_offered(capsys):
    assert cli.main(["bench", "serve", "http://127.0.0.1:9", "--compile-cache", "none"]) == 2
    assert "--compile-cache" in capsys.readouterr().err


def test_latencies_of_a_timeline():
    line = Timeline(10.0)
    for at, tokens in ((12.0, 1), (13.0, 0), (15.0, 3), (16.0, 1)):
        line.add(at, tokens)
    assert (line.tokens, line.first, line.end, line.per_token) == (5, 2.0, 6.0, 1.0)
    assert line.gaps() == [1.0, 1.0, 1.0, 1.0]
    summary = LatencySummary.of([line, Timeline(11.0)], 8.0)  # the second got nothing
    assert (summary.requests, summary.tokens, summary.rate) == (1, 5, 0.625)
    assert summary.itl == Percentiles(1.0, 1.0, 1.0, 1.0, 4)
    runs = [LatencySummary.of([line], seconds) for seconds in (8.0, 4.0, 2.0, 16.0)]
    assert row(runs)[0] == "0.9"  # the median of 5/8, 5/4, 5/2 and 5/16
    assert median_of(runs, "ttft", "p50") == 2.0


@pytest.mark.slow
def test_modes_are_compared_in_one_run(bench, capsys):
    found, figure = bench("sweep", "--modes", "fixed,adaptive", "--depth", "2")
    off, fixed, adaptive = found["figures"]["levels"]
    assert (off["mode"], fixed["mode"], adaptive["mode"]) == ("off", "fixed", "adaptive")
    assert off["speedup"]["median"] == off["acceptance_length"] == 1
    assert off["depth_steps"].keys() == {"0"}
    assert adaptive["same_tokens"] is fixed["same_tokens"] is True
    assert fixed["depth_steps"].keys() == {"2"}
    assert 2 < fixed["acceptance_length"] <= 3
    assert adaptive["depth_steps"].keys() <= {"0", "1", "2"}  # which of them it finds best, the clock says
    for level in (off, adaptive):
        assert level["concurrency"] == 2
        assert len(level["rounds"]) == 2
        for summary in level["rounds"]:
            assert (summary["requests"], summary["tokens"]) == (5, 5 * 24)
            assert 0 < summary["ttft"]["p50"] < summary["e2e"]["p50"] <= summary["seconds"]
            assert 0 < summary["itl"]["count"] <= 5 * 23
    assert found["command"].startswith("mtp-jax bench sweep --model ")
    header, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    column = [name.strip() for name in header.split("|")].index("same tokens")
    assert [row.split("|")[column].strip() for row in rows] == ["yes"] * 3
    assert "SYNTHETIC" not in json.dumps(found)
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_control_is_like_the_baseline(bench, capsys):
    found, _ = bench("sweep", "--modes", "control,fixed", "--depth", "2", "--simulate-acceptance", "1")
    off, control, fixed = found["figures"]["levels"]
    assert (off["mode"], control["mode"], fixed["mode"]) == ("off", "control", "fixed")
    assert control["depth_steps"] == off["depth_steps"]
    assert control["acceptance_length"] == 1 < fixed["acceptance_length"]
    assert control["speedup"]["median"] != 1  # measured, of runs of its own
    assert 'a second engine like "off"' in capsys.readouterr().out


def test_a_sweep_keeps_and_shows_every_level_as_it_ends(bench, capsys, monkeypatch):
    written = []
    write = report.write
    monkeypatch.setattr(
        report, "write", lambda r, *given: (written.append((r.pending, r.rows)), write(r, *given))
    )
    found, _ = bench("sweep", "--concurrency", "1,2", "--modes", "off", "--rounds", "1")
    assert [(pending, len(rows)) for pending, rows in written] == [(1, 1), (0, 2)]
    out, err = capsys.readouterr()
    names, _, first, _ = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    level = ", ".join(f"{name.strip()} {cell.strip()}" for name, cell in zip(names, first, strict=True))
    assert level in err.splitlines()
    assert [level["concurrency"] for level in found["figures"]["levels"]] == [1, 2]
    assert "pending_levels" not in found


def test_figures_of_another_command_are_kept(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mtp_jax.lab.bench.plot.draw", lambda _, path, __: path.write_bytes(b"a figure"))
    monkeypatch.setattr("mtp_jax.lab.commands.bench._sweep", lambda args: iter([Report("x", ("a",), [(1,)])]))
    folder = tmp_path / "build" / "bench"
    command = ["bench", "sweep", "--model", model, *SIZES]
    for given in ([], [], ["--max-tokens", "8"]):
        assert cli.main([*command, *given]) == 0
    (folder / "sweep-model-3.json").write_text("not ours")
    assert cli.main([*command, "--max-tokens", "9"]) == 0
    names = {f"sweep-model{n}.{kind}" for n in ("", "-2", "-4") for kind in ("json", "png")}
    assert {path.name for path in folder.iterdir()} == names | {"sweep-model-3.json"}
    commands = [json.loads((folder / f"sweep-model{n}.json").read_text())["command"] for n in ("", "-2")]
    assert ["--max-tokens 8" in c for c in commands] == [False, True]


def test_a_package_that_is_missing_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "httpx2", None)
    for name in ("endpoint", "served"):
        monkeypatch.delitem(sys.modules, f"mtp_jax.lab.bench.{name}", raising=False)
        monkeypatch.delattr(f"mtp_jax.lab.bench.{name}", raising=False)
    assert cli.main(["bench", "serve", "http://127.0.0.1:9", "--json", str(tmp_path / "out.json")]) == 2
    assert "needs httpx2; install it with: pip install httpx2" in capsys.readouterr().err


def test_an_unfinished_file_says_so(tmp_path):
    report.write(Report("Load: x", ("a",), [(1,)], pending=2), tmp_path / "x.json", {})
    assert json.loads((tmp_path / "x.json").read_text())["pending_levels"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--simulate-acceptance", "--synthetic-acceptance"])
def test_forced_acceptance_is_as_asked_and_labelled_everywhere(bench, capsys, monkeypatch, flag):
    titles = []
    draw = sweep.Report.text
    monkeypatch.setattr(sweep.Report, "text", lambda r: titles.append(r.title) or draw(r))
    found, _ = bench("sweep", "--modes", "fixed", "--depth", "2", flag, "1,0.5")
    assert found["figures"]["synthetic_acceptance"].startswith("SYNTHETIC acceptance: length 2.5 (")
    assert found["title"].startswith("SYNTHETIC - Load: ")
    out = capsys.readouterr().out
    assert out.startswith("SYNTHETIC - ")
    assert "shares of 1, 0.5 of the steps), whatever the model said" in out
    assert titles[0] == found["title"]  # which is that of the figure, too
    off, fixed = found["figures"]["levels"]
    assert off["acceptance_length"] == 1
    first, second = fixed["acceptance_per_position"]
    assert first == 1
    assert 0.3 < second < 0.7
    assert fixed["same_tokens"] is None


def test_simulated_rates_become_shares(monkeypatch):
    """The last rate holds for all further drafts; depth 0 has no law."""
    asked = []
    monkeypatch.setattr("mtp_jax.lab.bench.sweep.run", lambda *given: asked.append(given[-1]) or iter(()))
    monkeypatch.setattr("mtp_jax.lab.bench.subject.load", lambda *_, **__: None)
    monkeypatch.setattr(
        "mtp_jax.lab.commands.bench._measure", lambda args: (list(args.measure(args)) and 0) or 0
    )
    for given in ("--simulate-acceptance", "0.8,0.5"), ("--synthetic-acceptance", "glm-5.2"):
        assert cli.main(["bench", "sweep", *given]) == 0
    assert asked == [pytest.approx((0.8, 0.4, 0.2)), "glm-5.2"]


@pytest.mark.rest
def test_a_forced_depth_is_labelled(model, capsys, tmp_path):
    out = tmp_path / "out.json"
    sizes = "--depths 1 --prompts 1 --prompt-tokens 6 --max-tokens 8 --temperature 0 --compile-cache none"
    command = ["bench", "depth", "--model", model, *sizes.split(), "--json", str(out)]
    assert cli.main([*command, "--synthetic-acceptance", "1"]) == 0
    found = json.loads(out.read_text())
    assert found["title"].startswith("SYNTHETIC - Decode speed")
    assert found["figures"]["synthetic_acceptance"].startswith("at depth 1 SYNTHETIC acceptance: length 1 (")
    plain, forced = found["figures"]["depths"]
    assert (plain["same_tokens"], forced["same_tokens"], forced["acceptance_length"]) == (None, None, 1)
    assert "SYNTHETIC acceptance" in capsys.readouterr().out


def test_a_label_keeps_what_it_labels():
    labelled = report.forced(Report("Load: x", ("a",), [(1,)], ["before"], {"levels": []}), "by law")
    assert labelled.title == "SYNTHETIC - Load: x"
    assert labelled.notes[0].startswith("by law, whatever the model said")
    assert labelled.notes[-1] == "before"
    assert labelled.figures == {"synthetic_acceptance": "by law", "levels": []}


def test_refusals(model, capsys):
    for given, message in (
        (["--modes", "sometimes"], "--modes sometimes; expected some of off,control,fixed,adaptive"),
        (["--concurrency", "0"], "are 1 or more"),
        (["--concurrency", "1,8", "--requests", "7"], "--requests 7 is fewer than the 8 at a time"),
        (["--simulate-acceptance", "2"], "is not a list of numbers from 0 to 1"),
        (["--synthetic-acceptance", "4.5"], "expected a length from 1, the model's own token, to 4"),
        (["--synthetic-acceptance", "glm-9"], "expected a number, or one of glm-5.2"),
    ):
        assert cli.main(["bench", "sweep", "--model", model, "--compile-cache", "none", *given]) == 2
        assert message in capsys.readouterr().err
