"""The dashboard asks only for what `/metrics` has."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import serve
from tests.serve.helpers import NAME, still_metrics

ALERTS = Path(serve.__file__).parent / "deploy" / "alerts.yml"
DASHBOARD = Path(serve.__file__).parent / "grafana" / "mtp-jax.json"


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


def test_every_alarm_asks_for_metrics_that_there_are(labels):
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = group["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    for rule in rules:
        assert NAME.search(rule["expr"])
        assert unknown(rule["expr"], labels) == []
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"[0-9]+m", rule.get("for", "0m"))


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
