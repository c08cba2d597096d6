"""Every error Quiver raises, by what the caller should do about it.

The same classes are raised on servers and, decoded from their stable ``code``, by the client.

    QuiverError
    ├── RequestError          fix the request; it was not done
    │   └── DecodeError       the bytes are not what they claim to be
    ├── UnavailableError      not done; try again later or elsewhere
    │   └── OverloadedError   not done; a named bound is reached
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

Outcome = Literal["not_done", "unknown"]


class QuiverError(Exception):
    """The root of the tree: catch it to catch everything Quiver raises on purpose."""

    code: ClassVar[str] = "error"
    outcome: ClassVar[Outcome] = "not_done"

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


class UnavailableError(QuiverError):
    """Report that the request was not done and may succeed later or elsewhere."""

    code = "unavailable"


class OverloadedError(UnavailableError):
    """Report that a named bound is reached; the request was refused before anything was done."""

    code = "overloaded"


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


class InvariantBroken(SystemExit):
    """End the process: the program found itself in a state that its design excludes."""


def invariant(condition: object, message: str, /, **facts: object) -> None:
    """End the process unless `condition` holds; `facts` are shown with the message."""
    if not condition:
        _break(message, facts)


def _break(message: str, facts: dict[str, object]) -> NoReturn:
    detail = " ".join(f"{key}={value!r}" for key, value in facts.items())
    raise InvariantBroken(f"invariant broken: {message} {detail}".rstrip())
