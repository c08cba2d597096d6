"""The table of routes: every call of the HTTP API, as data.

`application` binds handlers to it by name; the OpenAPI document and the reference pages are generated from it. A route
that changes state is marked: pages of other sites may not call it, and it does not support HEAD.
"""

from __future__ import annotations

import msgspec

from quiver.gateway import contract

HTML = "text/html; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
ALWAYS = (400, 403, 408, 413, 421, 429, 431, 503)
"""Failure statuses that every call may return."""


class HttpRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One call: its method and path, parameters, answer and possible failures."""

    name: str
    method: str
    path: str
    """Parameters in braces."""
    section: str
    summary: str
    parameters: type[contract.Parameters] = contract.Parameters
    answer: type[contract.Answer] | None = contract.Answer
    """None: not a JSON answer, but `content_type`."""
    content_type: str = "application/json"
    success: int = 200
    has_nothing: bool = False
    """Whether 204 is returned when there is no message."""
    failures: tuple[int, ...] = ()
    """Failure statuses beside `ALWAYS`."""
    changes: bool = False
    """Whether it changes state."""
    creates: bool = False
    """Whether it leaves something behind that lasts: a topic, a producer, a consumer."""
    is_probe: bool = False
    """Whether it is for load balancers: on every listener, under every name, and never refused for lack of room."""
    is_administrative: bool = False
    """Whether it moves to `gateway.admin_listen` if that is set."""


_DATA = (404, 409, 422, 504, 507)
_WRITE = (404, 409, 422, 504)

ROUTES: tuple[HttpRoute, ...] = (
    HttpRoute(
        name="list_topics",
        method="GET",
        path="/topics",
        section="Topics",
        summary="List the names of all topics.",
        answer=contract.TopicsAnswer,
    ),
    HttpRoute(
        name="create_topic",
        method="POST",
        path="/topics",
        section="Topics",
        summary="Create a topic.",
        parameters=contract.CreateTopicBody,
        answer=contract.TopicCreatedAnswer,
        success=201,
        failures=(409, 422, 504),
        changes=True,
        creates=True,
    ),
    HttpRoute(
        name="describe_topic",
        method="GET",
        path="/topics/{topic}",
        section="Topics",
        summary="Describe a topic's configuration and partitions.",
        parameters=contract.TopicQuery,
        answer=contract.TopicAnswer,
        failures=(404, 422),
    ),
    HttpRoute(
        name="delete_topic",
        method="DELETE",
        path="/topics/{topic}",
        section="Topics",
        summary="Delete a topic.",
        parameters=contract.TopicQuery,
        failures=_WRITE,
        changes=True,
    ),
    HttpRoute(
        name="list_partitions",
        method="GET",
        path="/partitions",
        section="Topics",
        summary="List a topic's partitions with leader and replicas.",
        parameters=contract.TopicQuery,
        answer=contract.PartitionsAnswer,
        failures=(404, 422),
    ),
    HttpRoute(
        name="register_producer",
        method="POST",
        path="/producer/register",
        section="Producers",
        summary="Register a producer for a topic, which is created if it does not exist.",
        parameters=contract.RegisterProducerBody,
        answer=contract.ProducerRegisteredAnswer,
        failures=_WRITE,
        changes=True,
        creates=True,
    ),
    HttpRoute(
        name="produce",
        method="POST",
        path="/producer/produce",
        section="Producers",
        summary="Append a message; answers when a majority of replicas has it on disk.",
        parameters=contract.ProduceBody,
        answer=contract.ProducedAnswer,
        failures=_DATA,
        changes=True,
    ),
    HttpRoute(
        name="produce_batch",
        method="POST",
        path="/producer/produce_batch",
        section="Producers",
        summary="Append messages to one partition, all or none.",
        parameters=contract.ProduceBatchBody,
        answer=contract.BatchProducedAnswer,
        failures=_DATA,
        changes=True,
    ),
    HttpRoute(
        name="register_consumer",
        method="POST",
        path="/consumer/register",
        section="Consumers",
        summary="Register a consumer for a topic.",
        parameters=contract.RegisterConsumerBody,
        answer=contract.ConsumerRegisteredAnswer,
        failures=_WRITE,
        changes=True,
        creates=True,
    ),
    HttpRoute(
        name="consume",
        method="GET",
        path="/consumer/consume",
        section="Consumers",
        summary="Consume the next message and move the cursor past it.",
        parameters=contract.ConsumeQuery,
        answer=contract.ConsumedAnswer,
        has_nothing=True,
        failures=_DATA,
        changes=True,
    ),
    HttpRoute(
        name="consume_batch",
        method="GET",
        path="/consumer/consume_batch",
        section="Consumers",
        summary="Consume the next messages and move the cursors past them.",
        parameters=contract.ConsumeBatchQuery,
        answer=contract.BatchConsumedAnswer,
        has_nothing=True,
        failures=_DATA,
        changes=True,
    ),
    HttpRoute(
        name="get_size",
        method="GET",
        path="/size",
        section="Consumers",
        summary="Count the messages that a consumer has not consumed yet.",
        parameters=contract.SizeQuery,
        answer=contract.SizeAnswer,
        failures=(404, 422, 504),
    ),
    HttpRoute(
        name="welcome",
        method="GET",
        path="/",
        section="Cluster",
        summary="Return the service banner, as HTML to browsers.",
        answer=contract.BannerAnswer,
    ),
    HttpRoute(
        name="status",
        method="GET",
        path="/status",
        section="Cluster",
        summary="Describe the node that answers.",
        answer=contract.NodeStatusAnswer,
    ),
    HttpRoute(
        name="health",
        method="GET",
        path="/health",
        section="Cluster",
        summary="List the last heartbeats of brokers, producers and consumers.",
        answer=contract.HealthAnswer,
    ),
    HttpRoute(
        name="list_brokers",
        method="GET",
        path="/brokers",
        section="Cluster",
        summary="List the brokers.",
        answer=contract.BrokersAnswer,
    ),
    HttpRoute(
        name="drain_broker",
        method="POST",
        path="/brokers/{id}/drain",
        section="Cluster",
        summary="Start moving all partitions off a broker.",
        parameters=contract.BrokerQuery,
        failures=_WRITE,
        changes=True,
    ),
    HttpRoute(
        name="remove_broker",
        method="DELETE",
        path="/brokers/{id}",
        section="Cluster",
        summary="Remove a broker that is drained or dead.",
        parameters=contract.BrokerQuery,
        failures=_WRITE,
        changes=True,
    ),
    HttpRoute(
        name="upgrade_cluster",
        method="POST",
        path="/cluster/upgrade",
        section="Cluster",
        summary="Raise the feature level once all nodes know it.",
        parameters=contract.UpgradeBody,
        answer=contract.UpgradeAnswer,
        failures=(409, 422, 504),
        changes=True,
    ),
    HttpRoute(
        name="list_managers",
        method="GET",
        path="/managers",
        section="Cluster",
        summary="List the managers: primary, replicas, applied index of each.",
        answer=contract.ManagersAnswer,
    ),
    HttpRoute(
        name="add_manager",
        method="POST",
        path="/managers/{id}",
        section="Cluster",
        summary="Make a node that has the role manager a manager.",
        parameters=contract.ManagerQuery,
        failures=_WRITE,
        changes=True,
    ),
    HttpRoute(
        name="remove_manager",
        method="DELETE",
        path="/managers/{id}",
        section="Cluster",
        summary="Remove a node from the managers; it keeps its other roles.",
        parameters=contract.ManagerQuery,
        failures=_WRITE,
        changes=True,
    ),
    HttpRoute(
        name="get_metadata",
        method="GET",
        path="/metadata",
        section="Cluster",
        summary="List all nodes with their addresses.",
        answer=contract.MetadataAnswer,
    ),
    HttpRoute(
        name="explain",
        method="GET",
        path="/explain",
        section="Cluster",
        summary="Explain a partition: who leads, how far each replica is, what is in the way of records.",
        parameters=contract.ExplainQuery,
        answer=contract.ExplanationAnswer,
        failures=(404, 422),
    ),
    HttpRoute(
        name="metrics",
        method="GET",
        path="/metrics",
        section="Cluster",
        summary="Return this node's metrics, or another's, in Prometheus' text format.",
        parameters=contract.MetricsQuery,
        failures=(404, 422),
        answer=None,
        content_type=PROMETHEUS,
        is_administrative=True,
    ),
    HttpRoute(
        name="openapi",
        method="GET",
        path="/openapi.json",
        section="Cluster",
        summary="Return this API as an OpenAPI 3.1 document.",
        answer=None,
        is_administrative=True,
    ),
    HttpRoute(
        name="docs",
        method="GET",
        path="/docs",
        section="Cluster",
        summary="Return the reference of this API as an HTML page.",
        answer=None,
        content_type=HTML,
        is_administrative=True,
    ),
    HttpRoute(
        name="healthz",
        method="GET",
        path="/healthz",
        section="Cluster",
        summary="Return success if the process responds.",
        is_probe=True,
    ),
    HttpRoute(
        name="livez",
        method="GET",
        path="/livez",
        section="Cluster",
        summary="Return success if the process responds; a liveness probe restarts a node that does not.",
        is_probe=True,
    ),
    HttpRoute(
        name="readyz",
        method="GET",
        path="/readyz",
        section="Cluster",
        summary="Return success if the node can serve, else 503 with the reason: it starts, or it has no primary.",
        is_probe=True,
    ),
)

PROBE_PATHS = frozenset(route.path for route in ROUTES if route.is_probe)
EXEMPT_PATHS = PROBE_PATHS | {"/metrics"}
"""Health checks and metrics: answered however many requests there are, so that overload looks like overload."""
