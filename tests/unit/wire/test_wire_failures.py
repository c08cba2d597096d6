"""Errors on the wire: the same class, code and outcome on the other side, whatever its version."""

from __future__ import annotations

import msgspec
import pytest

from quiver.errors import (
    LogFailedError,
    NotLeaderError,
    OutcomeUnknownError,
    OverloadedError,
    QuiverError,
    UnavailableError,
)
from quiver.model import NodeId
from quiver.wire.envelope import MESSAGE_LENGTH_MAX, ErrorInfo, describe_error, restore_error


def all_classes() -> list[type[QuiverError]]:
    found: list[type[QuiverError]] = [QuiverError]
    for kind in found:
        found.extend(each for each in kind.__subclasses__() if each.__module__ == "quiver.errors")
    return found


def travel(error: QuiverError) -> QuiverError:
    return restore_error(msgspec.msgpack.decode(msgspec.msgpack.encode(describe_error(error)), type=ErrorInfo))


@pytest.mark.parametrize("kind", all_classes(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("code", [None, "more_precise"])
def test_error_arrives_as_what_it_was(kind: type[QuiverError], code: str | None) -> None:
    error = travel(kind("a sentence", code=code))
    assert type(error) is kind
    assert (error.code, error.message, error.outcome) == (code or kind.code, "a sentence", kind.outcome)


def test_there_are_classes_to_test() -> None:
    assert len(all_classes()) >= 20


@pytest.mark.parametrize("leader", [None, NodeId(0), NodeId(3)])
def test_leader_and_wait_arrive(leader: NodeId | None) -> None:
    error = travel(NotLeaderError("node 3 leads", leader=leader, retry_after_ms=40))
    assert isinstance(error, NotLeaderError)
    assert (error.leader, error.retry_after_ms) == (leader, 40)


@pytest.mark.parametrize("kind", [UnavailableError, OverloadedError])
def test_wait_arrives_with_every_error_that_can_name_one(kind: type[UnavailableError]) -> None:
    error = travel(kind(retry_after_ms=0))
    assert isinstance(error, kind)
    assert error.retry_after_ms == 0


def test_class_of_another_module_travels_as_the_nearest_known() -> None:
    class LocalError(UnavailableError):
        code = "local"

    error = travel(LocalError("here"))
    assert (type(error), error.code) == (UnavailableError, "local")


@pytest.mark.parametrize(("outcome", "kind"), [("not_done", QuiverError), ("unknown", OutcomeUnknownError)])
def test_kind_of_a_newer_program_keeps_its_outcome(outcome: str, kind: type[QuiverError]) -> None:
    failure = msgspec.convert({"kind": "novel", "code": "novel_thing", "outcome": outcome}, ErrorInfo)
    error = restore_error(failure)
    assert (type(error), error.code, error.outcome) == (kind, "novel_thing", outcome)


def test_outcome_counts_more_than_the_kind() -> None:
    error = restore_error(describe_error(UnavailableError("who knows", code="odd"), outcome="unknown"))
    assert (type(error), error.code) == (OutcomeUnknownError, "odd")
    # The reverse would be a promise that the kind does not give.
    assert restore_error(describe_error(LogFailedError("lost"), outcome="not_done")).outcome == "unknown"


def test_fields_of_a_newer_program_are_ignored() -> None:
    encoded = msgspec.msgpack.encode({"kind": "not_found", "code": "unknown_topic", "novel": [1]})
    assert restore_error(msgspec.msgpack.decode(encoded, type=ErrorInfo)).code == "unknown_topic"


def test_long_sentence_is_cut() -> None:
    assert travel(QuiverError("ü" * 5000)).message == "ü" * MESSAGE_LENGTH_MAX
