"""The decision about every request: rules exist for all of them, and say what the table in the docs says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import pytest

from quiver.access import RULES, AccessControl, AuditLog, Authenticator
from quiver.access.audit import QUEUE_MAX, AuditedOperation, AuditEvent
from quiver.access.authentication import FAILURES_MAX
from quiver.access.first_admin import is_missing, list_steps
from quiver.access.rules import _VERBS, AUDITED, FILTERS, describe_operation
from quiver.clock import SystemClock
from quiver.errors import ConfigError, NotAllowedError, NotFoundError, OverloadedError, QuiverError, UnavailableError
from quiver.gateway import contract, group_contract
from quiver.gateway.access import HttpAccess
from quiver.gateway.application import RoutedApplication
from quiver.gateway.contract import NodeStatusAnswer, ReplicaProblemItem
from quiver.gateway.hosts import HostNames
from quiver.gateway.http import HttpRequest, HttpResponse
from quiver.gateway.routes import ROUTES
from quiver.groups.settings import QueueSettings
from quiver.metadata.apply import apply
from quiver.metadata.commands import (
    AddGrantCommand,
    AnyCommand,
    ChangeMemberCommand,
    ChangeUserCommand,
    CreateRoleCommand,
    CreateTokenCommand,
    CreateTopicCommand,
    CreateUserCommand,
    DeleteUserCommand,
    InitCluster,
    RegisterBroker,
    RegisterConsumerCommand,
    RegisterProducerCommand,
    RevokeTokenCommand,
    TopicSelection,
)
from quiver.metadata.state import MetadataState
from quiver.model import ConsumerId, GroupId, Index, NodeId, Offset, PartitionId, ProducerId, TopicId
from quiver.record import build_batch
from quiver.security import ANONYMOUS, node_principal, user_principal
from quiver.security.admin_file import parse_admin
from quiver.security.identity import ConnectionIdentity, certificate_identity
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.scram import ITERATIONS_MIN, SALT_BYTES, ScramClient, make_verifier
from quiver.security.tokens import Token, hash_secret, new_token
from quiver.wire.admin_messages import (
    ClientInfo,
    ClientsFound,
    DescribeNode,
    ListClients,
    ListManagers,
    NodeDescribed,
    ProblemInfo,
)
from quiver.wire.group_messages import (
    AssignedPartition,
    ConfigureGroup,
    DeleteGroup,
    DescribeGroups,
    GroupHeartbeat,
    GroupInfo,
    GroupMemberInfo,
    GroupRequest,
    GroupsFound,
    JoinGroup,
    LeaveGroup,
    QueueSettingsChange,
    RestartGroup,
)
from quiver.wire.messages import (
    AnyRequest,
    BeginEpoch,
    Consume,
    CreateTopicRequest,
    DeleteTopicRequest,
    DrainBroker,
    Fetch,
    ForgetClientRequest,
    GetCursors,
    GetMetadata,
    MetadataFound,
    MoveCursor,
    Produce,
    RegisterProducerRequest,
    Selection,
    SubmitCommand,
    TopicInfo,
)
from quiver.wire.queue_messages import GetQueue
from quiver.wire.requests import Request
from quiver.wire.security_messages import (
    Authenticate,
    BeginScram,
    CreateTokenRequest,
    ExplainAccess,
    FinishScram,
    ListUsers,
    ScramChallenge,
    TokenCreated,
)
from quiver.wire.serving import Answer, Caller

NOW_MS = 1_000_000
LOGS, AUDIT = TopicId(1), TopicId(2)
AT: dict[str, Any] = {"topic_id": LOGS, "partition_id": PartitionId(0)}


class World:
    """A cluster's metadata with two users, and the access control of a secure node."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.state = MetadataState()
        self.now_ms = NOW_MS
        self.audit = AuditLog(node=NodeId(1), clock=self)
        self.control = AccessControl(view=self.state.view, clock=self, is_open=is_open, audit=self.audit)
        self.authenticator = Authenticator(view=self.state.view, clock=self, audit=self.audit, is_open=is_open)
        self.do(InitCluster(now_ms=1, cluster_id="c", feature_level=2))
        self.do(RegisterBroker(now_ms=1, broker_id=NodeId(1), identity="i", wire_address="host:1"))
        for topic in ("logs.web", "quiver.audit"):
            self.do(CreateTopicCommand(now_ms=1, topic=topic, replicas=1, assignments=((NodeId(1),),)))
        for user in ("alice", "bob", "root"):
            self.do(CreateUserCommand(now_ms=1, user=user))
        self.do(ChangeMemberCommand(now_ms=1, role="admin", user="root", is_member=True))

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def do(self, command: AnyCommand) -> None:
        assert apply(self.state, command).refusal is None

    def grant(
        self, subject: str, verb: str, kind: str = "topic", name: str = "logs.", *, is_prefix: bool = True
    ) -> None:
        is_prefix = is_prefix and kind != "cluster"
        name = "" if kind == "cluster" else name
        grant = Grant(subject=subject, verb=Verb(verb), kind=ResourceKind(kind), name=name, is_prefix=is_prefix)
        self.do(AddGrantCommand(now_ms=1, grant=grant))

    def token(self, user: str, *, expires_ms: int | None = None) -> Token:
        token = new_token()
        self.do(
            CreateTokenCommand(
                now_ms=1, user=user, token_id=token.id, secret_hash=hash_secret(token.secret), expires_ms=expires_ms
            )
        )
        return token

    def check(self, user: str | ConnectionIdentity, request: Request[Any], payload: bytes = b"") -> str:
        """Return the code with which a request is refused; empty if it is allowed."""
        identity = user
        if isinstance(identity, str):
            identity = ConnectionIdentity(user_principal(identity) if identity else ANONYMOUS)
        try:
            self.control.check(identity, request, memoryview(payload))
        except QuiverError as error:
            return error.code
        return ""


