"""What the history checker says of consumers whose cursors the cluster keeps."""

from __future__ import annotations

from history_script import Script


def _written() -> Script:
    script = Script()
    script.send("p", "a b c d", 0)
    return script


def test_consumer_that_gets_every_record_once_is_in_order() -> None:
    script = _written()
    script.consume("c", 0, "a b")
    script.cursor("c", 2)
    script.consume("c", 2, "c d")
    script.cursor("c", 4)
    result = script.check()
    assert result.is_clean, result
    assert result.facts["consumers_judged"] == 1


def test_finds_record_delivered_twice() -> None:
    script = _written()
    script.consume("c", 0, "a b")
    script.consume("c", 1, "b c", proc="another")
    assert script.found() == {"repeated-delivery": 1}


def test_two_consumers_get_every_record_each() -> None:
    script = _written()
    script.consume("c", 0, "a b")
    script.consume("d", 0, "a b")
    assert script.found() == {}


def test_consumer_that_names_offsets_may_repeat() -> None:
    script = _written()
    script.consume("c", 0, "a b", offset=0)
    script.consume("c", 0, "a b", offset=0)
    script.consume("c", 2, "c", offset=2)
    assert script.found() == {}


def test_consumer_that_puts_its_cursor_back_may_repeat() -> None:
    script = _written()
    script.consume("c", 0, "a b")
    script.call("c", "commit", {"consumer": "c", "offset": 0}, None)
    script.consume("c", 0, "a b")
    assert script.found() == {}


def test_finds_record_that_was_left_out() -> None:
    script = _written()
    script.consume("c", 0, "a")
    script.consume("c", 2, "c")
    result = script.check()
    assert dict(result.counts) == {"undelivered": 1}
    assert result.anomalies[0].evidence["offsets"] == [1]


def test_lost_answer_may_have_swallowed_as_many_records_as_it_asked_for() -> None:
    script = _written()
    script.consume("c", 0, "", kind="info")
    script.consume("c", 2, "c d", proc="c again")
    assert script.found() == {}


def test_lost_answer_explains_no_more_than_it_asked_for() -> None:
    script = _written()
    script.consume("c", 0, "", kind="info")
    script.consume("c", 3, "d", proc="c again")
    assert script.found() == {"undelivered": 1}


def test_lost_answer_explains_one_place_only() -> None:
    script = _written()
    script.consume("c", 0, "", kind="info")
    script.consume("c", 1, "b", proc="c again")
    script.consume("c", 3, "d", proc="c again")
    assert script.found() == {"undelivered": 1}


def test_refused_call_explains_nothing() -> None:
    script = _written()
    script.consume("c", 0, "", kind="fail")
    script.consume("c", 2, "c d")
    assert script.found() == {"undelivered": 1}


def test_lost_answer_to_a_call_with_an_offset_explains_nothing() -> None:
    script = _written()
    script.consume("c", 0, "", offset=0, kind="info")
    script.consume("c", 2, "c d", proc="c again")
    assert script.found() == {"undelivered": 1}


def test_lost_answer_without_a_partition_may_have_come_from_any() -> None:
    script = _written()
    script.begin("c", "consume", None, {"consumer": "c", "max": 1, "offset": None})
    script.end("c", "consume", "info", key=None)
    script.consume("c", 1, "b c", proc="c again")
    assert script.found() == {}


def test_subscription_tells_where_a_consumer_begins() -> None:
    script = _written()
    script.note("c", "subscribe", {"consumer": "c", "offset": 2})
    script.consume("c", 2, "c d")
    script.note("d", "subscribe", {"consumer": "d", "offset": None})
    script.consume("d", 3, "d")
    assert script.found() == {}


def test_trimmed_records_need_not_be_delivered() -> None:
    script = _written()
    script.note("n", "trim", 2)
    script.consume("c", 2, "c d")
    assert script.found() == {}


def test_finds_cursor_behind_a_record_that_nobody_was_given() -> None:
    script = _written()
    script.consume("c", 0, "a")
    script.cursor("c", 3)
    found = script.found()
    assert found["cursor-passed"] == 1
    assert found["undelivered"] == 1


def test_finds_cursor_behind_a_record_that_is_given_only_later() -> None:
    script = _written()
    script.consume("c", 0, "a")
    script.cursor("c", 2)
    script.consume("c", 1, "b")
    assert script.found() == {"cursor-passed": 1}


def test_trimmed_record_may_be_given_after_the_cursor_has_passed_it() -> None:
    script = _written()
    script.consume("c", 0, "a")
    script.note("n", "trim", 2)
    script.cursor("c", 2)
    script.consume("c", 1, "b")  # a member that stood still had fetched it
    script.consume("c", 2, "c d")
    assert script.found() == {}


def test_cursor_may_stand_behind_a_record_on_its_way() -> None:
    script = _written()
    script.begin("c", "consume", value={"consumer": "c", "max": 2, "offset": None})
    script.cursor("c", 2)
    script.end("c", "consume", value=[[0, "a"], [1, "b"]])
    assert script.found() == {}


def test_finds_cursor_that_went_back() -> None:
    script = _written()
    script.consume("c", 0, "a b")
    script.cursor("c", 1)
    assert script.found() == {"cursor-regression": 1}


def test_cursor_asked_for_during_a_delivery_may_be_before_it() -> None:
    script = _written()
    script.begin("c cursor", "cursor", value={"consumer": "c"})
    script.consume("c", 0, "a b")
    script.end("c cursor", "cursor", value=0)
    assert script.found() == {}
