"""What the history checker says of topics and registrations, and the search behind it."""

from __future__ import annotations

from random import Random

import pytest
from history_script import Script
from hypothesis import given
from hypothesis import strategies as st

from quiver.testing.history import linearizability


def _call(script: Script, proc: str, f: str, answer: bool) -> None:
    script.call(proc, f, None, answer, key="topic")


def _unknown(script: Script, proc: str, f: str) -> None:
    script.call(proc, f, None, None, kind="info", key="topic")


def _begin(script: Script, proc: str, f: str) -> None:
    script.begin(proc, f, "topic")


def _end(script: Script, proc: str, f: str, answer: bool) -> None:
    script.end(proc, f, "ok", answer, key="topic")


def test_create_and_delete_in_turn_is_in_order() -> None:
    script = Script()
    _call(script, "p", "exists", False)
    _call(script, "p", "create", True)
    _call(script, "q", "create", False)
    _call(script, "q", "exists", True)
    _call(script, "p", "delete", True)
    _call(script, "q", "delete", False)
    result = script.check()
    assert result.is_clean, result
    assert result.facts["names_judged"] == 1


def test_finds_topic_created_twice() -> None:
    script = Script()
    _call(script, "p", "create", True)
    _call(script, "q", "create", True)
    assert script.found() == {"nonlinearizable-name": 1}


def test_finds_stale_read() -> None:
    script = Script()
    _call(script, "p", "create", True)
    _call(script, "q", "exists", False)
    assert script.found() == {"nonlinearizable-name": 1}


def test_finds_read_that_goes_back_while_a_create_is_under_way() -> None:
    script = Script()
    _begin(script, "p", "create")
    _call(script, "q", "exists", True)
    _call(script, "q", "exists", False)
    _end(script, "p", "create", True)
    assert script.found() == {"nonlinearizable-name": 1}


def test_overlapping_calls_may_take_effect_in_any_order() -> None:
    script = Script()
    _begin(script, "p", "create")
    _begin(script, "q", "delete")
    _call(script, "r", "exists", False)
    _call(script, "r", "exists", True)
    _end(script, "q", "delete", True)
    _end(script, "p", "create", True)
    _call(script, "r", "exists", False)
    assert script.found() == {}


def test_unknown_create_may_take_effect_late_or_never() -> None:
    for is_there in (True, False):
        script = Script()
        _unknown(script, "p", "create")
        _call(script, "q", "exists", False)
        _call(script, "q", "exists", is_there)
        assert script.found() == {}


def test_unknown_create_takes_effect_once() -> None:
    script = Script()
    _unknown(script, "p", "create")
    _call(script, "q", "exists", True)
    _call(script, "q", "delete", True)
    _call(script, "q", "exists", True)
    assert script.found() == {"nonlinearizable-name": 1}


def test_failed_create_has_no_effect() -> None:
    script = Script()
    script.call("p", "create", None, None, kind="fail", key="topic")
    _call(script, "q", "exists", True)
    assert script.found() == {"nonlinearizable-name": 1}


def test_hundreds_of_unknown_calls_are_judged() -> None:
    script = Script()
    for i in range(300):
        _unknown(script, f"p{i}", "create")
        _unknown(script, f"q{i}", "delete")
    _call(script, "r", "exists", True)
    _call(script, "r", "exists", False)
    assert script.found() == {}


def test_search_gives_up_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linearizability, "POSSIBILITIES_MAX", 3)
    script = Script()
    for i in range(4):
        _begin(script, f"p{i}", "exists")
    _begin(script, "c", "create")
    for i in range(4):
        _end(script, f"p{i}", "exists", i % 2 == 0)
    assert script.found() == {"undecided-name": 1}


@given(seed=st.integers(0, 2**32), is_wrong=st.booleans())
def test_register_of_a_correct_machine_passes_and_one_wrong_answer_does_not(seed: int, is_wrong: bool) -> None:
    rng = Random(seed)
    script = Script()
    is_there = False
    wrong_at = rng.randrange(40) if is_wrong else -1
    for i in range(40):  # one at a time: then every answer is determined
        f = rng.choice(("create", "delete", "exists"))
        answer = is_there if f == "exists" else is_there == (f == "delete")
        if f != "exists":
            is_there = f == "create"
        _call(script, f"p{i % 3}", f, answer != (i == wrong_at))
    assert (script.found() == {}) == (not is_wrong)


def _register(script: Script, proc: str, id_: int, epoch: int) -> None:
    script.call(proc, "register", None, {"id": id_, "epoch": epoch}, key="name")


def test_registered_name_keeps_its_id_and_gets_higher_epochs() -> None:
    script = Script()
    _register(script, "p", 7, 0)
    script.begin("p", "register", "name")
    script.begin("q", "register", "name")
    script.end("q", "register", value={"id": 7, "epoch": 2}, key="name")
    script.end("p", "register", value={"id": 7, "epoch": 1}, key="name")
    _register(script, "q", 7, 5)
    assert script.found() == {}


def test_finds_name_with_two_ids() -> None:
    script = Script()
    _register(script, "p", 7, 0)
    _register(script, "q", 8, 1)
    assert script.found() == {"two-ids": 1}


def test_finds_epoch_given_twice_or_going_back() -> None:
    script = Script()
    _register(script, "p", 7, 3)
    _register(script, "q", 7, 3)
    _register(script, "q", 7, 2)
    assert script.found() == {"epoch-regression": 2}
