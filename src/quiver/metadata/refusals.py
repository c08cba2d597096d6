"""Why a command was refused, by stable code: the same on every member, since refusing is part of `apply`.

Pure. A refused command changed nothing. The class of the error says what a caller should do: there is no such
thing (`NotFoundError`), not in the present state (`ConflictError`), never as it is (`OutOfRangeError`).
"""

from __future__ import annotations

import msgspec

from quiver.errors import ConflictError, NotFoundError, OutOfRangeError, RequestError


class CommandRefusal(msgspec.Struct, frozen=True):
    """A refusal as a value, as `apply` returns it."""

    code: str
    message: str

    def error(self) -> RequestError:
        """Return the refusal as the error that its proposer gets."""
        return _CLASSES.get(self.code, RequestError)(self.message, code=self.code)


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
    "too_many_holds",
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
    "bad_hold",
)


_CLASSES: dict[str, type[RequestError]] = {
    code: kind
    for kind, codes in ((NotFoundError, _NOT_FOUND), (ConflictError, _CONFLICTS), (OutOfRangeError, _OUT_OF_RANGE))
    for code in codes
}

REFUSAL_CODES = frozenset(_CLASSES)
"""Every code that a refusal may have."""
