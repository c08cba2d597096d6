"""What kind of request each is: a read, for nodes only, a carrier of batches. Pure."""

from __future__ import annotations

from typing import Any

from quiver.wire.description import DescribeNode
from quiver.wire.exchange import Request
from quiver.wire.holds import ListHolds
from quiver.wire.messages import (
    BrokerHeartbeatRequest,
    Consume,
    Fetch,
    FindOffset,
    GetCursors,
    GetMembers,
    GetMetadata,
    ListClients,
    ListMoves,
    Produce,
    ReadReplica,
    SubmitCommand,
)

READS: frozenset[type[Request[Any]]] = frozenset(
    (
        GetMetadata,
        DescribeNode,
        ListClients,
        ListMoves,
        ListHolds,
        Fetch,
        ReadReplica,
        FindOffset,
        GetCursors,
        GetMembers,
    )
)
"""Requests that change nothing: one that failed in whatever way may be sent again."""

FOR_NODES: frozenset[type[Request[Any]]] = frozenset((SubmitCommand, BrokerHeartbeatRequest, GetMembers))
"""Requests that a plain client may not send."""

BATCH_CARRIERS: frozenset[type[Request[Any]]] = frozenset((Produce, Fetch, ReadReplica, Consume))
"""Requests whose payload, or whose response's payload, is batches: each has checksums of its own."""
