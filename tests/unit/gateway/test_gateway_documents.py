"""The OpenAPI document, the pages and the figures: complete, true to the table, and safe to show."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quiver.features import LEVEL_MAX
from quiver.gateway.console.contract import FILE_TYPES
from quiver.gateway.http import HttpStatus
from quiver.gateway.metrics import REQUEST_BOUNDS_S, Metrics
from quiver.gateway.openapi import (
    CONTENT_SECURITY_POLICY,
    LINKS,
    make_document,
    render_docs,
    render_markdown,
    render_page,
)
from quiver.gateway.routes import ROUTES
from quiver.metadata.apply import apply
from quiver.metadata.commands import (
    CreateRoleCommand,
    CreateTopicCommand,
    CreateUserCommand,
    InitCluster,
    RegisterBroker,
    SetQuotaCommand,
)
from quiver.metadata.state import MetadataState
from quiver.model import Index, NodeId
from quiver.node_metrics import describe_node
from quiver.security.limits import QuotaLimits
from quiver.wire.admin_messages import NodeDescribed

PAGE = Path(__file__).parents[3] / "docs" / "protocol" / "http.md"


def test_reference_page_is_what_the_table_makes_it() -> None:
    assert PAGE.read_text() == render_markdown(), "run `make docs`"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_document_tells_every_route(route: Any) -> None:
    operation = make_document()["paths"][route.path][route.method.lower()]
    assert operation["operationId"] == route.name
    assert str(route.success) in operation["responses"]
    assert {"400", "503"} <= set(operation["responses"])


def test_document_tells_the_types_of_files() -> None:
    answer = make_document()["paths"]["/topics/{topic}/records"]["get"]["responses"]["200"]
    assert answer["content"].keys() == {"application/json", *(kind.partition(";")[0] for kind in FILE_TYPES.values())}


def test_every_reference_in_the_document_leads_somewhere() -> None:
    document = make_document()
    references = set(re.findall(r"'\$ref': '#/components/schemas/(\w+)'", repr(document)))
    assert references
    assert references <= set(document["components"]["schemas"])


def test_document_tells_bounds_and_what_must_be_given() -> None:
    document = make_document()
    consume = document["paths"]["/consumer/consume_batch"]["get"]["parameters"]
    by_name = {parameter["name"]: parameter for parameter in consume}
    assert by_name["topic"]["required"]
    assert not by_name["max"]["required"]
    assert "10000" in repr(by_name["max"]["schema"])
    produce = document["components"]["schemas"]["ProduceBody"]
    assert produce["required"] == ["topic", "producer_id"]


def test_limits_in_the_document_are_those_of_the_server() -> None:
    """The decoder holds requests to the document; the metadata must not be stricter, nor more lenient."""
    fields = make_document()["components"]["schemas"]["CreateTopicBody"]["properties"]

    def refusal(name: str, partitions: int, replicas: int) -> str:
        state = MetadataState()
        apply(state, InitCluster(now_ms=1, cluster_id="c", feature_level=2))
        for broker in range(1, replicas + 1):
            apply(state, RegisterBroker(now_ms=1, broker_id=NodeId(broker), identity="i", wire_address="host:1"))
        row = tuple(map(NodeId, range(1, replicas + 1)))
        command = CreateTopicCommand(now_ms=1, topic=name, replicas=replicas, assignments=(row,) * partitions)
        found = apply(state, command).refusal
        return "" if found is None else found.code

    name_max = fields["topic_name"]["anyOf"][0]["maxLength"]
    partitions_max, replicas_max = (fields[one]["anyOf"][0]["maximum"] for one in ("partitions", "replicas"))
    assert refusal("t" * name_max, partitions_max, 1) == refusal("t", 1, replicas_max) == ""
    assert refusal("t" * (name_max + 1), 1, 1)
    assert refusal("t", partitions_max + 1, 1)
    assert refusal("t", 1, replicas_max + 1)


@pytest.mark.parametrize(
    ("subject", "is_one"),
    [
        ("default", True),
        ("anonymous", True),
        ("user:alice@example.org", True),
        ("role:ops", True),
        ("topic:logs.web", True),
        ("topic:*", True),
        ("topic:..", False),
        ("topic:", False),
        ("0", False),
        ("\x1f", False),
    ],
)
def test_subjects_of_quotas_in_the_document_are_those_of_the_server(subject: str, *, is_one: bool) -> None:
    state = MetadataState()
    for command in (
        InitCluster(now_ms=1, cluster_id="c", feature_level=LEVEL_MAX),
        CreateUserCommand(now_ms=1, user="alice@example.org"),
        CreateRoleCommand(now_ms=1, role="ops"),
    ):
        assert apply(state, command).refusal is None
    schemas = make_document()["components"]["schemas"]
    pattern = schemas["QuotaBody"]["properties"]["subject"]["pattern"]
    refusal = apply(
        state, SetQuotaCommand(now_ms=1, subject=subject, limits=QuotaLimits(requests_per_second=1))
    ).refusal
    assert (re.search(pattern, subject) is not None) is (refusal is None) is is_one


def test_a_call_with_parameters_may_find_them_out_of_range() -> None:
    for route in ROUTES:
        if msgspec.structs.fields(route.parameters) and route.name != "console_file":  # a path: found, or not
            assert 422 in route.failures, route.name


def test_answers_and_failures_tell_their_status_in_the_document() -> None:
    schemas = make_document()["components"]["schemas"]
    assert schemas["ProducedAnswer"]["properties"]["status"] == {"enum": ["success"]}
    assert schemas["FailureAnswer"]["properties"]["status"] == {"enum": ["failure"]}


def test_pages_run_no_script_and_take_nothing_from_elsewhere() -> None:
    page = render_docs()
    assert "<script" not in page
    assert "http://" not in page.replace("http://127.0.0.1", "")
    assert "https://" not in page
    (style,) = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in CONTENT_SECURITY_POLICY


def test_page_shows_every_call() -> None:
    page = render_docs()
    for route in ROUTES:
        assert f"<b>{route.method}</b> <code>{route.path}</code>" in page


def test_title_is_escaped() -> None:
    assert "<title>&lt;x&gt;</title>" in render_page("<x>", "")


HTTP = HttpStatus(address="a:1", connections=3, idle=2, requests=1, body_bytes=10, accepted=5, refused=1, timed_out=0)


NODE = NodeDescribed(
    node=NodeId(1),
    version='0"1',
    pid=1,
    roles=("broker",),
    started_ms=1000,
    is_ready=True,
    primary=NodeId(1),
    applied_index=Index(7),
    holds=2,
)


def figures(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render(HTTP, ()).splitlines()
    values = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in values}


def test_requests_are_counted_by_route_and_status_and_classed_by_time() -> None:
    metrics = Metrics()
    for seconds in (0.0005, 0.001, 0.3, 99.0):
        metrics.count_request("/topics", method="GET", status=200, seconds=seconds)
    metrics.count_request("", method="GET", status=404, seconds=0.0)
    found = figures(metrics)
    assert found['quiver_http_requests_total{route="/topics",method="GET",status="200"}'] == 4
    assert found['quiver_http_requests_total{route="",method="GET",status="404"}'] == 1
    assert found['quiver_http_request_seconds_bucket{route="/topics",le="0.001"}'] == 2
    assert found['quiver_http_request_seconds_bucket{route="/topics",le="0.5"}'] == 3
    assert found['quiver_http_request_seconds_bucket{route="/topics",le="+Inf"}'] == 4
    assert found['quiver_http_request_seconds_count{route="/topics"}'] == 4
    assert found['quiver_http_request_seconds_sum{route="/topics"}'] == pytest.approx(99.3015)
    assert tuple(sorted(REQUEST_BOUNDS_S)) == REQUEST_BOUNDS_S


def test_records_are_counted() -> None:
    metrics = Metrics()
    metrics.count_produced(records=2, size_bytes=20)
    metrics.count_consumed(records=3, size_bytes=30)
    found = figures(metrics)
    assert found["quiver_http_produced_records_total"] == 2
    assert found["quiver_http_produced_bytes_total"] == 20
    assert found["quiver_http_consumed_records_total"] == 3
    assert found["quiver_http_consumed_bytes_total"] == 30


def test_every_figure_is_explained_before_its_first_value() -> None:
    explained: set[str] = set()
    for line in Metrics().render(HTTP, describe_node(NODE, now_ms=0, feature_level=1)).splitlines():
        if line.startswith("# TYPE"):
            explained.add(line.split()[2])
        elif not line.startswith("#"):
            assert re.split(r"[{ ]", line)[0] in explained


def test_links_lead_to_routes_with_such_parameters() -> None:
    by_name = {route.name: route for route in ROUTES}
    assert LINKS
    for source, links in LINKS.items():
        assert source in by_name
        for target, link in links.items():
            given = {**link.get("parameters", {}), **link.get("requestBody", {})}
            assert set(given) <= set(by_name[target].parameters.__struct_fields__)