@pytest.fixture
def world() -> World:
    return World()


# -- completeness ------------------------------------------------------------------------------------


def test_every_request_has_a_rule() -> None:
    assert set(RULES) == set(get_args(AnyRequest))
    assert set(FILTERS) <= set(RULES)
    assert set(AUDITED) <= set(RULES)


def test_owner_of_a_group_that_was_created_just_now_is_known_to_who_decides() -> None:
    """A node that lags behind the creator's index catches up first: without the group's row it would deny it."""
    decided = {kind for kind, rule in RULES.items() if rule is RULES[ConfigureGroup]}
    assert decided == {ConfigureGroup, DeleteGroup, RestartGroup}
    assert all(kind.waits_for_index for kind in decided)


@pytest.mark.parametrize("kind", get_args(AnyRequest), ids=lambda kind: kind.__name__)
def test_nobody_without_credentials_may_do_anything_but_authenticate(
    kind: type[Request[Any]], world: World, example: Callable[[type[Request[Any]]], Request[Any]]
) -> None:
    is_public = kind.__name__ in ("Authenticate", "BeginScram", "FinishScram")
    assert world.check("", example(kind)) == ("" if is_public else "unauthenticated")


@pytest.mark.parametrize("kind", get_args(AnyRequest), ids=lambda kind: kind.__name__)
def test_administrators_and_nodes_may_do_everything_and_so_may_all_of_an_open_cluster(
    kind: type[Request[Any]], world: World, example: Callable[[type[Request[Any]]], Request[Any]]
) -> None:
    request = example(kind)
    assert world.check("root", request) == ""
    assert world.check(ConnectionIdentity(node_principal(NodeId(1))), request) == ""
    assert World(is_open=True).check("", request) == ""


@pytest.fixture
def example() -> Callable[[type[Request[Any]]], Request[Any]]:
    given: dict[str, Any] = {
        "topic_id": 1,
        "partition_id": 0,
        "offset": 0,
        "at": "latest",
        "grant": {"subject": "user:alice", "verb": "read", "kind": "topic", "name": "x"},
        "verb": "read",
        "kind": "producer",
        "topics": [{"topic": "logs.web"}],
        "retention": {},
        "cursors": [],
        "consumer_ids": [1],
        "offsets": [],
        **dict.fromkeys(("partitions", "broker", "node", "id", "consumer_id", "producer_id", "epoch"), 1),
        **dict.fromkeys(("group", "group_id"), 1),
        "lasting_ms": 1,
        "limits": {"topics_max": 1},
        "owner": "user:bob",
    }

    def make(kind: type[Request[Any]]) -> Request[Any]:
        fields = {
            field.encode_name: given.get(field.encode_name, "x")
            for field in msgspec.structs.fields(kind)
            if field.required
        }
        if kind is ExplainAccess:
            fields["kind"] = "topic"
        if kind in get_args(GroupRequest):
            fields |= {"group": "x", "group_id": 1}
        made: Request[Any] = msgspec.convert(fields, kind)
        return made

    return make


# -- topics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "verb"),
    [
        (Fetch(**AT, offset=Offset(0)), "read"),
        (GetCursors(**AT, consumer_ids=()), "read"),
        (BeginEpoch(**AT, producer_id=ProducerId(9), epoch=0), "write"),
        (CreateTopicRequest(topic="logs.new"), "create"),
        (DeleteTopicRequest(topic="logs.web"), "delete"),
        (RegisterProducerRequest(topics=(Selection(topic="logs.web"),)), "write"),
        (DescribeNode(with_replicas=True, topic="logs.web"), "read"),
    ],
)
def test_verb_on_the_topic_is_needed(world: World, request_: Request[Any], verb: str) -> None:
    for other in set(Verb) - {verb, "admin"}:
        world.grant("user:alice", other)
    assert world.check("alice", request_) == "not_allowed"
    world.grant("user:alice", verb)
    assert world.check("alice", request_) == ""
    assert world.check("bob", request_) == "not_allowed"


def test_produce_needs_write_and_ones_own_producer(world: World) -> None:
    world.do(RegisterProducerCommand(now_ms=1, topics=(TopicSelection("logs.web"),), name="p", principal="user:alice"))
    batch = build_batch([b"x"], timestamp=1, producer_id=ProducerId(1), producer_epoch=0, base_sequence=0)
    for user in ("user:alice", "user:bob"):
        world.grant(user, "write")
    produce = Produce(**AT)
    assert world.check("alice", produce, batch) == ""
    assert world.check("bob", produce, batch) == "not_owner"
    assert world.check("bob", produce, build_batch([b"x"], timestamp=1)) == ""
    assert world.check("bob", BeginEpoch(**AT, producer_id=ProducerId(1), epoch=0)) == "not_owner"
    world.grant("user:bob", "configure", "producer", "p", is_prefix=False)
    assert world.check("bob", produce, batch) == ""


