"""What the table of routes consists of: one call of the HTTP API, as data."""

from __future__ import annotations

import msgspec

from quiver.gateway import contract

EVENT_STREAM = "text/event-stream; charset=utf-8"
FILE = "application/octet-stream"
"""A file, of a type that depends on its name."""
HTML = "text/html; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
ALWAYS = (400, 401, 403, 408, 413, 421, 429, 431, 503)
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
    file_types: tuple[str, ...] = ()
    """Types of the files that it returns instead, if the caller asks for one."""
    success: int = 200
    has_nothing: bool = False
    """Whether 204 is returned when there is no message."""
    failures: tuple[int, ...] = ()
    """Failure statuses beside `ALWAYS`."""
    changes: bool = False
    """Whether it changes state."""
    creates: bool = False
    """Whether it leaves something behind that lasts: a topic, a producer, a consumer."""
    is_signed: bool = False
    """Whether its handler gets the principal in whose name it passes a request on."""
    has_records: bool = False
    """Whether its answer has records, whose memory counts for the principal that its handler gets."""
    is_probe: bool = False
    """Whether it is for load balancers: on every listener, under every name, and never refused for lack of room."""
    is_administrative: bool = False
    """Whether it moves to `gateway.admin_listen` if that is set."""


DATA_FAILURES = (404, 409, 422, 504, 507)
WRITE_FAILURES = (404, 409, 422, 504)
"""Failure statuses of calls that read or write records, and of calls that change metadata."""
