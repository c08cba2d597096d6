"""The settings of quotas: how much one principal, and one topic, may use of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.security.limits import LIMIT_MAX, QuotaLimits, QuotaTable
from quiver.security.quotas import Quotas


class QuotaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one principal, and one topic, may use of this node; 0 is no limit. `quiver quota` sets more."""

    requests_per_second: Annotated[
        int,
        Meta(
            ge=0,
            le=LIMIT_MAX,
            description="Requests of one principal; clients without credentials are one principal. Beyond it HTTP "
            "answers 429 with Retry-After, and the wire `overloaded`, which the SDK retries when it is told to. "
            "Nodes, health checks and metrics have no quotas.",
        ),
    ] = 0
    mutations_per_second: Annotated[
        int, Meta(ge=0, le=LIMIT_MAX, description="Requests of one principal that change something.")
    ] = 0
    bytes_in_per_second: Annotated[
        int, Meta(ge=0, le=LIMIT_MAX, description="Bytes of the requests of one principal.")
    ] = 0
    bytes_out_per_second: Annotated[
        int,
        Meta(
            ge=0,
            le=LIMIT_MAX,
            description="Bytes of the answers to one principal; its next request waits for what was too much.",
        ),
    ] = 0
    creations_per_minute: Annotated[
        int,
        Meta(
            ge=0,
            le=LIMIT_MAX,
            description="Topics and registrations of producers and consumers that one principal may create.",
        ),
    ] = 0
    long_polls_max: Annotated[
        int,
        Meta(ge=0, le=LIMIT_MAX, description="Requests of one principal that wait for messages at the same time."),
    ] = 0
    connections_max: Annotated[
        int,
        Meta(
            ge=0,
            le=LIMIT_MAX,
            description="Connections of the wire protocol that one principal has to this node; HTTP names the "
            "principal with each request, and has `gateway.connections_max`.",
        ),
    ] = 0
    topic_requests_per_second: Annotated[
        int, Meta(ge=0, le=LIMIT_MAX, description="Requests of all principals to one topic.")
    ] = 0
    topic_bytes_in_per_second: Annotated[
        int, Meta(ge=0, le=LIMIT_MAX, description="Bytes of requests to one topic.")
    ] = 0
    topic_bytes_out_per_second: Annotated[
        int, Meta(ge=0, le=LIMIT_MAX, description="Bytes of the answers about one topic.")
    ] = 0

    def make(self, table: Callable[[], QuotaTable]) -> Quotas:
        """Return the quotas of a node with these settings; `table` returns the cluster's, which come first."""
        limits = QuotaLimits(
            requests_per_second=self.requests_per_second,
            mutations_per_second=self.mutations_per_second,
            bytes_in_per_second=self.bytes_in_per_second,
            bytes_out_per_second=self.bytes_out_per_second,
            creations_per_minute=self.creations_per_minute,
            long_polls_max=self.long_polls_max,
            connections_max=self.connections_max,
        )
        topic_limits = QuotaLimits(
            requests_per_second=self.topic_requests_per_second,
            bytes_in_per_second=self.topic_bytes_in_per_second,
            bytes_out_per_second=self.topic_bytes_out_per_second,
        )
        return Quotas(limits, topic_limits, table=table)
