"""What clients have stated about a topic, by client and partition; see `quiver.client.digest_reporter`."""

from __future__ import annotations

from collections.abc import Iterable

from quiver.client.digest_reporter import TOPIC, Statement, decode_statement
from quiver.client.sync import Cluster
from quiver.errors import NotFoundError
from quiver.record.digest import Digest
from quiver.spark.pipelines.audit_sources import AuditSource

Runs = list[tuple[int, int, Digest]]
"""First offsets, end offsets and digests, in the order in which they were stated."""
Stated = dict[AuditSource, dict[int, Runs]]


def read_statements(cluster: Cluster, topic_id: int) -> Stated:
    """Return everything that is stated about one incarnation of a topic.

    Raises:
        DecodeError: there is something among the statements that is none.
    """
    try:
        begins, ends = cluster.offsets(TOPIC, "earliest"), cluster.offsets(TOPIC, "latest")
    except NotFoundError:
        return {}
    statements: list[Statement] = []
    for partition, end_offset in ends.offsets.items():
        first_offset = begins.offsets.get(partition, 0)
        for batch in cluster.read_range(TOPIC, partition, first_offset, end_offset, topic_id=ends.topic_id):
            statements += map(decode_statement, batch.values())
    return sort_statements(statements, topic_id)


def sort_statements(statements: Iterable[Statement], topic_id: int) -> Stated:
    """Return the runs of the statements about one incarnation of a topic."""
    stated: Stated = {}
    for statement in statements:
        if statement.topic_id == topic_id:
            own = stated.setdefault(AuditSource(statement.role, statement.name), {})
            own.setdefault(statement.partition, []).extend(
                (run.first_offset, run.end_offset, run.digest) for run in statement.runs
            )
    return stated


def choose_clients(stated: Stated, consumers: tuple[str, ...], topic: str) -> Stated:
    """Return the statements of all producers, and of the consumers that are named; of all, if none is.

    Raises:
        NotFoundError: a consumer that is named has stated nothing.
    """
    known = {witness.name for witness in stated if witness.role == "consumer"}
    for name in consumers:
        if name not in known:
            message = (
                f"consumer {name!r} has stated nothing about {topic!r}: open it with digests=True. "
                f"Those that have: {', '.join(sorted(known)) or 'none'}"
            )
            raise NotFoundError(message, code="no_statements")
    return {
        witness: own
        for witness, own in sorted(stated.items())
        if witness.role == "producer" or not consumers or witness.name in consumers
    }
