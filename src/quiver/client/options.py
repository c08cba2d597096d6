"""What can be set about the SDK, with bounds and reasons: the keyword arguments of its public calls.

Times are given by users in seconds, as everywhere in Python, and kept in milliseconds, as everywhere in Quiver.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.errors import OutOfRangeError
from quiver.record import Compression
from quiver.routing.router import RouterOptions

KIB = 1024
MIB = 1024 * KIB
TIME_MS_MAX = 7 * 24 * 3_600_000
"""Longest time that can be set: enough for any patience, small enough for any timer."""

_Time = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
_PositiveTime = Annotated[int, Meta(ge=1, le=TIME_MS_MAX)]


class ClusterOptions(RouterOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a client talks to its cluster."""

    timeout_ms: _PositiveTime = 30_000
    """Total time of a call, all its tries together."""
    attempt_timeout_ms: _PositiveTime = 5_000
    """Time for one try: after it, a node that is connected but silent is given up and another one asked."""
    metadata_age_ms_max: _PositiveTime = 30_000
    """Age at which metadata is asked for again although nothing said that it is wrong."""
    client_name: str = "quiver-python"
    """What nodes see the client as."""


class ProducerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a producer packs and sends."""

    linger_ms: _Time = 0
    """How long a batch waits for more records while nothing of its partition is under way."""
    batch_bytes: Annotated[int, Meta(ge=1, le=32 * MIB)] = MIB
    """Size at which a batch is closed; larger ones are not faster."""
    buffer_bytes: Annotated[int, Meta(ge=KIB, le=64 * 1024 * MIB)] = 64 * MIB
    """Bytes accepted but not answered for at which `send` waits."""
    compression: Compression = Compression.NONE
    delivery_timeout_ms: _PositiveTime = 60_000
    """Time from a record's acceptance until its delivery fails."""
    inflight_batches_max: Annotated[int, Meta(ge=1, le=5)] = 5
    """Unanswered batches per partition; brokers remember eight, so that any of five can be sent again."""


class ConsumerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a consumer reads ahead and keeps its place."""

    start: Literal["earliest", "latest"] = "earliest"
    """Where a consumer begins that has no cursor yet."""
    fetch_bytes: Annotated[int, Meta(ge=1, le=64 * MIB)] = 4 * MIB
    """Bytes of one fetch; a larger batch still comes whole."""
    prefetch_bytes: Annotated[int, Meta(ge=0, le=1024 * MIB)] = 16 * MIB
    """Bytes read ahead per partition at which fetching pauses."""
    wait_ms: Annotated[int, Meta(ge=1, le=60_000)] = 1_000
    """How long a leader holds a fetch open until there is something to read."""
    auto_commit_ms: _PositiveTime | None = None
    """Time between commits that the consumer makes by itself; None: it makes none."""
    on_trimmed: Literal["error", "earliest"] = "error"
    """What to do when retention removed records before they were read: raise, or go on behind the gap and count it."""
    refresh_ms: _PositiveTime = 10_000
    """Time between looks for partitions that were added to the topic."""


def to_ms(seconds: float, name: str) -> int:
    """Return a user's seconds in milliseconds; raise `OutOfRangeError` for what is no time."""
    if not 0 <= seconds <= TIME_MS_MAX / 1000:
        raise OutOfRangeError(f"{name} is {seconds!r} seconds; allowed are 0 to {TIME_MS_MAX // 1000}")
    return round(seconds * 1000)


def to_compression(name: str | None) -> Compression:
    """Return the compression of a name."""
    try:
        return Compression[(name or "none").upper()]
    except KeyError:
        raise OutOfRangeError(f"compression is None, 'lz4' or 'zstd', not {name!r}") from None


def check_options(options: msgspec.Struct) -> None:
    """Raise `OutOfRangeError` if an option is outside its bounds: constructors do not look at them."""
    try:
        msgspec.convert(msgspec.structs.asdict(options), type(options))
    except msgspec.ValidationError as error:
        raise OutOfRangeError(f"an option is not allowed: {error}") from None