def test_cursors_are_their_owners(world: World) -> None:
    world.do(
        RegisterConsumerCommand(now_ms=1, topics=(TopicSelection("logs.web"),), request_id="c", principal="user:alice")
    )
    for user in ("user:alice", "user:bob"):
        world.grant(user, "read")
    one = ConsumerId(1)
    for request in (
        Consume(**AT, consumer_id=one),
        GetCursors(**AT, consumer_ids=(one,)),
        MoveCursor(**AT, cursors=((one, Offset(0)),)),
        Fetch(**AT, offset=Offset(0), reader=(one, 1)),
        ForgetClientRequest(kind="consumer", id=1),
    ):
        assert world.check("alice", request) == ""
        assert world.check("bob", request) == "not_owner"


def test_groups_belong_to_their_owner_and_joining_needs_to_read_the_topics(world: World) -> None:
    for user in ("alice", "bob"):
        world.grant(f"user:{user}", "read")
    world.do(
        RegisterConsumerCommand(
            now_ms=1, topics=(TopicSelection("logs.web"),), request_id="billing", principal="user:alice"
        )
    )
    one = ConsumerId(1)
    for request in (
        JoinGroup(group="billing", topics=("logs.web",), member_id="m"),
        GroupHeartbeat(group_id=one, member_id="m"),
        LeaveGroup(group_id=one, member_id="m"),
        ConfigureGroup(group="billing"),
        DeleteGroup(group="billing"),
        RestartGroup(group="billing"),
    ):
        assert world.check("alice", request) == ""
        assert world.check("bob", request) == "not_owner"
    assert world.check("bob", JoinGroup(group="own", topics=("logs.web",), member_id="m")) == ""
    assert world.check("bob", JoinGroup(group="own", topics=("secret",), member_id="m")) == "not_allowed"
    assert world.check("bob", JoinGroup(group="own", pattern="*", member_id="m")) == ""
    assert world.check("bob", ConfigureGroup(group="own", topics=("logs.web",))) == "not_allowed"
    world.grant("user:bob", "configure", "consumer", "o")
    assert world.check("bob", ConfigureGroup(group="own", topics=("logs.web",))) == ""
    graves = ConfigureGroup(group="own", settings=QueueSettingsChange(dead_letter_topic="logs.web"))
    assert world.check("bob", graves) == "not_allowed"  # leaders would write there for him
    world.grant("user:bob", "write")
    assert world.check("bob", graves) == ""
    identity = ConnectionIdentity(user_principal("bob"))
    _, keep = world.control.check(identity, DescribeGroups(), memoryview(b""))
    assert keep is not None
    found = GroupsFound(groups=(GroupInfo(group="billing", group_id=one),), index=Index(9))
    assert world.control.filter(identity, keep, found) == GroupsFound(index=Index(9))
    assert world.control.filter(ConnectionIdentity(user_principal("alice")), keep, found) == found


def test_groups_name_no_topic_that_is_not_seen(world: World) -> None:
    topics = ("logs.web", "secret")
    world.do(
        CreateTopicCommand(now_ms=1, topic="secret", replicas=1, assignments=((NodeId(1),),)),
    )
    selections = tuple(map(TopicSelection, topics))
    world.do(RegisterConsumerCommand(now_ms=1, topics=selections, request_id="billing", principal="user:alice"))
    world.grant("user:bob", "write")
    world.grant("user:bob", "read", "consumer", "billing")
    parts = tuple(
        AssignedPartition(topic=topic, topic_id=TopicId(9), partition_id=PartitionId(0), epoch=1) for topic in topics
    )
    member = GroupMemberInfo(member_id="m", topics=topics, owned=parts, revoking=parts)
    group = GroupInfo(
        group="billing",
        group_id=ConsumerId(1),
        topics=topics,
        members=(member,),
        settings=QueueSettings(dead_letter_topic="secret"),
    )
    found = GroupsFound(groups=(group,), index=Index(9))

    def seen(user: str) -> str:
        identity = ConnectionIdentity(user_principal(user))
        _, keep = world.control.check(identity, DescribeGroups(), memoryview(b""))
        assert keep is not None
        return str(world.control.filter(identity, keep, found))

    assert seen("alice") == str(found)
    assert "secret" not in seen("bob")
    assert seen("bob").count("'logs.web'") == 4
    world.grant("user:bob", "read", "cluster")
    assert seen("bob") == str(found)


def test_groups_over_http_name_no_topic_that_is_not_seen(world: World) -> None:
    world.do(
        RegisterConsumerCommand(now_ms=1, topics=(TopicSelection("logs.web"),), request_id="own", principal="user:bob")
    )
    world.grant("user:bob", "read")
    world.grant("user:bob", "read", "consumer", "billing")
    topics = ["logs.web", "secret"]
    item = partial(
        group_contract.GroupItem,
        group_id=1,
        kind="queue",
        state="queue",
        topics=topics,
        members=1,
        partitions=2,
        unassigned=0,
        rebalances=0,
        last_rebalance_ms=None,
        last_rebalance_reason="",
        dead_letter_topics={topic: f"{topic}.dead" for topic in topics},
    )
    member = group_contract.MemberItem(
        member_id="m",
        instance=None,
        rack=None,
        client="",
        principal=None,
        topics=topics,
        pattern=None,
        session_timeout_ms=1,
        joined_ms=1,
        partitions=[
            group_contract.OwnedPartitionItem(topic=topic, partition_id=0, epoch="1", state="owned") for topic in topics
        ],
    )
    lags = [
        group_contract.GroupLagItem(
            topic=topic, partition_id=0, cursor=0, first_offset=0, end_offset=3, lag=3, member_id=None
        )
        for topic in topics
    ]
    access = HttpAccess(world.control, world.authenticator)
    permissions = world.control.permissions(ConnectionIdentity(user_principal("bob")))

    def seen(answer: contract.Answer) -> Any:
        return msgspec.to_builtins(access.filter(permissions, answer))

    groups = [item(group=name) for name in ("billing", "other", "own")]
    listed = seen(group_contract.GroupsAnswer(groups=groups))["groups"]
    assert [(one["group"], one["topics"]) for one in listed] == [("billing", ["logs.web"]), ("own", topics)]
    assert listed[0]["dead_letter_topics"] == {"logs.web": "logs.web.dead"}
    assert "secret" not in str(seen(group_contract.GroupAnswer(group=groups[0], members=[member])))
    assert "secret" in str(seen(group_contract.GroupAnswer(group=groups[2], members=[member])))
    found = seen(group_contract.GroupLagAnswer(lag=6, partitions=lags))
    assert (found["lag"], [one["topic"] for one in found["partitions"]]) == (3, ["logs.web"])


