"""Every error that Quiver raises, classified by what the caller should do.

Servers and clients raise the same classes: `kind_of` names an error's class on the wire, and `error_class` finds it
again. An error's ``code`` is stable; it may be more precise than its class (``topic_exists`` is a `ConflictError`).

    QuiverError
    ├── RequestError          fix the request; it was not done
    │   ├── DecodeError       the bytes are not a valid encoding
    │   │   └── UnknownVersionError  a newer program wrote the bytes: upgrade this one
    │   ├── NotFoundError     the named thing does not exist
    │   ├── ConflictError     the current state does not allow it
    │   │   ├── OutOfSequenceError  a batch does not follow its producer's last one
    │   │   └── FencedError   a newer epoch of the producer exists
    │   ├── OutOfRangeError   a value is outside its allowed range
    │   ├── NotAllowedError   this client may not do it
    │   └── TooLargeError     more bytes than a named limit allows
    ├── UnavailableError      not done; retry later or on another node
    │   ├── OverloadedError   not done; a named limit is reached; back off
    │   ├── NotLeaderError    not done; another node is the leader
    │   └── DiskFullError     not done; the disk is nearly full
    ├── OutcomeUnknownError   unknown whether done; retry only if idempotent
    ├── StorageError          this replica stops serving
    │   ├── LogClosedError    not done; the log is closed or has failed
    │   ├── LogFailedError    unknown; the disk failed during an append, and the restart shows whether it is there
    │   ├── DamageError       stored bytes fail their checksum
    │   └── TrimmedError      retention has removed the requested range
    └── ConfigError           the settings are invalid; fix them and restart

A broken invariant is not an error: the program's state can no longer be trusted, so `invariant` ends the process.
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
        """Return the message."""
        return str(self)


class RequestError(QuiverError):
    """Report a request that cannot succeed unchanged: fix it. Nothing was done."""

    code = "bad_request"


class DecodeError(RequestError):
    """Report bytes that are not a valid encoding."""

    code = "decode_failed"


class UnknownVersionError(DecodeError):
    """Report bytes that only a newer program can read: upgrade this node.

    A state machine that meets such an entry in its log stops there and skips nothing; see `quiver.replication.applier`.
    """

    code = "unknown_version"


class NotFoundError(RequestError):
    """Report a request that names something that does not exist."""

    code = "not_found"


class ConflictError(RequestError):
    """Report a request that the current state does not allow."""

    code = "conflict"


class OutOfSequenceError(ConflictError):
    """Report a batch that does not follow its producer's last one: not done; send the missing batches first."""

    code = "out_of_sequence"


class FencedError(ConflictError):
    """Report a batch of a producer epoch that a newer one has fenced: not done, and a retry cannot succeed."""

    code = "fenced"


class OutOfRangeError(RequestError):
    """Report a value outside its allowed range."""

    code = "out_of_range"


class NotAllowedError(RequestError):
    """Report a request that this client is not permitted to make."""

    code = "not_allowed"


class TooLargeError(RequestError):
    """Report a request with more bytes than a named limit allows."""

    code = "too_large"


class UnavailableError(QuiverError):
    """Report that the request was not done; retry it later, after `retry_after_ms` if given, or on another node."""

    code = "unavailable"

    def __init__(self, message: str = "", *, code: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_ms = retry_after_ms


class OverloadedError(UnavailableError):
    """Report that a named limit is reached; the request was rejected before anything was done. Retry with backoff."""

    code = "overloaded"


class NotLeaderError(UnavailableError):
    """Report that this node is not the leader: not done; send the request to `leader`, if it is known."""

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
    """Report that the disk is nearly full: rejected before anything was done. Free space, then retry."""

    code = "disk_full"


class OutcomeUnknownError(QuiverError):
    """Report that it is unknown whether the request was done: retry only if it is idempotent."""

    code = "outcome_unknown"
    outcome = "unknown"


class StorageError(QuiverError):
    """Report that this replica's storage failed; the replica stops serving."""

    code = "storage_failed"


class LogClosedError(StorageError):
    """Report a write to a log that its owner closed or that has failed: not done."""

    code = "log_closed"


class LogFailedError(StorageError):
    """Report that the disk failed during a write: unknown; after a restart the batch may be in the log or not."""

    code = "log_failed"
    outcome = "unknown"


class DamageError(StorageError):
    """Report stored bytes that fail their checksum; the message names the file and the range."""

    code = "damaged"


class TrimmedError(StorageError):
    """Report that a requested offset or index is below the log's start: retention has removed it."""

    code = "trimmed"


class ConfigError(QuiverError):
    """Report invalid settings; the message names the key and the allowed values."""

    code = "bad_config"


def kind_of(error: QuiverError) -> str:
    """Return an error's name on the wire: the code of its nearest class in this module."""
    return next(_NAMES[kind] for kind in type(error).__mro__ if kind in _NAMES)


def error_class(kind: str) -> type[QuiverError]:
    """Return the class of a name on the wire; `QuiverError` for a name that only a newer version knows."""
    return _KINDS.get(kind, QuiverError)


def _all_kinds() -> dict[str, type[QuiverError]]:
    found: list[type[QuiverError]] = [QuiverError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return {kind.code: kind for kind in found}


_KINDS = _all_kinds()
"""The classes of this module; a class derived in another module is sent as its nearest base class here."""
_NAMES: dict[type, str] = {kind: name for name, kind in _KINDS.items()}


class InvariantBroken(SystemExit):
    """End the process: the program is in a state that its design excludes."""


def invariant(condition: object, message: str, /, **facts: object) -> None:
    """End the process unless `condition` holds; `facts` are shown with the message."""
    if not condition:
        _break(message, facts)


def _break(message: str, facts: dict[str, object]) -> NoReturn:
    detail = " ".join(f"{key}={value!r}" for key, value in facts.items())
    raise InvariantBroken(f"invariant broken: {message} {detail}".rstrip())
