"""For every anomaly that the history checker knows: a history that shows it, and the like of it that is in order."""

from __future__ import annotations

from history_script import Script


def test_plain_history_is_clean() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.send("p", "c", 2)
    script.poll("r", 0, "a b")
    script.poll("r", 2, "c")
    script.call("e", "list_offsets", None, 3)
    script.note("r", "drain", 3)
    result = script.check()
    assert result.is_clean, result
    assert result.facts["records_acknowledged"] == 3
    assert result.facts["records_read"] == 3


def test_finds_two_values_at_one_offset() -> None:
    script = Script()
    script.send("p", "a", 0)
    script.send("q", "b", 0)
    assert "inconsistent-offsets" in script.found()


def test_finds_another_value_than_was_acknowledged_there() -> None:
    script = Script()
    script.send("p", "a", 0)
    script.begin("q", "send", value=["b"])
    script.poll("r", 0, "b")
    assert "inconsistent-offsets" in script.found()


def test_finds_duplicate() -> None:
    script = Script()
    script.send("p", "a", 0)
    script.poll("r", 0, "a a")
    assert script.found() == {"duplicate": 1}


def test_finds_a_value_in_two_partitions() -> None:
    script = Script()
    script.begin("p", "send", None, ["a"])
    script.end("p", "send", "info", key=None)
    script.poll("r", 0, "a")
    script.poll("r", 0, "a", key="t-1")
    assert script.found() == {"duplicate": 1}


def test_send_may_learn_its_partition_from_the_answer_or_from_a_reader() -> None:
    script = Script()
    script.begin("p", "send", None, ["a"])
    script.end("p", "send", "ok", 0, key="t-1")
    script.begin("q", "send", None, ["b"])
    script.end("q", "send", "info", key=None)
    script.poll("r", 0, "a", key="t-1")
    script.poll("r", 0, "b")
    assert script.found() == {}


def test_finds_aborted_read() -> None:
    script = Script()
    script.send("p", "a", None, kind="fail")
    script.poll("r", 0, "a")
    assert script.found() == {"aborted-read": 1}


def test_finds_unexpected_value() -> None:
    script = Script()
    script.poll("r", 0, "nobody-sent-this")
    assert script.found() == {"unexpected": 1}


def test_finds_value_in_a_partition_that_it_was_not_sent_to() -> None:
    script = Script()
    script.send("p", "a", 0)
    script.poll("r", 0, "a", key="t-1")
    assert script.found() == {"unexpected": 1}


def test_info_send_that_happened_is_in_order() -> None:
    script = Script()
    script.send("p", "a", None, kind="info")
    script.send("q", "b", 1)
    script.poll("r", 0, "a b")
    result = script.check()
    assert result.is_clean, result
    assert result.facts["sends_proven"] == 1


def test_info_send_that_did_not_happen_is_in_order() -> None:
    script = Script()
    script.send("p", "a", None, kind="info")
    script.send("q", "b", 0)
    script.poll("r", 0, "b")
    script.note("r", "drain", 1)
    assert script.found() == {}


def test_call_of_a_crashed_process_is_unknown() -> None:
    script = Script()
    script.begin("p", "send", value=["a"])
    script.note("p", "crash", key=None)
    script.send("p", "b", 0)
    script.poll("r", 0, "b a")
    assert script.found() == {}


def test_finds_torn_batch() -> None:
    script = Script()
    script.send("p", "a b", None, kind="info")
    script.send("q", "c", 1)
    script.poll("r", 0, "a c")
    assert script.found() == {"torn-batch": 1}


def test_finds_lost_write_at_beginning_middle_and_end_of_a_producer() -> None:
    script = Script()
    for offset, value in enumerate(["a", "b", "c", "d", "e"]):
        script.send("p", value, offset)
    script.send("q", "f", 5)
    script.poll("r", 1, "b")
    script.note("r", "assign", 3)
    script.poll("r", 3, "d")
    script.note("r", "assign", 5)
    script.poll("r", 5, "f")
    result = script.check()
    assert dict(result.counts) == {"lost-write": 3}
    assert [(one.evidence["value"], one.evidence["part"]) for one in result.anomalies] == [
        ("a", "prefix"),
        ("c", "middle"),
        ("e", "suffix"),
    ]


def test_finds_loss_in_a_batch_that_was_seen_in_part() -> None:
    script = Script()
    script.send("p", "a b", None, kind="info")
    script.send("q", "c", 2)
    script.poll("r", 0, "a")
    script.note("r", "assign", 2)
    script.poll("r", 2, "c")
    assert script.found() == {"lost-write": 1}


def test_what_nobody_read_yet_is_not_lost_before_a_drain() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.poll("r", 0, "a")
    assert script.found() == {}


def test_finds_unseen_after_a_drain() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.poll("r", 0, "a")
    script.note("r", "drain", 1)
    assert script.found() == {"unseen": 1}