def test_answer_of_a_handler_that_does_not_wait_is_filtered(world: World) -> None:
    world.grant("user:alice", "read")
    token = world.token("alice").text

    def answer(*_: object) -> contract.Answer:
        return contract.TopicsAnswer(topics=["logs.web", "secret"])

    async def do_nothing() -> None:
        pass

    app = RoutedApplication(
        {route.name: answer for route in ROUTES},
        hosts=HostNames(listen_host="127.0.0.1", names=("a",)),
        access=HttpAccess(world.control, world.authenticator),
        catch_up=do_nothing,
        clock=SystemClock(),
        browser_page=HttpResponse(status=200),
    )
    headers = {b"host": b"a:1", b"authorization": f"Bearer {token}".encode()}
    found = app.handle(HttpRequest(method="GET", path="/topics", query=b"", headers=headers, body=b""))
    assert isinstance(found, HttpResponse)
    assert msgspec.json.decode(found.body)["topics"] == ["logs.web"]


def test_what_nodes_move_dead_letters_with_is_not_for_users(world: World) -> None:
    world.do(RegisterProducerCommand(now_ms=1, topics=(TopicSelection("logs.web"),), name="quiver-dead/1/1/0"))
    for verb in ("write", "create"):
        world.grant("user:alice", verb)
    selection = (Selection(topic="logs.web"),)
    mover = ProducerId(1)
    assert world.check("alice", BeginEpoch(**AT, producer_id=mover, epoch=0)) == "not_owner"
    assert world.check("alice", RegisterProducerRequest(topics=selection, producer_id=mover)) == "not_owner"
    assert world.check("alice", RegisterProducerRequest(topics=selection, name="quiver-dead/9/1/0")) == "not_allowed"
    assert world.check("alice", ForgetClientRequest(kind="producer", id=1)) == "not_allowed"
    assert world.check("alice", CreateTopicRequest(topic="logs.x")) == ""
    assert world.check("alice", CreateTopicRequest(topic="logs.x", owner="user:bob")) == "not_allowed"
    assert world.check("alice", CreateTopicRequest(topic="logs.x", request_id="quiver-dead/1/1/1")) == "not_allowed"


def test_internal_topics_are_for_administrators(world: World) -> None:
    world.grant("user:alice", "admin", name="")
    at: dict[str, Any] = {"topic_id": AUDIT, "partition_id": PartitionId(0)}
    assert world.check("alice", Fetch(**at, offset=Offset(0))) == "not_allowed"
    assert world.check("alice", DeleteTopicRequest(topic="quiver.audit")) == "not_allowed"
    assert world.check("root", Fetch(**at, offset=Offset(0))) == ""


def test_error_about_a_topic_id_does_not_name_a_topic_that_is_not_seen(world: World) -> None:
    identity = ConnectionIdentity(user_principal("alice"))
    with pytest.raises(NotAllowedError, match="may not read topic id 1;"):
        world.control.check(identity, Fetch(**AT, offset=Offset(0)), memoryview(b""))
    with pytest.raises(NotFoundError):
        world.control.check(identity, Fetch(**{**AT, "topic_id": TopicId(7)}, offset=Offset(0)), memoryview(b""))


def test_lists_leave_out_what_is_not_seen(world: World) -> None:
    world.grant("user:alice", "write")
    world.do(RegisterProducerCommand(now_ms=1, topics=(TopicSelection("logs.web"),), principal="user:alice"))
    world.do(RegisterProducerCommand(now_ms=1, topics=(TopicSelection("logs.web"),), principal="user:bob"))
    topics = tuple(
        TopicInfo(topic=name, topic_id=TopicId(1), replicas=1, partitions=()) for name in ("a", "logs.web", "quiver.x")
    )
    identity = ConnectionIdentity(user_principal("alice"))
    _, keep = world.control.check(identity, GetMetadata(), memoryview(b""))
    assert keep is not None
    found = world.control.filter(identity, keep, MetadataFound(cluster_id="c", index=Index(1), topics=topics))
    assert isinstance(found, MetadataFound)
    assert [one.topic for one in found.topics] == ["logs.web"]
    _, keep = world.control.check(identity, ListClients(), memoryview(b""))
    assert keep is not None
    clients = ClientsFound(clients=tuple(ClientInfo(kind="producer", id=id_) for id_ in (1, 2)))
    seen = world.control.filter(identity, keep, clients)
    assert isinstance(seen, ClientsFound)
    assert [one.id for one in seen.clients] == [1]
    assert seen.is_partial


