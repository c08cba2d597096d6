"""How an error travels: as its kind, its code, its sentence, and whether the request was perhaps done. Pure.

The other side raises the same class with the same code. What must never be lost on the way is the outcome: an error of
a kind that only a newer program knows, or of a kind that does not say itself that the request was perhaps done, is
raised as `OutcomeUnknownError` if its sender said so.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.errors import (
    NotLeaderError,
    Outcome,
    OutcomeUnknownError,
    QuiverError,
    UnavailableError,
    error_class,
    kind_of,
)
from quiver.model import NodeId

MESSAGE_LENGTH_MAX = 1000
"""Longest sentence that is sent; what is longer is cut."""

_Name = Annotated[str, Meta(max_length=64)]


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire; unknown fields are ignored."""

    kind: _Name
    code: _Name
    # Each character may be cut from the sender's text, but never more than it may have sent.
    message: Annotated[str, Meta(max_length=MESSAGE_LENGTH_MAX)] = ""
    outcome: Outcome = "not_done"
    leader: NodeId | None = None
    retry_after_ms: Annotated[int, Meta(ge=0)] | None = None


def describe(error: QuiverError, *, outcome: Outcome | None = None) -> Failure:
    """Return what is sent of an error; `outcome` replaces what its class says."""
    return Failure(
        kind=kind_of(error),
        code=error.code,
        message=error.message[:MESSAGE_LENGTH_MAX],
        outcome=outcome or error.outcome,
        leader=error.leader if isinstance(error, NotLeaderError) else None,
        retry_after_ms=error.retry_after_ms if isinstance(error, UnavailableError) else None,
    )


def restore(failure: Failure) -> QuiverError:
    """Return the error that a failure describes."""
    kind = error_class(failure.kind)
    if failure.outcome == "unknown" and kind.outcome != "unknown":
        return OutcomeUnknownError(failure.message, code=failure.code)
    if issubclass(kind, NotLeaderError):
        return kind(failure.message, code=failure.code, retry_after_ms=failure.retry_after_ms, leader=failure.leader)
    if issubclass(kind, UnavailableError):
        return kind(failure.message, code=failure.code, retry_after_ms=failure.retry_after_ms)
    return kind(failure.message, code=failure.code)
