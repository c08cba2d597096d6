"""The part of the table of routes about work queues; see `routes`."""

from __future__ import annotations

from quiver.gateway import queue_contract
from quiver.gateway.http_route import DATA_FAILURES, HttpRoute

QUEUE_ROUTES: tuple[HttpRoute, ...] = (
    HttpRoute(
        name="receive_jobs",
        method="POST",
        path="/queue/receive",
        section="Queues",
        summary="Lease the next jobs of a work queue; each comes back unless it is acknowledged within its lease.",
        parameters=queue_contract.ReceiveBody,
        answer=queue_contract.JobsAnswer,
        has_nothing=True,
        failures=DATA_FAILURES,
        changes=True,
        creates=True,
        is_signed=True,
    ),
    HttpRoute(
        name="ack_jobs",
        method="POST",
        path="/queue/ack",
        section="Queues",
        summary="Acknowledge jobs: they are done, and are never delivered again.",
        parameters=queue_contract.SettleBody,
        answer=queue_contract.SettledAnswer,
        failures=DATA_FAILURES,
        changes=True,
        is_signed=True,
    ),
    HttpRoute(
        name="nack_jobs",
        method="POST",
        path="/queue/nack",
        section="Queues",
        summary="Return jobs that failed: they are delivered again later, or are dead letters after the last attempt.",
        parameters=queue_contract.NackBody,
        answer=queue_contract.SettledAnswer,
        failures=DATA_FAILURES,
        changes=True,
        is_signed=True,
    ),
    HttpRoute(
        name="extend_jobs",
        method="POST",
        path="/queue/extend",
        section="Queues",
        summary="Let the leases of jobs end later.",
        parameters=queue_contract.ExtendBody,
        answer=queue_contract.SettledAnswer,
        failures=DATA_FAILURES,
        changes=True,
        is_signed=True,
    ),
    HttpRoute(
        name="reject_jobs",
        method="POST",
        path="/queue/reject",
        section="Queues",
        summary="Make jobs dead letters.",
        parameters=queue_contract.RejectBody,
        answer=queue_contract.SettledAnswer,
        failures=DATA_FAILURES,
        changes=True,
        is_signed=True,
    ),
)
