"""The settings of quotas: how much one principal, and one topic, may use of a node."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.security.principal import Principal
from quiver.security.quotas import Limits, Quotas

RATE_MAX = 2**50


class QuotaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one principal, and one topic, may use of this node; 0 is no limit."""

    requests_per_second: Annotated[
        int,
        Meta(
            ge=0,
            le=RATE_MAX,
            description="Requests of one principal; clients without credentials are one principal. Beyond it HTTP "
            "answers 429 with Retry-After, and the wire `overloaded`, which the SDK retries when it is told to. "
            "Nodes, health checks and metrics have no quotas.",
        ),
    ] = 0
    mutations_per_second: Annotated[
        int, Meta(ge=0, le=RATE_MAX, description="Requests of one principal that change something.")
    ] = 0
    bytes_in_per_second: Annotated[
        int, Meta(ge=0, le=RATE_MAX, description="Bytes of the requests of one principal.")
    ] = 0
    bytes_out_per_second: Annotated[
        int,
        Meta(
            ge=0,
            le=RATE_MAX,
            description="Bytes of the answers to one principal; its next request waits for what was too much.",
        ),
    ] = 0
    creations_per_minute: Annotated[
        int,
        Meta(
            ge=0,
            le=RATE_MAX,
            description="Topics and registrations of producers and consumers that one principal may create.",
        ),
    ] = 0
    long_polls_max: Annotated[
        int,
        Meta(ge=0, le=RATE_MAX, description="HTTP requests of one principal that wait for messages at the same time."),
    ] = 0
    topic_requests_per_second: Annotated[
        int, Meta(ge=0, le=RATE_MAX, description="Requests of all principals to one topic.")
    ] = 0
    topic_bytes_in_per_second: Annotated[
        int, Meta(ge=0, le=RATE_MAX, description="Bytes of requests to one topic.")
    ] = 0
    topic_bytes_out_per_second: Annotated[
        int, Meta(ge=0, le=RATE_MAX, description="Bytes of the answers about one topic.")
    ] = 0

    def make(self) -> Quotas | None:
        """Return the quotas of a node with these settings; None if nothing is limited."""
        limits = Limits(
            requests_per_second=self.requests_per_second,
            mutations_per_second=self.mutations_per_second,
            bytes_in_per_second=self.bytes_in_per_second,
            bytes_out_per_second=self.bytes_out_per_second,
            creations_per_minute=self.creations_per_minute,
            long_polls_max=self.long_polls_max,
        )
        topic_limits = Limits(
            requests_per_second=self.topic_requests_per_second,
            bytes_in_per_second=self.topic_bytes_in_per_second,
            bytes_out_per_second=self.topic_bytes_out_per_second,
        )
        if limits.is_unlimited and topic_limits.is_unlimited:
            return None

        def limits_of(_: Principal) -> Limits:
            return limits

        return Quotas(limits_of, topic_limits)
