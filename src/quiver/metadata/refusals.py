"""Why a command was refused, by stable code: the same on every member, since refusing is part of `apply`.

Pure. A refused command changed nothing. What a caller should do follows from the class:

    RefusedError                (RequestError)
    ├── NotFoundError           there is no such thing        HTTP 404
    ├── ConflictError           not in the present state      HTTP 409
    └── OutOfRangeError         never, as it is               HTTP 422
"""

from __future__ import annotations

import msgspec

from quiver.errors import RequestError


class RefusedError(RequestError):
    """Report a command that every manager refused; nothing was changed."""

    code = "refused"


class NotFoundError(RefusedError):
    """Report a command about something that does not exist."""

    code = "not_found"


class ConflictError(RefusedError):
    """Report a command that the present state does not allow."""

    code = "conflict"


class OutOfRangeError(RefusedError):
    """Report a command with a value that is never allowed."""

    code = "out_of_range"


class Refusal(msgspec.Struct, frozen=True):
    """A refusal as a value, as `apply` returns it."""

    code: str
    message: str

    def error(self) -> RefusedError:
        """Return the refusal as the error that its proposer gets."""
        return _CLASSES.get(self.code, RefusedError)(self.message)


_NOT_FOUND = (
    "unknown_topic",
    "unknown_partition",
    "unknown_broker",
    "unknown_producer",
    "unknown_consumer",
    "unknown_move",
)
_CONFLICTS = (
    "not_formed",
    "cluster_exists",
    "broker_exists",
    "broker_removed",
    "broker_not_eligible",
    "bad_transition",
    "not_drained",
    "topic_exists",
    "topic_deleted",
    "topic_not_deleted",
    "too_early",
    "already_replica",
    "not_replica",
    "move_in_progress",
    "move_promoted",
    "move_not_promoted",
)
_OUT_OF_RANGE = (
    "bad_cluster_id",
    "bad_broker",
    "bad_topic_name",
    "bad_partition_count",
    "bad_replica_count",
    "bad_assignment",
    "bad_retention",
    "bad_name",
    "no_topics",
)


def _named(code: str, parent: type[RefusedError]) -> type[RefusedError]:
    """Return the class of errors with this code; `topic_exists` gives `TopicExistsError`."""
    name = "".join(word.capitalize() for word in code.split("_")) + "Error"
    return type(name, (parent,), {"code": code, "__doc__": parent.__doc__, "__module__": __name__})


_CLASSES: dict[str, type[RefusedError]] = {
    code: _named(code, parent)
    for parent, codes in ((NotFoundError, _NOT_FOUND), (ConflictError, _CONFLICTS), (OutOfRangeError, _OUT_OF_RANGE))
    for code in codes
}


REFUSAL_CODES = frozenset(_CLASSES)
"""Every code that a refusal may have."""


def refusal_class(code: str) -> type[RefusedError]:
    """Return the class of errors that has this code, for those who catch or map one."""
    return _CLASSES[code]