def test_clients_of_a_topic_are_listed_for_who_may_know_that_it_exists(world: World) -> None:
    world.grant("user:alice", "write")
    assert world.check("alice", ListClients(topic="logs.web")) == world.check("alice", ListClients()) == ""
    assert world.check("alice", ListClients(topic="other")) == "not_allowed"
    world.grant("user:alice", "read", "cluster", "", is_prefix=False)
    assert world.check("alice", ListClients(topic="other")) == ""


def test_clients_and_cursors_are_shown_to_who_may_read_them_by_name(world: World) -> None:
    logs = (TopicSelection("logs.web"),)
    for name in ("web", "other"):
        world.do(RegisterProducerCommand(now_ms=1, topics=logs, name=name, principal="user:alice"))
        world.do(RegisterConsumerCommand(now_ms=1, topics=logs, request_id=name, principal="user:alice"))
    identity = ConnectionIdentity(user_principal("bob"))

    def seen() -> list[tuple[str, int, tuple[str, ...]]]:
        _, keep = world.control.check(identity, ListClients(), memoryview(b""))
        kinds: tuple[Literal["producer", "consumer"], ...] = ("producer", "consumer")
        all_ = tuple(ClientInfo(kind=kind, id=id_, topics=("logs.web", "x")) for kind in kinds for id_ in (1, 2))
        assert keep is not None
        found = world.control.filter(identity, keep, ClientsFound(clients=all_))
        assert isinstance(found, ClientsFound)
        assert found.is_partial == (len(found.clients) < len(all_))
        return [(one.kind, one.id, one.topics) for one in found.clients]

    cursors, queue = GetCursors(**AT, consumer_ids=(ConsumerId(1),)), GetQueue(**AT, group_id=ConsumerId(1))
    assert seen() == []
    world.grant("user:bob", "read", "topic", "logs.")
    assert world.check("bob", cursors) == world.check("bob", queue) == "not_owner"
    world.grant("user:bob", "read", "consumer", "web", is_prefix=False)
    assert seen() == [("consumer", 1, ("logs.web",))]
    assert world.check("bob", cursors) == world.check("bob", queue) == ""
    assert world.check("bob", GetCursors(**AT, consumer_ids=(ConsumerId(2),))) == "not_owner"
    assert world.check("bob", MoveCursor(**AT, cursors=((ConsumerId(1), Offset(0)),))) == "not_owner"
    assert world.check("bob", Consume(**AT, consumer_id=ConsumerId(1))) == "not_owner"
    world.grant("user:bob", "read", "producer", "")
    assert [one[:2] for one in seen()] == [("producer", 1), ("producer", 2), ("consumer", 1)]
    world.grant("user:bob", "read", "consumer", "")
    assert len(seen()) == 4


def test_owner_of_a_topic_is_shown_to_who_may_read_it(world: World) -> None:
    identity = ConnectionIdentity(user_principal("bob"))
    owned = TopicInfo(topic="logs.web", topic_id=LOGS, replicas=1, partitions=(), owner="user:alice")

    def seen() -> str:
        _, keep = world.control.check(identity, GetMetadata(with_owners=True), memoryview(b""))
        assert keep is not None
        found = world.control.filter(identity, keep, MetadataFound(cluster_id="c", index=Index(1), topics=(owned,)))
        assert isinstance(found, MetadataFound)
        return found.topics[0].owner

    world.grant("user:bob", "write")
    assert seen() == ""
    world.grant("user:bob", "read")
    assert seen() == "user:alice"


def test_status_names_no_topic_that_is_not_seen(world: World) -> None:
    world.grant("user:alice", "read")
    world.grant("user:bob", "read", "cluster")
    access = HttpAccess(world.control, world.authenticator)
    problems = [
        ReplicaProblemItem(state="failed", problem="disk", topic=topic, partition=0)
        for topic in ("logs.web", "secret", None)
    ]
    status = NodeStatusAnswer(node=1, roles=[], version="", message="", uptime_ms=0, is_ready=True, problems=problems)

    def seen(user: str) -> list[str | None]:
        permissions = world.control.permissions(ConnectionIdentity(user_principal(user)))
        answer = access.filter(permissions, status)
        assert isinstance(answer, NodeStatusAnswer)
        return [one.topic for one in answer.problems]

    assert (seen("alice"), seen("bob")) == (["logs.web", None], ["logs.web", "secret", None])


@pytest.mark.parametrize("more", [name for name in DescribeNode.__struct_fields__ if name.startswith("with_")])
def test_reader_of_a_topic_may_ask_a_node_for_its_replicas_only(world: World, more: str) -> None:
    world.grant("user:alice", "read")
    request = msgspec.structs.replace(DescribeNode(topic="logs.web", known_index=Index(1)), **{more: True})
    assert world.check("alice", request) == ("" if more == "with_replicas" else "not_allowed")
    world.grant("user:alice", "read", "cluster")
    assert world.check("alice", request) == ""


