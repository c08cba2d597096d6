"""What the history checker says of work queues."""

from __future__ import annotations

from typing import Any

import pytest
from history_script import Script

LONG_NS = 10**12


class QueueScript(Script):
    """Workers of one queue, in a partition with the records a, b and c."""

    def __init__(self) -> None:
        super().__init__()
        self.send("p", "a b c", 0)

    def receive(self, worker: str, offset: int, grant: int, attempt: int = 1, **facts: Any) -> None:
        """Deliver one record; its lease lasts for long unless `lease_ns` is given."""
        sent_ns = 1000 * len(self.events)
        until_ns = sent_ns + facts.get("lease_ns", 0)
        row = ["t-0", offset, "abc"[offset], attempt, grant, sent_ns, until_ns, facts.get("key"), facts.get("at_ns")]
        self.call(worker, "receive", {"group": "g", "max": 1}, [row], key=None)

    def settle(self, worker: str, kind: str, offset: int, grant: int, *, ms: int = 0, how: str = "ok") -> None:
        """Settle one record; `how` is an outcome, or "stale"."""
        argument = {"group": "g", "kind": kind, "records": [[offset, grant]], "ms": ms}
        answer = [[offset, grant]] if how == "stale" else []
        self.call(worker, "settle", argument, answer, kind="ok" if how == "stale" else how)

    def finish(self, *letters: list[Any], acks: str = "", order: str = "offset") -> dict[str, int]:
        """Acknowledge further records and judge, with a maximum of two attempts."""
        for number, offset in enumerate(map(int, acks), 100):
            self.receive("w9", offset, number)
            self.settle("w9", "ack", offset, number)
        note = {"group": "g", "keys": ["t-0"], "max_attempts": 2, "order": order, "clock_error_ms": 0}
        self.note("end", "queue", note, key=None)
        self.note("end", "dead", {"group": "g", "letters": list(letters)}, key=None)
        return self.found()


def test_queue_that_keeps_its_promises_is_in_order() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.settle("w1", "return", 0, 1)
    script.receive("w2", 0, 2, 2)
    script.settle("w1", "ack", 0, 1, how="stale")
    script.settle("w2", "ack", 0, 2)
    script.settle("w1", "ack", 0, 1)  # it is settled: once more changes nothing
    script.receive("w1", 1, 3)
    script.settle("w1", "reject", 1, 3)
    script.receive("w1", 2, 4)
    script.receive("w1", 2, 5, 2)
    assert script.finish(["t-0", 1, "b", 1, "no"], ["t-0", 2, "c", 2, "max_attempts"]) == {}
    assert script.check().facts["deliveries"] == 5


@pytest.mark.parametrize(("refused", "found"), [(1, {}), (2, {"unsettled": 1})])
def test_receipts_of_one_record_in_one_call_are_told_apart(refused: int, found: dict[str, int]) -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.receive("w1", 0, 2, 2)
    argument = {"group": "g", "kind": "ack", "records": [[0, 1], [0, 2]], "ms": 0}
    script.call("w1", "settle", argument, [[0, grant] for grant in range(1, refused + 1)])
    assert script.finish(acks="12") == found


@pytest.mark.parametrize("how", ["ok", "info"])
def test_finds_record_that_nobody_acknowledged(how: str) -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.settle("w1", "ack", 0, 1, how=how)
    assert script.finish(acks="1") == {"unsettled": 1}


def test_finds_acknowledgement_that_was_not_done() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.settle("w1", "ack", 0, 1, how="fail")
    assert script.finish(acks="12") == {"unsettled": 1}


def test_finds_acknowledged_record_that_is_delivered_again() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.settle("w1", "ack", 0, 1)
    script.receive("w2", 0, 2, 2)
    assert script.finish(acks="12") == {"acknowledged-again": 1}


def test_finds_record_of_two_workers_under_one_grant() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.receive("w2", 0, 1)
    script.settle("w1", "ack", 0, 1)
    assert script.finish(acks="12") == {"doubled-grant": 1}


def test_finds_record_that_is_delivered_again_while_its_lease_lasts() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1, lease_ns=LONG_NS)
    script.receive("w2", 0, 2, 2)
    script.settle("w2", "ack", 0, 2)
    assert script.finish(acks="12") == {"lease-overlap": 1}


def test_finds_receipt_that_is_refused_while_the_lease_lasts() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1, lease_ns=LONG_NS)
    script.settle("w1", "ack", 0, 1, how="stale")
    assert script.finish(acks="12") == {"lease-refused": 1, "unsettled": 1}


@pytest.mark.parametrize("kind", ["ack", "return", "extend", "release", "reject"])
def test_finds_receipt_of_a_zombie_that_is_accepted(kind: str) -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.receive("w2", 0, 2, 2)
    script.settle("w1", kind, 0, 1)
    script.settle("w2", "ack", 0, 2, how="info")
    assert script.finish(acks="12") == {"zombie-settled": 1}


def test_finds_attempts_beyond_the_maximum_and_attempts_that_do_not_count() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.receive("w1", 0, 2, 1)
    script.receive("w1", 0, 3, 3)
    script.settle("w1", "ack", 0, 3)
    assert script.finish(acks="12") == {"attempt-uncounted": 1, "attempts-exceeded": 1}


def test_released_record_keeps_its_attempt() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1)
    script.settle("w1", "release", 0, 1)
    script.receive("w1", 0, 2, 1)
    script.settle("w1", "ack", 0, 2)
    assert script.finish(acks="12") == {}


def test_finds_delays_that_are_short() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1, at_ns=LONG_NS)
    script.settle("w1", "ack", 0, 1)
    script.receive("w1", 1, 2)
    script.settle("w1", "return", 1, 2, ms=1_000)
    script.receive("w1", 1, 3, 2)
    script.settle("w1", "ack", 1, 3)
    assert script.finish(acks="2") == {"short-delay": 2}


def test_finds_two_records_of_a_key_under_way() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1, key="k")
    script.receive("w2", 1, 2, key="k")
    script.receive("w3", 2, 3, key="other")
    for offset in range(3):
        script.settle("w1", "ack", offset, offset + 1)
    assert script.finish(order="key") == {"key-order": 1}


def test_finds_dead_letters_that_should_not_be_there() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1, lease_ns=LONG_NS)
    script.settle("w1", "ack", 0, 1)
    letters = (["t-0", 0, "a", 2, "max_attempts"], ["t-0", 1, "x", 1, "max_attempts"], ["t-0", 2, "c", 1, "no"])
    assert script.finish(*letters) == {"acknowledged-dead": 1, "dead-wrong": 1, "dead-early": 1, "dead-unasked": 1}


def test_finds_dead_letters_that_are_missing_or_doubled() -> None:
    script = QueueScript()
    script.receive("w1", 0, 1, lease_ns=LONG_NS)
    script.settle("w1", "reject", 0, 1)
    letter = ["t-0", 1, "b", 2, "max_attempts"]
    assert script.finish(letter, letter, acks="2") == {"rejected-alive": 1, "unsettled": 1, "dead-twice": 1}
