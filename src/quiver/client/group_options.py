"""How a consumer is a member of a group: the arguments of `Cluster.consumer` for it, checked. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from quiver.client.options import TIME_MS_MAX, check_options, to_ms
from quiver.client.thread import run_in_daemon_thread
from quiver.errors import OutOfRangeError, RequestError
from quiver.groups.limits import SESSION_TIMEOUT_MS, SESSION_TIMEOUT_MS_MAX, SESSION_TIMEOUT_MS_MIN

OnPartitions = Callable[[Sequence[tuple[str, int]]], object]
"""Called with the topics and partitions that were assigned or revoked; may return an awaitable."""


class GroupOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a member of a group."""

    group: Annotated[str, Meta(min_length=1, max_length=300)]
    instance: Annotated[str, Meta(max_length=300)] = ""
    """A name that outlives the process: after a restart within the session timeout, the partitions stay with it."""
    rack: Annotated[str, Meta(max_length=300)] = ""
    session_timeout_ms: Annotated[int, Meta(ge=SESSION_TIMEOUT_MS_MIN, le=SESSION_TIMEOUT_MS_MAX)] = SESSION_TIMEOUT_MS
    """Time without a sign of life after which the member's partitions go to others."""
    processing_ms_max: Annotated[int, Meta(ge=1, le=TIME_MS_MAX)] | None = None
    """Time that the application may take for the records that it received; None: as long as its process lives."""
    commits_on_release: bool = True
    """Whether positions are committed when a partition is released and when the consumer is closed."""


class Member(NamedTuple):
    """How a consumer is a member of its group."""

    options: GroupOptions
    on_assign: OnPartitions | None = None
    on_revoke: OnPartitions | None = None

    def check_alone(
        self, name: str | None, consumer_id: int | None, partitions: Sequence[int], *, is_digesting: bool
    ) -> None:
        """Refuse what only a consumer of its own can have."""
        if name or consumer_id is not None or partitions or is_digesting:
            message = "not done: a member of a group has no name, consumer_id, partitions or digests of its own"
            raise RequestError(message, code="bad_argument")


def parse_member(
    group: str | None,
    instance: str,
    rack: str,
    session_timeout: float,
    max_processing_time: float | None,
    commits_on_release: bool,  # noqa: FBT001 - in the order of the arguments of `Cluster.consumer`
    on_assign: OnPartitions | None,
    on_revoke: OnPartitions | None,
) -> Member | None:
    """Return what the arguments of `Cluster.consumer` say about a member; None without a group.

    Raises:
        OutOfRangeError: an argument is outside its bounds.
        RequestError: arguments of a member without a group (`no_group`).
    """
    if group is None:
        if instance or rack or max_processing_time is not None or on_assign is not None or on_revoke is not None:
            message = (
                "not done: instance, rack, max_processing_time, on_assign and on_revoke need a group: pass group=..."
            )
            raise RequestError(message, code="no_group")
        return None
    if not group:
        raise OutOfRangeError("not done: the group has no name; give one: group='billing'")
    options = GroupOptions(
        group=group,
        instance=instance,
        rack=rack,
        session_timeout_ms=_to_bounded_ms(
            session_timeout, "session_timeout", ms_min=SESSION_TIMEOUT_MS_MIN, ms_max=SESSION_TIMEOUT_MS_MAX
        ),
        processing_ms_max=None
        if max_processing_time is None
        else _to_bounded_ms(max_processing_time, "max_processing_time", ms_min=1, ms_max=TIME_MS_MAX),
        commits_on_release=commits_on_release,
    )
    check_options(options)
    return Member(options, on_assign, on_revoke)


def _to_bounded_ms(seconds: float, name: str, *, ms_min: int, ms_max: int) -> int:
    ms = to_ms(seconds, name)
    if not ms_min <= ms <= ms_max:
        raise OutOfRangeError(
            f"not done: {name}={seconds!r} is out of range; allowed are {ms_min / 1000:g} to {ms_max / 1000:g} seconds"
        )
    return ms


def run_in_thread(callback: OnPartitions | None, name: str) -> OnPartitions | None:
    """Return a callback that runs a blocking one in another thread, where it may call its client."""
    if callback is None:
        return None
    if inspect.iscoroutinefunction(callback):
        message = f"not done: {name} is a coroutine function, which a blocking consumer cannot await"
        raise RequestError(f"{message}; pass another one, or use quiver.connect_async()", code="bad_argument")

    async def call(places: Sequence[tuple[str, int]]) -> None:
        await run_in_daemon_thread(partial(callback, places))

    return call


def glob_of(pattern: re.Pattern[str] | None) -> str | None:
    """Return the pattern of the cluster (`*` and `?`) for a regular expression; None if there is none.

    Only letters, digits, `-`, `_`, escaped characters, `.` and `.*` can be expressed.
    """
    if pattern is None or pattern.flags & ~(re.UNICODE | re.DOTALL):
        return None
    parts: list[str] = []
    for found in re.finditer(r"\.\*|\.|\\[^\w\s]|[A-Za-z0-9_\-]|(?P<other>.)", pattern.pattern, re.DOTALL):
        text = found.group()
        if found["other"] is not None or text in (r"\*", r"\?", r"\["):
            return None
        parts.append({".*": "*", ".": "?"}.get(text, text.removeprefix("\\")))
    return "".join(parts) or None