def test_node_that_is_described_for_one_topic_names_no_other(world: World) -> None:
    world.grant("user:alice", "read")
    world.grant("user:bob", "read", "cluster")
    problems = tuple(
        ProblemInfo(state="failed", problem="disk", group=GroupId(1), topic=topic)
        for topic in ("logs.web", "secret", "")
    )
    node = NodeDescribed(node=NodeId(1), version="", pid=1, roles=(), started_ms=0, is_ready=True, problems=problems)

    def seen(user: str) -> list[str]:
        request, identity = DescribeNode(topic="logs.web"), ConnectionIdentity(user_principal(user))
        keep = world.control.check(identity, request, memoryview(b""))[1]
        assert keep is not None
        found = world.control.filter(identity, keep, node)
        assert isinstance(found, NodeDescribed)
        return [one.topic for one in found.problems]

    world.grant("user:bob", "read")
    assert (seen("alice"), seen("bob")) == (["logs.web", ""], ["logs.web", "secret", ""])


def test_cluster_is_read_with_a_grant_and_changed_by_administrators_only(world: World) -> None:
    assert world.check("alice", ListManagers()) == "not_allowed"
    world.grant("user:alice", "read", "cluster")
    assert world.check("alice", ListManagers()) == ""
    for request in (DrainBroker(broker=NodeId(1)), ListUsers(), CreateTokenRequest(user="alice"), SubmitCommand()):
        assert world.check("alice", request) == "not_allowed"


def test_users_explain_themselves_and_administrators_everybody(world: World) -> None:
    request = ExplainAccess(principal="user:alice", verb=Verb.READ, name="logs.web")
    assert world.check("alice", request) == ""
    assert world.check("bob", request) == "not_allowed"
    assert world.check("root", request) == ""
    for principal, reason in (("user:eve", "there is no user 'eve'"), ("user:alice", "no grant allows")):
        verdict = world.control.explain(principal, Verb.READ, ResourceKind.TOPIC, "logs.web")
        assert not verdict.is_allowed
        assert reason in verdict.reason


# -- identities --------------------------------------------------------------------------------------


def test_only_nodes_act_for_others_and_get_no_more_than_they(world: World) -> None:
    request = DeleteTopicRequest(topic="logs.web", on_behalf_of="user:root")
    assert world.check("alice", request) == "not_allowed"
    node = ConnectionIdentity(node_principal(NodeId(2)))
    identity, _ = world.control.check(node, request, memoryview(b""))
    assert identity.principal == user_principal("root")
    assert world.check(node, DeleteTopicRequest(topic="logs.web", on_behalf_of="user:alice")) == "not_allowed"
    assert world.check(node, DeleteTopicRequest(topic="logs.web", on_behalf_of="anonymous")) == "unauthenticated"
    assert world.check(node, DeleteTopicRequest(topic="logs.web", on_behalf_of="user:eve")) == "unauthenticated"


def test_token_works_until_it_is_revoked_or_its_user_disabled(world: World) -> None:
    world.grant("user:alice", "read")
    fetch = Fetch(**AT, offset=Offset(0))
    token = world.token("alice")
    identity = _login(world, token.text)
    assert (str(identity.principal), world.check(identity, fetch)) == ("user:alice", "")
    world.do(ChangeUserCommand(now_ms=1, user="alice", is_enabled=False))
    assert world.check(identity, fetch) == "unauthenticated"
    world.do(ChangeUserCommand(now_ms=1, user="alice", is_enabled=True))
    assert world.check(identity, fetch) == ""
    world.do(RevokeTokenCommand(now_ms=1, token_id=token.id))
    assert world.check(identity, fetch) == "unauthenticated"
    assert world.check(identity, fetch) == "unauthenticated"


def test_authenticating_again_gives_nothing_to_requests_that_are_under_way(world: World) -> None:
    world.grant("user:alice", "write")
    text = world.token("alice").text
    caller = Caller(name="", address="10.0.0.1:1", deadline_ms=0, identity=_login(world, text))
    identity = caller.identity
    register = RegisterProducerRequest(topics=(Selection(topic="logs.web"),), name="bob's")
    assert world.check(identity, register) == ""
    assert not identity.allows(Verb.CONFIGURE, ResourceKind.PRODUCER, "bob's")
    authenticate = world.authenticator.handlers()[Authenticate]
    asyncio.run(_done(authenticate(caller, Authenticate(token=text), memoryview(b""))))
    assert not identity.allows(Verb.CONFIGURE, ResourceKind.PRODUCER, "bob's")
    assert world.check(identity, register) == ""


@pytest.mark.parametrize("is_changed", [False, True])
def test_password_works_until_it_is_changed_also_for_who_has_begun(world: World, is_changed: bool) -> None:
    world.grant("user:alice", "read")
    _set_password(world, "old")
    handlers = world.authenticator.handlers()
    caller = Caller(name="", address="10.0.0.1:1", deadline_ms=0)
    client = ScramClient("alice", "old", nonce="n" * 18)
    begun = handlers[BeginScram](caller, BeginScram(message=client.first), memoryview(b""))
    challenge = asyncio.run(_done(begun))[0]
    assert isinstance(challenge, ScramChallenge)
    if is_changed:
        _set_password(world, "new")
    finish = FinishScram(message=client.prove(challenge.message))
    if is_changed:
        with pytest.raises(NotAllowedError):
            asyncio.run(_done(handlers[FinishScram](caller, finish, memoryview(b""))))
        assert caller.principal == ANONYMOUS
        return
    asyncio.run(_done(handlers[FinishScram](caller, finish, memoryview(b""))))
    fetch = Fetch(**AT, offset=Offset(0))
    assert (str(caller.principal), world.check(caller.identity, fetch)) == ("user:alice", "")
    _set_password(world, "new")
    assert world.check(caller.identity, fetch) == "unauthenticated"


