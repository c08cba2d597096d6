"""Whatever is in the metadata log, every node stays alive and all of them stay equal, in memory and in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_commands import LEVEL, commands
from metadata_world import entry, init_cluster, log

from quiver.errors import StorageError, UnknownVersionError
from quiver.metadata import Database, open_database
from quiver.metadata import brokers as brokers_module
from quiver.metadata.commands import CONTROL_STATE, RegisterBroker, encode_command, encode_payload
from quiver.metadata.database import Transaction
from quiver.metadata.state import Change, Counters, LogPosition, MetadataState, View
from quiver.metadata.state_machine import MetadataStateMachine
from quiver.model import NodeId
from quiver.record import Batch, build_batch, build_control_batch

ODD: tuple[Any, ...] = (
    *(-1, 0, 2**53, 2**53 + 1, 2**63, 2**64 - 1, 1.5, True, None, "", "x" * 400, "a\x00b", "nonsense", b"bytes"),
    *([], {}, [[]], [None], [[1, 1]], [-1], {"type": "x"}, "\u202e", "[::1]", "host:99999999"),
)
"""Values that a field does not expect, or not often."""


class SqlListener:
    """What the database writer does, without waiting."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._stored = LogPosition()

    def add(self, changes: Sequence[Change], counters: Counters, position: LogPosition) -> None:
        newest = {(change.table, change.key): change.row for change in changes}
        self._write(Transaction(before=self._stored, after=position, counters=counters, changes=newest, base=None))

    def replace(self, view: View) -> None:
        self._write(
            Transaction(before=self._stored, after=view.position, counters=view.counters, changes={}, base=view)
        )

    def _write(self, transaction: Transaction) -> None:
        self.database.write(transaction)
        self._stored = transaction.after


class SimulatedMember:
    """One node's state machine and database."""

    def __init__(self) -> None:
        self.failures: list[StorageError] = []
        self.database = open_database("sqlite://")
        self.database.prepare()
        self.machine = MetadataStateMachine(MetadataState(), on_failure=self.failures.append)
        self.machine.add_listener(SqlListener(self.database))

    def check(self, digest: str) -> None:
        """Demand that this member is alive and knows the same as all others, its database too."""
        assert self.failures == []
        assert self.machine.state.view().digest() == digest
        assert self.database.load().view().digest() == digest
        self.database.close()


@st.composite
def malformed(draw: st.DrawFn) -> bytes:
    """Return the batch of a command in which one field has a value that it must not have."""
    payload = encode_payload(draw(commands()))
    fields = msgspec.msgpack.decode(payload[1:])
    name = draw(st.sampled_from(sorted(fields)))
    if draw(st.booleans()) and name != "type":
        del fields[name]
    else:
        fields[name] = draw(st.sampled_from(ODD)) if name != "type" else ""
    return build_control_batch(bytes((CONTROL_STATE, payload[0])) + msgspec.msgpack.encode(fields), timestamp=1)


GARBAGE = st.binary(max_size=20).map(lambda data: build_control_batch(bytes((CONTROL_STATE, 1)) + data, timestamp=1))
BATCHES = st.one_of(
    commands().map(encode_command),
    malformed(),
    GARBAGE,
    st.just(build_batch([b"a record"], timestamp=1)),
    st.just(build_control_batch(bytes((CONTROL_STATE,)), timestamp=1)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(BATCHES, max_size=20), st.data())
def test_any_sequence_of_commands_leaves_every_node_alive_and_equal(found: list[bytes], data: st.DataObject) -> None:
    formed = init_cluster(feature_level=data.draw(LEVEL))
    batches = [*log(formed), *(entry(item, number) for number, item in enumerate(found, start=2))]
    cut = data.draw(st.integers(0, len(batches)))
    together, singly, restored = SimulatedMember(), SimulatedMember(), SimulatedMember()
    stops = [_feed(together, [batches]), _feed(singly, [[batch] for batch in batches])]
    reached = together.machine.state.position.index
    before = min(cut, reached)
    if before:
        source = SimulatedMember()
        _feed(source, [batches[:before]])
        restored.machine.restore(source.machine.snapshot())
        source.database.close()
    stops.append(_feed(restored, [batches]) if before < len(batches) else stops[0])
    assert len(set(stops)) == 1, "all of them stop at the same entry, or none does"
    digest = together.machine.state.view().digest()
    for member in (together, singly, restored):
        assert member.machine.state.position.index == reached
        member.check(digest)


def _feed(member: SimulatedMember, calls: Sequence[Sequence[Batch]]) -> bool:
    """Apply batches as the driver does; return whether an entry of a newer program stopped it."""
    for batches in calls:
        try:
            member.machine.apply(batches)
        except UnknownVersionError:
            return True
    return False


@pytest.mark.parametrize("address", ["[::1]", "host", "host:0x", "host:99999999", "[::1]:", ":1", "host:1:2"])
def test_row_with_a_bad_address_is_refused_by_every_member(address: str) -> None:
    command = RegisterBroker(now_ms=1, broker_id=NodeId(3), identity="i", wire_address=address)
    member = SimulatedMember()
    member.machine.keeps_outcomes = True
    member.machine.apply([*log(init_cluster()), entry(encode_command(command), 2)])
    outcome = member.machine.pop_outcome(2)  # type: ignore[arg-type] # an index
    assert outcome is not None
    assert outcome.refusal is not None
    assert outcome.refusal.code == "bad_broker"
    member.check(member.machine.state.view().digest())


def test_command_that_makes_the_program_fail_is_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(brokers_module, "register", fail)
    command = RegisterBroker(now_ms=1, broker_id=NodeId(3), identity="i", wire_address="host:1")
    member = SimulatedMember()
    member.machine.keeps_outcomes = True
    member.machine.apply([*log(init_cluster()), entry(encode_command(command), 2)])
    outcome = member.machine.pop_outcome(2)  # type: ignore[arg-type] # an index
    assert outcome is not None
    assert outcome.refusal is not None
    assert (outcome.refusal.code, member.machine.bad_commands, member.machine.defects) == ("bad_command", 1, 1)
    member.check(member.machine.state.view().digest())
