"""The options of the SDK with their bounds and reasons: the keyword arguments of its public calls.

Users give times in seconds, as is usual in Python; the options store them in milliseconds, as all of Quiver does.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.errors import OutOfRangeError, RequestError
from quiver.record import Compression
from quiver.routing.router import RouterOptions

KIB = 1024
MIB = 1024 * KIB
TIME_MS_MAX = 7 * 24 * 3_600_000
"""Longest time that can be set: one week, which every timer supports."""

_Time = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
_PositiveTime = Annotated[int, Meta(ge=1, le=TIME_MS_MAX)]


class ClusterOptions(RouterOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a client's requests."""

    timeout_ms: _PositiveTime = 30_000
    """Total time of a call with all its attempts."""
    attempt_timeout_ms: _PositiveTime = 5_000
    """Time for one attempt: after it, the client asks another node instead of one that does not answer."""
    metadata_age_ms_max: _PositiveTime = 30_000
    """Age at which metadata is fetched again although no node has refused a request."""
    client_name: str = "quiver-python"
    """The name of the client that nodes see."""


class ProducerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a producer's batches."""

    linger_ms: _Time = 0
    """How long a batch waits for more records while no batch of its partition is in flight."""
    batch_bytes: Annotated[int, Meta(ge=1, le=32 * MIB)] = MIB
    """Size at which a batch is closed; larger ones are not faster."""
    buffer_bytes: Annotated[int, Meta(ge=KIB, le=64 * 1024 * MIB)] = 64 * MIB
    """Bytes of accepted records without a known outcome at which `send` waits."""
    compression: Compression = Compression.NONE
    delivery_timeout_ms: _PositiveTime = 60_000
    """Time from a record's acceptance until its delivery fails."""
    inflight_batches_max: Annotated[int, Meta(ge=1, le=5)] = 5
    """In-flight batches per partition; brokers deduplicate the last eight, so any of five can be resent."""


class ConsumerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a consumer's prefetching and commits."""

    start: Literal["earliest", "latest"] = "earliest"
    """Where a consumer without a cursor starts."""
    fetch_bytes: Annotated[int, Meta(ge=1, le=64 * MIB)] = 4 * MIB
    """Bytes of one fetch; a larger batch is still returned whole."""
    prefetch_bytes: Annotated[int, Meta(ge=0, le=1024 * MIB)] = 16 * MIB
    """Bytes buffered per partition at which fetching pauses."""
    wait_ms: Annotated[int, Meta(ge=1, le=60_000)] = 1_000
    """How long a leader may hold a fetch open while there are no records."""
    auto_commit_ms: _PositiveTime | None = None
    """Interval of automatic commits; None: no automatic commits."""
    on_trimmed: Literal["error", "earliest"] = "error"
    """If retention removed unread records: raise an error, or skip to the first record and count the gap."""
    refresh_ms: _PositiveTime = 10_000
    """Interval of the check for partitions that were added to the topic."""


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a queue object in one process; those of its group are `quiver.groups.settings.QueueSettings`."""

    prefetch: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """Jobs that are received before a worker asks for them."""
    receive_bytes: Annotated[int, Meta(ge=1, le=16 * MIB)] = 4 * MIB
    """Bytes of the records of one receive; a larger record is still returned."""
    wait_ms: Annotated[int, Meta(ge=1, le=60_000)] = 500
    """How long a leader may hold a receive open while there are no records; a queue that is closed waits for it."""
    max_processing_ms: _PositiveTime | None = None
    """Time after which the lease of a job inside `with` is no longer extended; None: never."""
    refresh_ms: _PositiveTime = 10_000
    """Interval of the check for partitions that were added to the topic."""


def default_delivery_timeout_ms(timeout_ms: int) -> int:
    """Return how long a record is tried if nothing else was asked for: no longer than a call that was made short."""
    is_short = timeout_ms < ClusterOptions().timeout_ms
    return timeout_ms if is_short else ProducerOptions().delivery_timeout_ms


def to_ms(seconds: float, name: str) -> int:
    """Convert seconds to milliseconds; raise `OutOfRangeError` outside the allowed range."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        shown = f"{seconds!r:.60} ({type(seconds).__name__})"
        raise RequestError(f"not done: {name}={shown}; pass a number of seconds (int or float)", code="bad_argument")
    if not 0 <= seconds <= TIME_MS_MAX / 1000:
        raise OutOfRangeError(
            f"not done: {name}={seconds!r} is out of range; allowed are 0 to {TIME_MS_MAX // 1000} seconds"
        )
    return round(seconds * 1000)


def to_compression(name: str | None) -> Compression:
    """Return the compression with a name; None is no compression."""
    try:
        return Compression[(name or "none").upper()]
    except KeyError:
        raise OutOfRangeError(f"not done: unsupported compression {name!r}; use None, 'lz4' or 'zstd'") from None


def check_options(options: msgspec.Struct) -> None:
    """Raise `OutOfRangeError` if an option is outside its bounds, which constructors do not check."""
    try:
        msgspec.convert(msgspec.structs.asdict(options), type(options))
    except msgspec.ValidationError as error:
        raise OutOfRangeError(f"not done: invalid option: {error}") from None
