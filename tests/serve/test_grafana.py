"""The dashboard asks only for what `/metrics` has."""

import json
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import serve
from mtp_jax.engine.balance import ExpertStats
from mtp_jax.engine.stats import EngineStats, Histogram
from mtp_jax.store.tier import TierStats
from serve.watch.acceptance import AcceptanceAlarm
from serve.watch.metrics import Metrics

DASHBOARD = Path(serve.__file__).parent / "grafana" / "mtp-jax.json"
NAME = re.compile(r"\b(?:vllm|mtp_jax):[a-zA-Z0-9_:]+")
STATS = EngineStats(
    running=1,
    waiting=1,
    pages_total=8,
    pages_used=2,
    pages_cached=1,
    prompt_tokens=9,
    generation_tokens=9,
    prefix_queries=9,
    prefix_hits=4,
    hits_by_tier={"device": 3, "host": 1},
    tier=TierStats(2, 64, 3, 1, {"damaged": 1}),
    preemptions=1,
    drafts=3,
    draft_tokens=6,
    accepted_tokens=4,
    drafted_by_source={"nextn": 4, "suffix": 2},
    accepted_by_source={"nextn": 3, "suffix": 1},
    first_drafts={"nextn": 2, "suffix": 1},
    accepted_first_drafts={"nextn": 1, "suffix": 1},
    inter_token=Histogram.empty((0.1, 1.0)),
    accepted_per_position=(3, 1),
    depth_steps={0: 1, 2: 3},
    step_seconds={0: 0.1, 2: 0.4},
    prefill_seconds=0.1,
    finished={"stop": 1},
    executables=4,
    realised_speedup=1.4,
    experts=ExpertStats(1, 2, 1.5, 2.0, 3),
)


def still_metrics(alarm: AcceptanceAlarm | None = None, counters: Any = ()) -> Metrics:
    """Those of an engine that does nothing more."""
    allm: Any = SimpleNamespace(
        llm=SimpleNamespace(engine=SimpleNamespace(stats=lambda: STATS), simulated=False),
        admission=SimpleNamespace(requests=1, tokens=3),
        step_age=0.1,
        hooks=SimpleNamespace(counters=counters),
        warming=False,
    )
    return Metrics(allm, "tiny", alarm or AcceptanceAlarm(0, 1))


@pytest.fixture(scope="module")
def labels():
    """Label names by name of a sample, of a server that has answered something."""
    metrics = still_metrics()
    metrics.responded("/v1/completions", 200)
    found = defaultdict(set)
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text())


def unknown(query, labels):
    """Names and labels in a query that /metrics does not have."""
    names = NAME.findall(query)
    known = set().union(*(labels.get(n, set()) for n in names))
    used = re.findall(r"[{,]\s*(\w+)\s*(?:=~|=|!=|!~)", query)
    for group in re.findall(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)", query):
        used += [label.strip() for label in group.split(",") if label.strip()]
    return [n for n in names if n not in labels] + [label for label in used if label not in known]


def test_every_query_is_answered_by_the_metrics(dashboard, labels):
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    assert len(queries) >= 20
    assert all(NAME.search(q) for q in queries)
    assert {q: found for q in queries if (found := unknown(q, labels))} == {}
    for query in queries:
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}") == query.count('model_name=~"$model"')


def test_variables_and_legends_exist(dashboard, labels):
    model = next(v for v in dashboard["templating"]["list"] if v["name"] == "model")
    [(name, label)] = re.findall(r"label_values\(([\w:]+), (\w+)\)", model["query"])
    assert label in labels[name]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \({label}\)", target["expr"])


def test_panels_do_not_overlap(dashboard):
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_what_is_wrong_is_found(labels):
    assert unknown('rate(vllm:generation_tokens{model_name="x"}[1m])', labels) == [
        "vllm:generation_tokens",
        "model_name",
    ]
    assert unknown("sum by (slot) (vllm:num_requests_running)", labels) == ["slot"]
    assert unknown("sum by (position) (mtp_jax:steps_total)", labels) == ["position"]
