"""Commands on quotas, and the limits on what a user owns."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_commands import commands
from metadata_world import NOW_MS, create_topic, do, formed_state, register_consumer, register_producer

from quiver.metadata import quotas
from quiver.metadata.apply import apply
from quiver.metadata.commands import (
    AddPartitionsCommand,
    AnyCommand,
    ChangeMemberCommand,
    CreateRoleCommand,
    CreateUserCommand,
    DeleteRoleCommand,
    DeleteTopicCommand,
    DeleteUserCommand,
    ForgetClientCommand,
    PlaceHoldCommand,
    PurgeTopic,
    RegisterConsumerResult,
    RemoveQuotaCommand,
    SetQuotaCommand,
)
from quiver.metadata.rows import EntityKind, HoldPosition, Table, TopicRow
from quiver.metadata.state import MetadataState
from quiver.model import NodeId, PartitionId, TopicId
from quiver.security.limits import QuotaLimits

ALICE = "user:alice"


@pytest.fixture
def state() -> MetadataState:
    found = formed_state(feature_level=2)
    do(found, CreateUserCommand(now_ms=NOW_MS, user="alice"))
    do(found, CreateRoleCommand(now_ms=NOW_MS, role="ops"))
    do(found, ChangeMemberCommand(now_ms=NOW_MS, role="ops", user="alice", is_member=True))
    return found


def refusal_of(state: MetadataState, command: AnyCommand) -> tuple[str, str]:
    before = state.view().digest()
    outcome = apply(state, command)
    assert outcome.refusal is not None
    assert state.view().digest() == before
    assert outcome.refusal.message.startswith("not done: ")
    return outcome.refusal.code, outcome.refusal.message


def set_quota(state: MetadataState, subject: str, **limits: int) -> None:
    do(state, SetQuotaCommand(now_ms=NOW_MS, subject=subject, limits=QuotaLimits(**limits)))


# -- rows --------------------------------------------------------------------------------------------


def test_set_changes_only_what_is_given(state: MetadataState) -> None:
    set_quota(state, ALICE, topics_max=2, requests_per_second=10)
    set_quota(state, ALICE, topics_max=0)
    assert state.view().quotas[ALICE].limits == QuotaLimits(topics_max=0, requests_per_second=10)
    do(state, RemoveQuotaCommand(now_ms=NOW_MS, subject=ALICE))
    assert not state.view().quotas
    assert refusal_of(state, RemoveQuotaCommand(now_ms=NOW_MS, subject=ALICE))[0] == "unknown_quota"


@pytest.mark.parametrize(
    ("subject", "limits", "code"),
    [
        ("user:bob", {"topics_max": 1}, "unknown_user"),
        ("role:dev", {"topics_max": 1}, "unknown_role"),
        ("node:1", {"topics_max": 1}, "bad_quota"),
        ("topic:", {"requests_per_second": 1}, "bad_quota"),
        ("topic:logs/..", {"requests_per_second": 1}, "bad_quota"),
        ("topic:logs", {"topics_max": 1}, "bad_quota"),
        ("anonymous", {"topics_max": 1}, "bad_quota"),
        ("default", {}, "bad_quota"),
    ],
)
def test_quota_of_the_wrong_kind_is_refused(
    state: MetadataState, subject: str, limits: dict[str, int], code: str
) -> None:
    command = SetQuotaCommand(now_ms=NOW_MS, subject=subject, limits=QuotaLimits(**limits))
    assert refusal_of(state, command)[0] == code


def test_quotas_are_bounded(state: MetadataState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "QUOTAS_MAX", 1)
    set_quota(state, "default", topics_max=1)
    set_quota(state, "default", topics_max=2)
    command = SetQuotaCommand(now_ms=NOW_MS, subject=ALICE, limits=QuotaLimits(topics_max=1))
    assert refusal_of(state, command)[0] == "too_many_quotas"


def test_quotas_go_with_their_user_and_role(state: MetadataState) -> None:
    for subject in (ALICE, "role:ops", "default"):
        set_quota(state, subject, topics_max=1)
    do(state, DeleteUserCommand(now_ms=NOW_MS, user="alice"))
    do(state, DeleteRoleCommand(now_ms=NOW_MS, role="ops"))
    assert list(state.view().quotas) == ["default"]


def test_quotas_need_the_feature_level() -> None:
    state = formed_state()
    command = SetQuotaCommand(now_ms=NOW_MS, subject="default", limits=QuotaLimits(topics_max=1))
    assert refusal_of(state, command)[0] == "feature_level"


# -- what a user owns --------------------------------------------------------------------------------


def test_topics_are_counted_until_they_are_purged(state: MetadataState) -> None:
    set_quota(state, ALICE, topics_max=1)
    do(state, create_topic("a", [1], principal=ALICE))
    do(state, create_topic("b", [1]))  # nobody's
    code, message = refusal_of(state, create_topic("c", [1], principal=ALICE))
    assert code == "quota_topics"
    assert "topics_max is 1 (set for user:alice)" in message
    assert "administrator" in message
    do(state, DeleteTopicCommand(now_ms=NOW_MS, principal=ALICE, topic="a", purge_ms=NOW_MS))
    assert refusal_of(state, create_topic("c", [1], principal=ALICE))[0] == "quota_topics"
    owned = next(one for one in state.view().topics.values() if one.owner == ALICE)
    do(state, PurgeTopic(now_ms=NOW_MS, topic_id=owned.topic_id))
    do(state, create_topic("c", [1], principal=ALICE))


def test_partitions_count_for_the_owner_of_their_topic(state: MetadataState) -> None:
    set_quota(state, ALICE, partitions_max=3)
    assert refusal_of(state, create_topic("a", [1], [1], [1], [1], principal=ALICE))[0] == "quota_partitions"
    do(state, create_topic("a", [1], [1], principal=ALICE))
    grow = AddPartitionsCommand(
        now_ms=NOW_MS, principal="user:root", topic="a", partitions=4, assignments=((NodeId(1),), (NodeId(1),))
    )
    assert refusal_of(state, grow)[0] == "quota_partitions"
    set_quota(state, ALICE, partitions_max=4)
    do(state, grow)
    assert refusal_of(state, create_topic("b", [1], principal=ALICE))[0] == "quota_partitions"


def test_registrations_are_producers_and_consumers(state: MetadataState) -> None:
    set_quota(state, "role:ops", registrations_max=2)
    do(state, register_producer(name="p", principal=ALICE))
    made = do(state, register_consumer(principal=ALICE))
    code, message = refusal_of(state, register_producer(principal=ALICE))
    assert code == "quota_registrations"
    assert "(set for role:ops)" in message
    do(state, register_producer(name="p", principal=ALICE))  # again: nothing new
    do(state, register_producer(name="q"))
    assert refusal_of(state, register_producer(name="q", principal=ALICE))[0] == "quota_registrations"
    assert isinstance(made, RegisterConsumerResult)
    do(state, ForgetClientCommand(now_ms=NOW_MS, kind=EntityKind.CONSUMER, id=made.consumer_id))
    do(state, register_producer(name="q", principal=ALICE))


def test_holds_count_as_registrations(state: MetadataState) -> None:
    set_quota(state, ALICE, registrations_max=2)
    hold = PlaceHoldCommand(
        now_ms=NOW_MS,
        principal=ALICE,
        topic_id=TopicId(1),
        name="q",
        positions=(HoldPosition(partition_id=PartitionId(0), first_offset=0),),
        lasting_ms=1_000,
    )
    do(state, hold)
    do(state, register_consumer(principal=ALICE))
    assert refusal_of(state, register_producer(principal=ALICE))[0] == "quota_registrations"
    assert refusal_of(state, msgspec.structs.replace(hold, name="r"))[0] == "quota_registrations"
    do(state, hold)  # renewed


def test_own_limit_is_before_the_roles_and_they_before_the_default(state: MetadataState) -> None:
    set_quota(state, "default", topics_max=1)
    do(state, create_topic("a", [1], principal=ALICE))
    assert refusal_of(state, create_topic("b", [1], principal=ALICE))[0] == "quota_topics"
    set_quota(state, "role:ops", topics_max=2)
    do(state, create_topic("b", [1], principal=ALICE))
    set_quota(state, ALICE, topics_max=1)
    assert refusal_of(state, create_topic("c", [1], principal=ALICE))[0] == "quota_topics"
    set_quota(state, ALICE, topics_max=0)
    do(state, create_topic("c", [1], principal=ALICE))


def test_repeated_request_finds_its_topic_at_the_limit(state: MetadataState) -> None:
    set_quota(state, ALICE, topics_max=1)
    made = do(state, create_topic("a", [1], principal=ALICE, request_id="r"))
    assert do(state, create_topic("a", [1], principal=ALICE, request_id="r")) == made


@settings(max_examples=60, deadline=None)
@given(st.lists(commands(), max_size=40))
def test_owned_is_what_the_rows_say(found: list[AnyCommand]) -> None:
    state = formed_state(feature_level=2)
    for command in found:
        assert not apply(state, command).is_defect
    view, expected = state.view(), dict[tuple[Table, str], int]()
    for table in (view.topics, view.producers, view.consumers):
        for row in table.values():
            counts = {row.table: 1} | ({Table.PARTITIONS: row.partitions} if isinstance(row, TopicRow) else {})
            for kind, count in counts.items() if row.owner else ():
                expected[kind, row.owner] = expected.get((kind, row.owner), 0) + count
    assert state.owned == expected
    assert MetadataState.decode(view.encode()).owned == expected
