"""The audit log: who did, or tried to do, what. JSON lines in a file, and records of an internal topic.

`record` never waits and never fails: events go into a bounded queue, and what does not fit is counted. One background
task takes them out, writes the file in the executor and publishes them. Secrets are never in an event: a token is named
by its id.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

import msgspec

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.logs import facts
from quiver.metrics import MetricFamily, counter
from quiver.model import NodeId

logger = logging.getLogger(__name__)

QUEUE_MAX = 10_000
"""Events that wait to be written; further ones are dropped and counted."""
EVENTS_PER_WRITE = 1_000
AUTHENTICATE = "authenticate"
"""The verb of an authentication."""

Write = Callable[[bytes], Awaitable[None]]
"""Append lines to the file."""
Publish = Callable[[Sequence[bytes]], Awaitable[None]]
"""Append records to the internal topic."""


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. `outcome` is `done`, or the code of the error."""

    kind: Literal["authentication", "denial", "change"]
    outcome: str
    principal: str = "anonymous"
    address: str = ""
    request: str = ""
    """The name of the request on the wire, or of the HTTP route."""
    verb: str = ""
    """What a grant must allow for the request, such as `delete`; `authenticate` for an authentication."""
    resource: str = ""
    """What it is about, by kind and name, such as `topic logs.web`."""
    request_id: str = ""
    """On the wire the number of the request on its connection, which has the address; over HTTP its `X-Request-Id`."""
    detail: str = ""


class AuditedOperation(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody did or tried to do, for an event."""

    request: str
    verb: str = ""
    resource: str = ""
    request_id: str = ""
    address: str = ""
    """Where it came from; empty: the address of the identity."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    time_ms: int
    node: NodeId
    number: int
    """Counts the node's events since it started; a gap shows dropped events."""
    event: AuditEvent


class AuditLog:
    """Collect events; `run` writes them. Without `write` nothing is kept."""

    def __init__(self, *, node: NodeId, clock: Clock, write: Write | None = None) -> None:
        self._node = node
        self._clock = clock
        self._write = write
        self.publish: Publish | None = None
        """Appends to the internal topic, once the node can."""
        self._queue: deque[bytes] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._number = 0
        self._encoder = msgspec.json.Encoder()
        self.dropped = 0
        """Events that did not fit, or could not be written."""
        self.failures = 0
        """Failed authentications."""
        self.denials = 0

    def record(self, event: AuditEvent) -> None:
        """Add an event; never waits, never raises."""
        self._number += 1
        self.failures += event.kind == "authentication" and event.outcome != "done"
        self.denials += event.kind == "denial"
        if self._write is None:
            return
        if len(self._queue) >= QUEUE_MAX:
            self.dropped += 1
            return
        line = _Line(time_ms=self._clock.wall_ms(), node=self._node, number=self._number, event=event)
        self._queue.append(self._encoder.encode(line))
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def run(self) -> None:
        """Write events until it is cancelled."""
        while True:
            if not self._queue:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
            await self.flush()

    async def flush(self) -> None:
        """Write what waits; an event that cannot be written is counted, not kept."""
        while self._queue:
            lines = [self._queue.popleft() for _ in range(min(EVENTS_PER_WRITE, len(self._queue)))]
            if self._write is not None:
                await self._attempt(self._write(b"".join(line + b"\n" for line in lines)), len(lines))
            if self.publish is not None:
                await self._attempt(self.publish(lines), len(lines))

    async def _attempt(self, work: Awaitable[None], count: int) -> None:
        try:
            await work
        except (QuiverError, OSError) as error:
            self.dropped += count
            logger.warning("audit events lost", extra=facts(count=count, error=error))

    def metrics(self) -> Iterable[MetricFamily]:
        """Return the metrics of authentication and of the audit log."""
        return (
            counter("quiver_authentication_failures_total", "Failed authentications.", self.failures),
            counter("quiver_access_denials_total", "Requests that were not allowed.", self.denials),
            counter("quiver_audit_dropped_total", "Audit events that were not written.", self.dropped),
        )
