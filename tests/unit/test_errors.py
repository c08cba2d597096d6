"""The error tree tells callers what to do, and invariants end the process."""

from __future__ import annotations

import pytest

from quiver import errors
from quiver.errors import (
    DecodeError,
    InvariantBroken,
    LogFailedError,
    OutcomeUnknownError,
    OverloadedError,
    QuiverError,
    RequestError,
    StorageError,
    UnavailableError,
    error_class,
    invariant,
    kind_of,
)


def all_errors() -> list[type[QuiverError]]:
    found = [QuiverError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__ == errors.__name__]


def test_codes_are_unique_words() -> None:
    codes = [kind.code for kind in all_errors()]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


def test_only_errors_after_an_append_leave_the_outcome_open() -> None:
    open_ended = {kind for kind in all_errors() if kind.outcome == "unknown"}
    assert open_ended == {OutcomeUnknownError, LogFailedError}


def test_classes_group_by_what_the_caller_should_do() -> None:
    assert issubclass(DecodeError, RequestError)
    assert issubclass(OverloadedError, UnavailableError)
    assert issubclass(LogFailedError, StorageError)
    assert not issubclass(OutcomeUnknownError, UnavailableError)


def test_module_docstring_draws_the_whole_tree() -> None:
    drawn = errors.__doc__ or ""
    assert [kind.__name__ for kind in all_errors() if kind.__name__ not in drawn] == []


def test_message_is_the_sentence() -> None:
    assert RequestError("no such topic").message == "no such topic"


def test_invariant_that_holds_does_nothing() -> None:
    invariant(1 < 2, "numbers are ordered", left=1)


def test_broken_invariant_ends_the_process_and_shows_the_facts() -> None:
    with pytest.raises(InvariantBroken) as ended:
        invariant([], "a log has segments", directory="d", count=0)
    assert str(ended.value) == "invariant broken: a log has segments directory='d' count=0"
    assert isinstance(ended.value, SystemExit)


def test_broken_invariant_is_not_caught_by_those_who_catch_errors() -> None:
    assert not issubclass(InvariantBroken, Exception)


def test_broken_invariant_without_facts_has_a_plain_message() -> None:
    with pytest.raises(InvariantBroken, match=r"^invariant broken: so it is$"):
        invariant(None, "so it is")


def test_every_error_travels_as_its_own_class() -> None:
    assert all(error_class(kind_of(kind("?"))) is kind for kind in all_errors())


def test_error_of_another_module_travels_as_the_nearest_class_of_the_tree() -> None:
    class PrivateError(OverloadedError):
        code = "private"

    assert kind_of(PrivateError("?")) == OverloadedError.code


def test_kind_of_a_newer_program_is_an_error_still() -> None:
    assert error_class("not_known_yet") is QuiverError


def test_code_may_be_more_precise_than_the_class() -> None:
    assert (RequestError("?", code="topic_exists").code, RequestError("?").code) == ("topic_exists", "bad_request")