def test_challenge_of_a_user_that_does_not_exist_is_the_same_on_every_node(world: World) -> None:
    """Otherwise two nodes, or one before and after a restart, would tell which users exist."""
    _set_password(world, "old")
    other = Authenticator(view=world.state.view, clock=world, audit=world.audit, is_open=False)

    def salt(authenticator: Authenticator, user: str) -> str:
        caller = Caller(name="", address="10.0.0.1:1", deadline_ms=0)
        begin = BeginScram(message=ScramClient(user, "guess", nonce="n" * 18).first)
        answer = asyncio.run(_done(authenticator.handlers()[BeginScram](caller, begin, memoryview(b""))))[0]
        assert isinstance(answer, ScramChallenge)
        return answer.message.split(",")[1]

    salts = {user: salt(world.authenticator, user) for user in ("alice", "bob", "nobody", "noone")}
    assert salts == {user: salt(other, user) for user in salts}
    assert len(set(salts.values())) == 4
    world.token("bob")
    assert salts["nobody"] == salt(other, "nobody"), "other users come and go"


def _set_password(world: World, password: str) -> None:
    verifier = make_verifier(password, salt=b"s" * SALT_BYTES, iterations=ITERATIONS_MIN)
    world.do(ChangeUserCommand(now_ms=1, user="alice", verifier=verifier))


async def _done(answer: Awaitable[Answer]) -> Answer:
    return await answer


def test_token_works_until_it_expires(world: World) -> None:
    world.grant("user:alice", "read")
    identity = _login(world, world.token("alice", expires_ms=NOW_MS + 10).text)
    assert world.check(identity, Fetch(**AT, offset=Offset(0))) == ""
    world.now_ms += 10
    assert world.check(identity, Fetch(**AT, offset=Offset(0))) == "unauthenticated"


def test_all_wrong_tokens_get_the_same_answer(world: World) -> None:
    token, expired = world.token("alice"), world.token("bob", expires_ms=NOW_MS)
    other = new_token()
    wrong = ["", "nonsense", "qv_x_y", other.text, f"qv_{token.id}_{other.secret}", expired.text, "ä" * 80]
    messages = set()
    for text in wrong:
        with pytest.raises(NotAllowedError) as caught:
            world.authenticator.check_token(text, address="10.0.0.1:5")
        messages.add((caught.value.code, caught.value.message))
    assert len(messages) == 1


def test_nobody_is_told_to_be_wrong_by_a_node_that_knows_no_users_yet() -> None:
    """A client retries what is not done, and gives up on credentials that are refused."""
    world = World(is_open=False)
    world.state = MetadataState()
    text = new_token().text
    young = Authenticator(view=world.state.view, clock=world, audit=world.audit, is_open=False)
    with pytest.raises(UnavailableError, match="does not know the cluster's users yet"):
        young.check_token(text, address="10.0.0.1:1")
    opened = Authenticator(view=world.state.view, clock=world, audit=world.audit, is_open=True)
    with pytest.raises(NotAllowedError):
        opened.check_token(text, address="10.0.0.1:1")


def test_failures_are_limited_per_host_and_others_are_not_affected(world: World) -> None:
    token = world.token("alice")
    for _ in range(FAILURES_MAX):
        with pytest.raises(NotAllowedError):
            world.authenticator.check_token("wrong", address="10.0.0.1:5")
    with pytest.raises(OverloadedError, match="too many failed authentications") as caught:
        world.authenticator.check_token(token.text, address="10.0.0.1:6")
    assert caught.value.retry_after_ms is not None
    world.authenticator.check_token(token.text, address="10.0.0.2:5")
    world.now_ms += caught.value.retry_after_ms
    world.authenticator.check_token(token.text, address="10.0.0.1:5")


def test_http_identity_is_cached_and_still_revoked(world: World) -> None:
    token = world.token("alice")
    header = f"Bearer {token.text}".encode()
    first = world.authenticator.identify_http(header, ConnectionIdentity(address="10.0.0.1:5"))
    assert world.authenticator.identify_http(header, ConnectionIdentity(address="10.0.0.1:6")) is first
    assert world.authenticator.identify_http(None, ConnectionIdentity(address="10.0.0.1:6")).principal == ANONYMOUS
    with pytest.raises(NotAllowedError):
        world.authenticator.identify_http(b"Basic " + token.text.encode(), ConnectionIdentity(address="10.0.0.1:6"))
    world.do(RevokeTokenCommand(now_ms=1, token_id=token.id))
    with pytest.raises(NotAllowedError):
        world.control.permissions(first)


def test_certificate_names_one_user(world: World) -> None:
    def identify(*uris: str) -> ConnectionIdentity:
        names = tuple(("URI", uri) for uri in uris)
        return certificate_identity({"subjectAltName": (("DNS", "host"), *names)}, address="")

    world.grant("user:alice", "read")
    alice = identify("urn:quiver:user:alice")
    assert world.check(alice, Fetch(**AT, offset=Offset(0))) == ""
    for identity in (identify(), identify("urn:quiver:user:"), identify("urn:quiver:user:a", "urn:quiver:user:b")):
        assert identity.principal == ANONYMOUS
    assert world.check(identify("urn:quiver:user:eve"), GetMetadata()) == "unauthenticated"


def _login(world: World, text: str) -> ConnectionIdentity:
    return world.authenticator.identify_http(b"Bearer " + text.encode(), ConnectionIdentity(address="10.0.0.1:1"))


