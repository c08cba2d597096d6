"""Every error Quiver raises, by what the caller should do about it.

The same classes are raised on servers and, decoded from what `kind_of` says of them, by the client. An error's
``code`` is stable; it may be more precise than its class (``topic_exists`` is a `ConflictError`).

    QuiverError
    ├── RequestError          fix the request; it was not done
    │   ├── DecodeError       the bytes are not what they claim to be
    │   ├── NotFoundError     there is no such thing
    │   ├── ConflictError     not in the present state
    │   │   ├── OutOfSequenceError  a batch that does not follow its producer's last one
    │   │   └── FencedError   a batch of an epoch that its producer has left
    │   ├── OutOfRangeError   a value that is never allowed
    │   ├── NotAllowedError   not by this client
    │   └── TooLargeError     more bytes than a named bound allows
    ├── UnavailableError      not done; try again later or elsewhere
    │   ├── OverloadedError   not done; a named bound is reached
    │   ├── NotLeaderError    not done; another node leads
    │   └── DiskFullError     not done; the disk is nearly full
    ├── OutcomeUnknownError   perhaps done; retry only if idempotent
    ├── StorageError          this replica stops serving
    │   ├── LogClosedError    the log takes no more appends; this one was not done
    │   ├── LogFailedError    the disk failed under an append; a restart tells whether it is there
    │   ├── DamageError       stored bytes fail their checksum
    │   └── TrimmedError      the wanted range was removed by retention
    └── ConfigError           the settings cannot be used

A broken invariant is not an error: it means that the program no longer knows what is true, so
`invariant` ends the process instead of letting it go on.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NoReturn

from quiver.model import NodeId

Outcome = Literal["not_done", "unknown"]


class QuiverError(Exception):
    """The root of the tree: catch it to catch everything Quiver raises on purpose."""

    code: str = "error"
    outcome: ClassVar[Outcome] = "not_done"

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        """Return the sentence for people."""
        return str(self)


class RequestError(QuiverError):
    """Report a request that will never succeed as it is: fix it. Nothing was done."""

    code = "bad_request"


class DecodeError(RequestError):
    """Report bytes that are not a valid encoding of what they claim to be."""

    code = "decode_failed"


class NotFoundError(RequestError):
    """Report a request about something that does not exist."""

    code = "not_found"


class ConflictError(RequestError):
    """Report a request that the present state does not allow."""

    code = "conflict"


class OutOfSequenceError(ConflictError):
    """Report a batch that does not follow its producer's last one: not done; send what is missing first."""

    code = "out_of_sequence"


class FencedError(ConflictError):
    """Report a batch of an epoch that its producer has left: not done, and never will be."""

    code = "fenced"


class OutOfRangeError(RequestError):
    """Report a value that is never allowed."""

    code = "out_of_range"


class NotAllowedError(RequestError):
    """Report something that this client may not do."""

    code = "not_allowed"


class TooLargeError(RequestError):
    """Report a request of more bytes than a named bound allows."""

    code = "too_large"


class UnavailableError(QuiverError):
    """Report that the request was not done and may succeed later, after `retry_after_ms` if given, or elsewhere."""

    code = "unavailable"

    def __init__(self, message: str = "", *, code: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_ms = retry_after_ms


class OverloadedError(UnavailableError):
    """Report that a named bound is reached; the request was refused before anything was done."""

    code = "overloaded"


class NotLeaderError(UnavailableError):
    """Report that this node does not lead what the request is about: not done; `leader` does, if it is known."""

    code = "not_leader"

    def __init__(
        self,
        message: str = "",
        *,
        code: str | None = None,
        retry_after_ms: int | None = None,
        leader: NodeId | None = None,
    ) -> None:
        super().__init__(message, code=code, retry_after_ms=retry_after_ms)
        self.leader = leader


class DiskFullError(UnavailableError):
    """Report that the disk is nearly full: refused before anything was done."""

    code = "disk_full"


class OutcomeUnknownError(QuiverError):
    """Report that the request was perhaps done: retry only if it is idempotent."""

    code = "outcome_unknown"
    outcome = "unknown"


class StorageError(QuiverError):
    """Report that this replica's storage failed and that it stops serving."""

    code = "storage_failed"


class LogClosedError(StorageError):
    """Report an append to a log that was closed, by its owner or by an earlier failure."""

    code = "log_closed"


class LogFailedError(StorageError):
    """Report that the disk failed while a batch was on its way to it: it may be found after a restart, or not."""

    code = "log_failed"
    outcome = "unknown"


class DamageError(StorageError):
    """Report stored bytes that fail their checksum; the message names the file and the range."""

    code = "damaged"


class TrimmedError(StorageError):
    """Report that a wanted offset or index lies below the log's start."""

    code = "trimmed"


class ConfigError(QuiverError):
    """Report settings that cannot be used; the message names the key and what is allowed."""

    code = "bad_config"


def kind_of(error: QuiverError) -> str:
    """Return the name under which an error travels: the code of its class in this module."""
    return next(_NAMES[kind] for kind in type(error).__mro__ if kind in _NAMES)


def error_class(kind: str) -> type[QuiverError]:
    """Return the class that a name stands for; the root for a name that only a newer program knows."""
    return _KINDS.get(kind, QuiverError)


def _all_kinds() -> dict[str, type[QuiverError]]:
    found: list[type[QuiverError]] = [QuiverError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return {kind.code: kind for kind in found}


_KINDS = _all_kinds()
"""The classes of this module; those that other modules derive from them travel as the nearest of these."""
_NAMES: dict[type, str] = {kind: name for name, kind in _KINDS.items()}


class InvariantBroken(SystemExit):
    """End the process: the program found itself in a state that its design excludes."""


def invariant(condition: object, message: str, /, **facts: object) -> None:
    """End the process unless `condition` holds; `facts` are shown with the message."""
    if not condition:
        _break(message, facts)


def _break(message: str, facts: dict[str, object]) -> NoReturn:
    detail = " ".join(f"{key}={value!r}" for key, value in facts.items())
    raise InvariantBroken(f"invariant broken: {message} {detail}".rstrip())
