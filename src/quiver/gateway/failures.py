"""Errors as HTTP clients see them: a status by what the caller should do, a code for programs, a sentence for people.

The outcome is told wherever it is not plain from the status: 503 was surely not done, 504 was perhaps done. Nothing of
the inside of the program is shown.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from msgspec import UNSET

from quiver.errors import (
    ConflictError,
    DiskFullError,
    NotAllowedError,
    NotFoundError,
    Outcome,
    OutOfRangeError,
    QuiverError,
    RequestError,
    TooLargeError,
    TrimmedError,
    UnavailableError,
)
from quiver.gateway.contract import Failure
from quiver.gateway.http import HttpResponse

RETRY_AFTER_S = 1
"""When to come back if nothing better is known: a new leader is found in less."""

_STATUSES: tuple[tuple[type[QuiverError], int], ...] = (
    (NotFoundError, 404),
    (TrimmedError, 404),
    (ConflictError, 409),
    (OutOfRangeError, 422),
    (NotAllowedError, 403),
    (TooLargeError, 413),
    (RequestError, 400),
    (DiskFullError, 507),
    (UnavailableError, 503),
)
"""By class, the more precise first; anything else is 503 or 504 by its outcome."""

_WITH_OUTCOME = (503, 504, 507)


def status_of(error: QuiverError) -> int:
    """Return the HTTP status of an error."""
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return HTTPStatus.GATEWAY_TIMEOUT if error.outcome == "unknown" else HTTPStatus.SERVICE_UNAVAILABLE


def failure_of(error: QuiverError) -> HttpResponse:
    """Return the response to a request that ended in an error."""
    retry_after_ms = (error.retry_after_ms or 0) if isinstance(error, UnavailableError) else 0
    return failure(status_of(error), error.code, error.message, retry_after_s=-(-retry_after_ms // 1000))


def failure(status: int, code: str, message: str, *, retry_after_s: int = 0) -> HttpResponse:
    """Return a response that says why something did not succeed."""
    outcome: Outcome | msgspec.UnsetType = UNSET
    headers: tuple[tuple[str, str], ...] = ()
    if status in _WITH_OUTCOME:
        outcome = "unknown" if status == HTTPStatus.GATEWAY_TIMEOUT else "not_done"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers = (("Retry-After", str(retry_after_s or RETRY_AFTER_S)),)
    body = msgspec.json.encode(Failure(code=code, message=message, outcome=outcome))
    return HttpResponse(status=status, body=body, headers=headers)