def test_what_was_sent_after_the_drain_is_not_unseen() -> None:
    script = Script()
    script.send("p", "a", 0)
    script.poll("r", 0, "a")
    script.note("r", "drain", 1)
    script.send("p", "b", 1)
    assert script.found() == {}


def test_trimmed_records_are_not_lost() -> None:
    script = Script()
    script.send("p", "a b c", 0)
    script.note("r", "trim", 2)
    script.note("r", "assign", 0)
    script.poll("r", 2, "c")
    script.note("r", "drain", 3)
    assert script.found() == {}


def test_finds_what_vanished_from_the_end() -> None:
    script = Script()
    script.send("p", "a b", None, kind="info")
    script.poll("r", 0, "a b")
    script.note("s", "assign", 0)
    script.poll("s", 0, "a")
    script.note("s", "drain", 1)
    assert script.found() == {"vanished": 1}


def test_finds_hole() -> None:
    script = Script()
    script.send("p", "a", 0)
    script.send("p", "b", 2)
    script.poll("r", 0, "a")
    script.poll("r", 2, "b")
    script.note("r", "drain", 3)
    assert script.found() == {"hole": 1}


def test_finds_poll_skip_between_polls_and_within_one() -> None:
    script = Script()
    script.send("p", "a b c", 0)
    script.poll("r", 0, "a")
    script.poll("r", 2, "c")
    script.call("s", "poll", None, [[0, "a"], [2, "c"]])
    script.poll("t", 0, "a b c")
    assert script.found() == {"poll-skip": 2}


def test_finds_skip_of_the_record_that_a_process_was_assigned_to() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.poll("s", 0, "a b")
    script.note("r", "assign", 0)
    script.poll("r", 1, "b")
    assert script.found() == {"poll-skip": 1}


def test_finds_nonmonotonic_poll() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.poll("r", 0, "a b")
    script.poll("r", 1, "b")
    assert script.found() == {"nonmonotonic-poll": 1}


def test_assignment_and_crash_let_a_process_read_again() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.poll("r", 0, "a b")
    script.note("r", "assign", None)
    script.poll("r", 1, "b")
    script.note("r", "crash", key=None)
    script.poll("r", 0, "a b")
    script.note("r", "assign", None, key=None)
    script.poll("r", 0, "a b")
    assert script.found() == {}


def test_finds_nonmonotonic_send() -> None:
    script = Script()
    script.send("p", "b", 1)
    script.send("p", "a", 0)
    found = script.found()
    assert found == {"nonmonotonic-send": 1, "real-time-violation": 1}


def test_finds_real_time_violation_between_processes() -> None:
    script = Script()
    script.send("p", "b", 1)
    script.send("q", "a", 0)
    assert script.found() == {"real-time-violation": 1}


def test_finds_unknown_send_that_landed_before_what_was_read_earlier() -> None:
    script = Script()
    script.begin("p", "send", value=["b"])
    script.poll("r", 1, "b")
    script.send("q", "a", None, kind="info")
    script.note("r", "assign", 0)
    script.poll("r", 0, "a")
    assert script.found() == {"real-time-violation": 1}


def test_overlapping_sends_may_land_in_any_order() -> None:
    script = Script()
    script.begin("p", "send", value=["a"])
    script.begin("q", "send", value=["b"])
    script.end("p", "send", value=1)
    script.end("q", "send", value=0)
    assert script.found() == {}


def test_finds_end_below_what_was_acknowledged() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.call("e", "list_offsets", None, 1)
    assert script.found() == {"stale-end": 1}


def test_finds_end_that_went_back() -> None:
    script = Script()
    script.call("e", "list_offsets", None, 2)
    script.call("f", "list_offsets", None, 1)
    assert script.found() == {"stale-end": 1}


def test_end_asked_for_during_a_send_may_be_before_or_after_it() -> None:
    script = Script()
    script.begin("p", "send", value=["a"])
    script.begin("e", "list_offsets")
    script.call("f", "list_offsets", None, 0)
    script.end("p", "send", value=0)
    script.end("e", "list_offsets", value=0)
    assert script.found() == {}


def test_finds_replica_that_has_another_record() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.send("q", "x", None, kind="info")
    script.replica("n1", 0, "a b")
    script.replica("n2", 0, "a x")
    assert "replica-difference" in script.found()


def test_finds_replica_without_a_record_that_was_read() -> None:
    script = Script()
    script.send("p", "a b", 0)
    script.poll("r", 0, "a b")
    script.replica("n1", 0, "a")
    script.replica("n2", 0, "a")
    assert script.found() == {"replica-difference": 2}


def test_replica_may_have_been_trimmed() -> None:
    script = Script()
    script.send("p", "a b c", 0)
    script.replica("n1", 0, "a")
    script.replica("n1", 1, "b c")
    script.replica("n2", 1, "b c")
    assert script.found() == {}