# -- records -----------------------------------------------------------------------------------------


def test_audit_log_counts_what_it_cannot_keep() -> None:
    written: list[bytes] = []

    async def write(lines: bytes) -> None:
        written.append(lines)

    log = AuditLog(node=NodeId(1), clock=World(), write=write)
    for _ in range(QUEUE_MAX + 3):
        log.record(AuditEvent(kind="denial", outcome="not_allowed"))
    assert (log.dropped, log.denials) == (3, QUEUE_MAX + 3)
    asyncio.run(log.flush())
    lines = b"".join(written).splitlines()
    assert len(lines) == QUEUE_MAX
    assert msgspec.json.decode(lines[0])["event"] == {"kind": "denial", "outcome": "not_allowed"}

    async def fail(_: bytes) -> None:
        raise OSError("no space left")

    log = AuditLog(node=NodeId(1), clock=World(), write=fail)
    log.record(AuditEvent(kind="denial", outcome="not_allowed"))
    asyncio.run(log.flush())
    assert log.dropped == 1


def test_secrets_are_in_no_representation() -> None:
    token = new_token()
    shown = [repr(Authenticate(token=token.text)), repr(TokenCreated(token_id=token.id, token=token.text)), repr(token)]
    assert not any(token.secret in text for text in shown)
    assert token.secret not in str(describe_operation(Authenticate(token=token.text)))


def test_file_of_the_first_administrator() -> None:
    token = new_token()
    stored = (token.id, hash_secret(token.secret))
    assert parse_admin(f"{stored[0]}:{stored[1]}\n") == parse_admin(" ".join(stored)) == stored
    for text in ("", token.text, stored[0]):
        with pytest.raises(ConfigError, match="quiver security init"):
            parse_admin(text)


def test_first_administrator_is_completed_and_gets_no_revoked_token_back() -> None:
    token = new_token()
    for stops_after in range(4):  # a primary that stops half-way, and the next one
        state = MetadataState()
        for command in (InitCluster(now_ms=1, cluster_id="c", feature_level=2), *_steps(state, token)[:stops_after]):
            assert apply(state, command).refusal is None
        assert is_missing(state.view()) is (stops_after < 3)
        if stops_after < 3:
            for command in _steps(state, token):
                assert apply(state, command).refusal is None
        assert (set(state.view().tokens), is_missing(state.view())) == ({token.id}, False)
        assert apply(state, RevokeTokenCommand(now_ms=1, token_id=token.id)).refusal is None
        assert not is_missing(state.view())
        assert apply(state, DeleteUserCommand(now_ms=1, user="admin")).refusal is None
        assert is_missing(state.view())


def _steps(state: MetadataState, token: Token) -> list[Any]:
    return list_steps(state.view(), 1, token.id, hash_secret(token.secret))


# -- principals of an identity provider ------------------------------------------------------------


def _vouched(name: str, *roles: str) -> ConnectionIdentity:
    identity = ConnectionIdentity(user_principal(name), address="10.0.0.1:1")
    identity.roles = roles
    return identity


def test_roles_of_an_identity_provider_hold_for_users_that_the_metadata_does_not_know(world: World) -> None:
    world.do(CreateRoleCommand(now_ms=1, role="readers"))
    world.grant("role:readers", "read")
    fetch = Fetch(**AT, offset=Offset(0))
    assert world.check(_vouched("oidc.ann"), fetch) == "not_allowed"
    assert world.check(_vouched("oidc.ann", "readers", "unknown"), fetch) == ""
    assert world.check(_vouched("oidc.ann", "admin"), DeleteTopicRequest(topic="logs.web")) == ""
    assert world.check("oidc.ann", fetch) == "unauthenticated"  # nobody vouches for this one


def test_cluster_can_refuse_a_user_of_an_identity_provider(world: World) -> None:
    world.do(CreateUserCommand(now_ms=1, user="oidc.ann"))
    world.grant("user:oidc.ann", "read")
    identity, fetch = _vouched("oidc.ann"), Fetch(**AT, offset=Offset(0))
    assert world.check(identity, fetch) == ""
    world.do(ChangeUserCommand(now_ms=1, user="oidc.ann", is_enabled=False))
    assert world.check(identity, fetch) == "unauthenticated"


def test_roles_travel_with_a_forwarded_request_and_only_nodes_are_believed(world: World) -> None:
    world.do(CreateRoleCommand(now_ms=1, role="readers"))
    world.grant("role:readers", "read")
    text = _vouched("oidc.ann", "readers").on_behalf_of
    assert text == "user:oidc.ann;oidc;readers"
    fetch = Fetch(**AT, offset=Offset(0), on_behalf_of=text)
    assert world.check(ConnectionIdentity(node_principal(NodeId(2))), fetch) == ""
    plain = Fetch(**AT, offset=Offset(0), on_behalf_of="user:oidc.ann")
    assert world.check(ConnectionIdentity(node_principal(NodeId(2))), plain) == "unauthenticated"
    assert world.check(_vouched("oidc.eve"), fetch) == "not_allowed"


def test_every_audited_request_says_what_it_does_to_what() -> None:
    assert {kind for kind in AUDITED if not _VERBS.get(RULES[kind])} == set()
    operation = describe_operation(DeleteTopicRequest(topic="logs.web"), 7)
    assert operation == AuditedOperation(
        request="delete_topic", verb="delete", resource="topic logs.web", request_id="7"
    )
