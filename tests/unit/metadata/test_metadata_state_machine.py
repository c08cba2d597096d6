"""The state machine by itself: each entry once, and a stop rather than a guess."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from metadata_world import create_topic, entry, formed_state, init_cluster, log, register_broker, register_consumer

from quiver.errors import InvariantBroken, StorageError, UnknownVersionError
from quiver.features import LEVEL_MAX, LEVEL_MIN
from quiver.metadata import state_machine as machine_module
from quiver.metadata.commands import CONTROL_STATE, AnyCommand, NodeLevel, RaiseLevel
from quiver.metadata.state import Change, Counters, LogPosition, MetadataState, View
from quiver.metadata.state_machine import MetadataStateMachine
from quiver.model import Index, NodeId, Term
from quiver.record import build_batch, build_control_batch
from quiver.replication import SLICE_ROWS

BEGINNING: list[AnyCommand] = [init_cluster(), *map(register_broker, (1, 2, 3)), create_topic()]


class Listener:
    """A follower that remembers what it was told."""

    def __init__(self) -> None:
        self.added: list[tuple[int, LogPosition]] = []
        self.replaced: list[View] = []

    def add(self, changes: Sequence[Change], counters: Counters, position: LogPosition) -> None:
        self.added.append((len(changes), position))

    def replace(self, view: View) -> None:
        self.replaced.append(view)


def made(state: MetadataState | None = None) -> tuple[MetadataStateMachine, Listener, list[StorageError]]:
    failures: list[StorageError] = []
    machine, listener = MetadataStateMachine(state or MetadataState(), on_failure=failures.append), Listener()
    machine.add_listener(listener)
    return machine, listener, failures


def test_followers_are_told_once_for_all_batches_of_a_call() -> None:
    machine, listener, _ = made()
    machine.apply(log(*BEGINNING))
    machine.apply([entry(build_control_batch(b"\x01", timestamp=1), 6, term=2)])
    assert listener.added == [(9, LogPosition(Index(5), Term(1))), (0, LogPosition(Index(6), Term(2)))]
    assert machine.applied_commands == 5


def test_what_the_database_has_is_skipped() -> None:
    source, _, _ = made()
    source.apply(log(*BEGINNING[:3]))
    machine, listener, _ = made(MetadataState.decode(source.snapshot()))
    machine.restore(b"")
    machine.apply(log(*BEGINNING[:2]))
    assert listener.added == []
    machine.apply(log(*BEGINNING[2:], first_index=3))
    assert (machine.skipped_entries, machine.applied_commands) == (3, 2)
    source.apply(log(*BEGINNING[3:], first_index=4))
    assert machine.snapshot() == source.snapshot()


def test_snapshot_is_restored_in_small_steps_while_entries_are_applied() -> None:
    source, _, _ = made()
    source.apply(log(*BEGINNING, *[register_consumer() for _ in range(3 * SLICE_ROWS)]))
    data = source.snapshot()
    machine, listener, _ = made()
    steps = machine.restore_steps(data)
    for number, _ in enumerate(steps):
        assert len(machine.state.view().consumers) == 0, "nothing changes before the restore itself"
        machine.apply(log(*BEGINNING[number : number + 1], first_index=number + 1))
    assert number > 6
    machine.restore(data)
    assert [view.index for view in listener.replaced] == [source.applied_index]
    assert machine.snapshot() == data
    for damaged in (b"\x01", data[:-1], data[:-3] + b"\xc1\xc1\xc1", data[:1] + b"\x80"):
        with pytest.raises(UnknownVersionError):
            list(machine.restore_steps(damaged))
        with pytest.raises(UnknownVersionError):
            machine.restore(damaged)
    assert machine.snapshot() == data


def test_newer_snapshot_replaces_and_older_one_does_not() -> None:
    source, _, _ = made()
    source.apply(log(*BEGINNING))
    newest = source.snapshot()
    machine, listener, _ = made()
    machine.restore(newest)
    assert [view.index for view in listener.replaced] == [5]
    machine.apply(log(register_consumer(), first_index=6))
    machine.restore(newest)
    assert len(listener.replaced) == 1
    assert list(machine.state.view().consumers) == [1]
    assert list(listener.replaced[0].consumers) == []


def test_gap_in_the_log_ends_the_process() -> None:
    machine, _, _ = made()
    with pytest.raises(InvariantBroken):
        machine.apply(log(init_cluster(), first_index=2))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (build_control_batch(bytes((CONTROL_STATE, 7)), timestamp=1), "version 7"),
        (build_control_batch(bytes((CONTROL_STATE, 1)) + msgspec.msgpack.encode({"type": "x"}), timestamp=1), "'x'"),
    ],
)
def test_entry_of_a_newer_program_stops_the_machine_before_it(data: bytes, says: str) -> None:
    machine, listener, failures = made()
    with pytest.raises(UnknownVersionError, match=f"(?s)index 6.*{says}"):
        machine.apply([*log(*BEGINNING), entry(data, 6), *log(register_consumer(), first_index=7)])
    assert listener.added[-1][1].index == machine.applied_index == 5
    assert (failures, machine.applied_commands) == ([], 5)
    assert MetadataState.decode(machine.snapshot()).position.index == 5


def test_level_that_this_program_does_not_know_stops_the_machine_before_it() -> None:
    machine, listener, failures = made()
    level = LEVEL_MAX + 1
    low = RaiseLevel(now_ms=1, feature_level=level, nodes=())  # refused, so that it raises nothing
    known = RaiseLevel(now_ms=1, feature_level=level, nodes=tuple(NodeLevel(NodeId(node), level) for node in (1, 2, 3)))
    with pytest.raises(UnknownVersionError, match=f"(?s)index 7.*feature level {level}"):
        machine.apply(log(*BEGINNING, low, known, register_consumer()))
    assert listener.added[-1][1].index == machine.applied_index == 6
    assert (failures, machine.failure, machine.state.counters.feature_level) == ([], None, LEVEL_MIN)
    newer = MetadataStateMachine(MetadataState.decode(machine.snapshot()), on_failure=failures.append, level_max=level)
    newer.apply(log(known, register_consumer(), first_index=7))
    assert (newer.applied_index, newer.state.counters.feature_level) == (8, level)


def test_malformed_entry_is_refused_and_the_next_one_applied() -> None:
    machine, listener, failures = made()
    bad = entry(build_batch([b"value"], timestamp=1), 6)
    machine.apply([*log(*BEGINNING), bad, *log(register_consumer(), first_index=7)])
    assert listener.added[-1][1].index == machine.applied_index == 7
    assert (failures, machine.bad_commands, machine.defects, machine.applied_commands) == ([], 1, 0, 6)


def test_snapshot_that_cannot_be_read_changes_nothing() -> None:
    machine, listener, failures = made()
    for snapshot in (b"\x09", b"\x01garbage"):
        with pytest.raises(UnknownVersionError):
            machine.restore(snapshot)
    assert (machine.failure, failures, listener.replaced) == (None, [], [])


def test_snapshot_of_another_cluster_stops_the_machine() -> None:
    other = formed_state()
    other.apply_changes((), msgspec.structs.replace(other.counters, cluster_id="other"))
    machine, _, failures = made(formed_state())
    machine.restore(other.view().encode())
    assert "cluster c1" in failures[0].message
    assert "cluster other" in failures[0].message


def test_outcomes_are_kept_while_somebody_waits_and_only_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "OUTCOMES_MAX", 2)
    machine, _, _ = made()
    machine.apply(log(init_cluster()))
    assert machine.pop_outcome(Index(1)) is None
    machine.keeps_outcomes = True
    machine.apply(log(*BEGINNING[1:4], first_index=2))
    assert machine.pop_outcome(Index(2)) is None
    outcome = machine.pop_outcome(Index(3))
    assert outcome is not None
    assert outcome.refusal is None
    assert machine.pop_outcome(Index(3)) is None
    machine.forget_outcomes()
    assert machine.pop_outcome(Index(4)) is None
