"""The monitoring page, the alert rules and the dashboard name exactly the metrics that a live node exposes.

`promtool` checks rules, expressions and names where it is found: in build/tools (`make deploy-tools`), on the PATH, or
as $PROMTOOL.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml  # type: ignore[import-untyped]
from token_provider import AUDIENCE, ISSUER, key_set, new_key

from quiver.node_metrics import describe_certificate
from quiver.testing import LocalCluster

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "quiver.json"
PAGE = ROOT / "docs" / "operations" / "monitoring.md"
TOOLS = ROOT / "build" / "tools"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool", path=f"{TOOLS}:{os.environ['PATH']}")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: make deploy-tools (needs Go)")

NAME = re.compile(r"\b(?:quiver|process)_[a-z0-9_]+")
SUFFIX = re.compile(r"_(?:bucket|sum|count)$")
CONDITIONAL = {
    *(family.name for family in describe_certificate(1.0)),
    "quiver_oidc_keys",
    "quiver_oidc_keys_age_seconds",
    "quiver_oidc_read_failures_total",
}
"""Metrics that only nodes with TLS, or with an identity provider, expose."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("oidc") / "keys.json"
    keys.write_bytes(key_set({"1": new_key("ES256")}))
    settings = {"oidc.issuer": ISSUER, "oidc.audience": AUDIENCE, "oidc.jwks_file": str(keys)}
    with LocalCluster(nodes=1, settings=settings) as cluster, cluster.connect() as client:
        client.create_topic("logs", partitions=1)
        with client.producer("logs") as producer:
            producer.send("one").result()
        with urllib.request.urlopen(f"{cluster.urls[0]}/metrics", timeout=60) as answer:
            yield answer.read().decode()


@pytest.fixture(scope="module")
def exposed(page: str) -> dict[str, str]:
    """Return the kind of each metric."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, flags=re.MULTILINE))


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def find_unknown(expression: str, exposed: dict[str, str]) -> list[str]:
    """Return the metrics of an expression that do not exist, or are used as what they are not."""
    unknown = []
    for name in NAME.findall(expression):
        family = SUFFIX.sub("", name)
        is_histogram = exposed.get(family) == "histogram"
        is_known = name in CONDITIONAL or (is_histogram if family != name else name in exposed and not is_histogram)
        unknown += [] if is_known else [name]
    return unknown


def run_promtool(*arguments: str, text: str = "") -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_each_metric_is_declared_once(page: str) -> None:
    declared = re.findall(r"^# TYPE (\S+)", page, flags=re.MULTILINE)
    assert len(declared) == len(set(declared))


def test_page_lists_exactly_the_metrics_that_a_node_exposes(exposed: dict[str, str]) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(("| `quiver_", "| `process_"))]
    documented = [row.split("`")[1] for row in rows]
    assert sorted(documented) == sorted(set(documented))
    assert set(documented) == set(exposed) | CONDITIONAL
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert all(cells[2:]), row


def test_labels_on_the_page_are_those_of_the_node(page: str) -> None:
    labels: dict[str, set[str]] = {}
    for name, shown in re.findall(
        r"^((?:quiver|process)_\w+?)(?:_bucket|_sum|_count)?\{(.*)\} ", page, flags=re.MULTILINE
    ):
        labels.setdefault(name, set()).update(set(re.findall(r'(\w+)="', shown)) - {"le"})
    for row in PAGE.read_text().splitlines():
        if row.startswith("| `quiver_"):
            name, shown = row.split("`")[1], row.split("|")[2]
            found = labels.get(name)
            assert found is None or found == {one.strip() for one in shown.split(",") if one.strip()}, row


def test_alerts_use_metrics_that_exist_and_say_what_to_do(exposed: dict[str, str]) -> None:
    assert len(rules()) >= 15
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["alert"].startswith("Quiver")
        assert NAME.search(rule["expr"]) or "up{" in rule["expr"], rule["alert"]
        assert find_unknown(rule["expr"], exposed) == [], rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_dashboard_uses_metrics_that_exist(exposed: dict[str, str]) -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["targets"], panel["title"]
    for expression in dashboard_expressions():
        assert NAME.search(expression), expression
        assert find_unknown(expression, exposed) == [], expression


def test_unknown_and_misused_metrics_are_found(exposed: dict[str, str]) -> None:
    assert find_unknown("rate(quiver_nothing_total[5m])", exposed) == ["quiver_nothing_total"]
    assert find_unknown("quiver_produce_stage_seconds > 1", exposed) == ["quiver_produce_stage_seconds"]
    assert find_unknown("quiver_holds_bucket", exposed) == ["quiver_holds_bucket"]
    assert find_unknown("sum(quiver_produce_stage_seconds_count)", exposed) == []


def panel_expressions() -> list[str]:
    """Return the dashboard's expressions with values for Grafana's variables."""
    return [one.replace("$instance", ".*").replace("$__rate_interval", "5m") for one in dashboard_expressions()]


@pytest.mark.parametrize("expression", [*(rule["expr"] for rule in rules()), *panel_expressions()])
def test_expression_is_valid(expression: str) -> None:
    promql_parser.parse(expression)


@needs_promtool
def test_promtool_accepts_rules_expressions_and_names(page: str, tmp_path: Path) -> None:
    """Where promtool is found, it checks more: names of metrics, and the rules' file itself."""
    assert run_promtool("check", "rules", str(RULES)) == ""
    expressions = panel_expressions()
    as_rules = [{"record": f"panel:{number}", "expr": one} for number, one in enumerate(expressions)]
    checked = tmp_path / "dashboard.yml"
    checked.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": as_rules}]}))
    assert run_promtool("check", "rules", str(checked)) == ""
    assert run_promtool("check", "metrics", text=page) == ""


@needs_promtool
@pytest.mark.parametrize(
    "counted",
    [
        "quiver_wire_handler_failures_total",
        "quiver_partition_stops_total",
        'quiver_metadata_refused_commands_total{reason="malformed"}',
        'quiver_metadata_refused_commands_total{reason="defect"}',
    ],
)
def test_each_counter_of_defects_raises_its_alert(counted: str, tmp_path: Path) -> None:
    name, _, labels = counted.partition("{")
    series = f'{name}{{instance="node1",{labels or "}"}'
    alert = {"severity": "warning", "instance": "node1", **({"reason": labels.split('"')[1]} if labels else {})}
    (rule,) = [rule for rule in rules() if rule["alert"] == "QuiverDefects"]
    texts = {**rule["annotations"], "summary": "node1 met a defect of Quiver"}
    expected = {
        "eval_time": "12m",
        "alertname": "QuiverDefects",
        "exp_alerts": [{"exp_labels": alert, "exp_annotations": texts}],
    }
    silent = {"eval_time": "8m", "alertname": "QuiverDefects", "exp_alerts": []}
    case = {
        "interval": "1m",
        "input_series": [{"series": series, "values": "0x10 1x20"}],
        "alert_rule_test": [silent, expected],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [case]}))
    assert run_promtool("test", "rules", str(file)) == ""
