"""The rule of every request type: what its sender must be allowed. Pure data and small functions.

A rule gets the sender's permissions, the metadata and the request, and raises `NotAllowedError` if a grant is missing.
It is not asked for administrators and nodes, who may do everything. `FILTERS` leave out of some responses what the
caller may not see.

A request that names a topic by id which does not exist is refused as `unknown_topic` here, so that no handler meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import msgspec

from quiver.access.audit import AuditedOperation
from quiver.errors import NotAllowedError, NotFoundError
from quiver.groups.settings import DEAD_LETTERS_PREFIX
from quiver.metadata import ConsumerRow, ProducerRow, View
from quiver.model import NO_PRODUCER, ConsumerId, ProducerId, TopicId
from quiver.record import HEADER_BYTES
from quiver.record.header import read_header
from quiver.security.joining import parse_join_user
from quiver.security.permissions import Permissions, ResourceKind, Verb, describe_resource
from quiver.security.principal import parse_principal
from quiver.wire import admin_messages, group_messages, messages, security_messages
from quiver.wire.explain_messages import ExplainReplica
from quiver.wire.queue_messages import GetQueue, QueueReceive, QueueRequest, QueueSettle
from quiver.wire.requests import Request, Response, request_name

Rule = Callable[[Permissions, View, Any, memoryview], None]
"""Raise `NotAllowedError` unless a request is allowed."""
ResponseFilter = Callable[[Permissions, View, Any], Response]
"""Return a response without what its receiver may not see."""
ClientKind = Literal["producer", "consumer"]

_KINDS: dict[ClientKind, ResourceKind] = {"producer": ResourceKind.PRODUCER, "consumer": ResourceKind.CONSUMER}


# -- what rules are made of --------------------------------------------------------------------------


def require(permissions: Permissions, verb: Verb, kind: ResourceKind, name: str = "") -> None:
    """Raise `NotAllowedError` unless a verb is allowed."""
    if not permissions.allows(verb, kind, name):
        raise deny(permissions, f"{verb} {describe_resource(kind, name)}")


def require_known(permissions: Permissions) -> None:
    """Raise `NotAllowedError` unless the sender has proven who it is."""
    if not permissions.is_known and not permissions.is_admin:
        raise deny(permissions, "do this")


def deny(permissions: Permissions, wanted: str) -> NotAllowedError:
    """Return the error of a principal that may not do something."""
    if not permissions.is_known:
        return NotAllowedError(
            f"not done: nobody may {wanted} without credentials; authenticate with a token", code="unauthenticated"
        )
    return NotAllowedError(f"not done: {permissions.principal} may not {wanted}; ask an administrator for a grant")


def require_owner(permissions: Permissions, row: ProducerRow | ConsumerRow | None, kind: ClientKind) -> None:
    """Raise `NotAllowedError` if a client belongs to another principal; an unknown client is the handler's business."""
    if row is None or (row.owner in ("", permissions.owner) and not _is_of_nodes(row)):
        return
    if not permissions.allows(Verb.CONFIGURE, _KINDS[kind], client_name(row)):
        message = f"not done: {kind} {row.key} belongs to another user; {permissions.principal} may not use it"
        raise NotAllowedError(message, code="not_owner")


def _is_of_nodes(row: ProducerRow | ConsumerRow) -> bool:
    """Return whether a client without an owner is no one's to take: nodes move dead letters with it."""
    return isinstance(row, ProducerRow) and row.name.startswith(DEAD_LETTERS_PREFIX)


def client_name(row: ProducerRow | ConsumerRow) -> str:
    """Return the name by which grants refer to a client: its name, or its id if it has none."""
    name = row.name if isinstance(row, ProducerRow) else row.request_id
    return name or str(row.key)


def require_topic_id(permissions: Permissions, view: View, verb: Verb, topic_id: TopicId) -> None:
    """Raise unless a verb is allowed on a topic by id; the error does not say the topic's name."""
    topic = view.topics.get(topic_id)
    if topic is None:
        raise NotFoundError(f"not done: unknown topic id {topic_id}", code="unknown_topic")
    if not permissions.allows(verb, ResourceKind.TOPIC, topic.name):
        resource = describe_resource(ResourceKind.TOPIC, topic.name)
        raise deny(permissions, f"{verb} {resource if permissions.sees_topic(topic.name) else f'topic id {topic_id}'}")


def require_producer(permissions: Permissions, view: View, producer_id: int) -> None:
    """Raise if a producer belongs to another principal."""
    require_owner(permissions, view.producers.get(ProducerId(producer_id)), "producer")


def require_consumers(permissions: Permissions, view: View, ids: Iterable[int]) -> None:
    """Raise if one of these consumers belongs to another principal."""
    for id_ in ids:
        require_owner(permissions, view.consumers.get(ConsumerId(id_)), "consumer")


def require_seen_consumers(permissions: Permissions, view: View, ids: Iterable[int]) -> None:
    """Raise if one of these consumers belongs to another principal, and its name may not be read either."""
    for id_ in ids:
        row = view.consumers.get(ConsumerId(id_))
        if row is None or not permissions.allows(Verb.READ, ResourceKind.CONSUMER, client_name(row)):
            require_owner(permissions, row, "consumer")


# -- rules -------------------------------------------------------------------------------------------


def _public(*_: object) -> None:
    """Allow everybody."""


def _known(permissions: Permissions, _: View, __: object, ___: memoryview) -> None:
    require_known(permissions)


def _nodes_only(permissions: Permissions, _: View, __: object, ___: memoryview) -> None:
    raise deny(permissions, "send what only nodes send")


_VERBS: dict[Rule, Verb] = {}
"""What a rule asks for; those that are not here ask for no verb, or for several."""


def _cluster(verb: Verb) -> Rule:
    def rule(permissions: Permissions, _: View, __: object, ___: memoryview) -> None:
        require(permissions, verb, ResourceKind.CLUSTER)

    _VERBS[rule] = verb
    return rule


def _topic(verb: Verb) -> Rule:
    def rule(permissions: Permissions, _: View, request: Any, __: memoryview) -> None:
        require(permissions, verb, ResourceKind.TOPIC, request.topic)

    _VERBS[rule] = verb
    return rule


def _topic_id(verb: Verb) -> Rule:
    def rule(permissions: Permissions, view: View, request: Any, _: memoryview) -> None:
        require_topic_id(permissions, view, verb, request.topic_id)

    _VERBS[rule] = verb
    return rule


def _create_topic(permissions: Permissions, _: View, request: messages.CreateTopicRequest, __: memoryview) -> None:
    require(permissions, Verb.CREATE, ResourceKind.TOPIC, request.topic)
    if request.owner or request.request_id.startswith(DEAD_LETTERS_PREFIX):
        raise deny(permissions, "create a topic as only nodes do")


def _produce(permissions: Permissions, view: View, request: messages.Produce, payload: memoryview) -> None:
    require_topic_id(permissions, view, Verb.WRITE, request.topic_id)
    if len(payload) < HEADER_BYTES:
        return  # the handler says what is wrong with it
    # The handler reads the id at the same place and checks the rest of the header: once is enough.
    producer_id = read_header(payload).producer_id
    if producer_id != NO_PRODUCER:
        require_owner(permissions, view.producers.get(producer_id), "producer")


def _begin_epoch(permissions: Permissions, view: View, request: messages.BeginEpoch, _: memoryview) -> None:
    require_topic_id(permissions, view, Verb.WRITE, request.topic_id)
    require_producer(permissions, view, request.producer_id)


def _fetch(permissions: Permissions, view: View, request: messages.Fetch, _: memoryview) -> None:
    require_topic_id(permissions, view, Verb.READ, request.topic_id)
    if request.reader is not None:
        require_consumers(permissions, view, (request.reader[0],))


def _consume(permissions: Permissions, view: View, request: messages.Consume, _: memoryview) -> None:
    require_topic_id(permissions, view, Verb.READ, request.topic_id)
    require_consumers(permissions, view, (request.consumer_id,))


def _consume_many(permissions: Permissions, view: View, request: messages.ConsumeMany, _: memoryview) -> None:
    require_topic_id(permissions, view, Verb.READ, request.topic_id)
    require_consumers(permissions, view, request.consumer_ids)


def _get_cursors(permissions: Permissions, view: View, request: messages.GetCursors, _: memoryview) -> None:
    require_topic_id(permissions, view, Verb.READ, request.topic_id)
    require_seen_consumers(permissions, view, request.consumer_ids)


def _move_cursor(permissions: Permissions, view: View, request: messages.MoveCursor, _: memoryview) -> None:
    require_topic_id(permissions, view, Verb.READ, request.topic_id)
    require_consumers(permissions, view, (consumer_id for consumer_id, _ in request.cursors))


def _queue(permissions: Permissions, view: View, request: QueueRequest, _: memoryview) -> None:
    require_topic_id(permissions, view, Verb.READ, request.topic_id)
    check = require_seen_consumers if isinstance(request, GetQueue) else require_consumers
    check(permissions, view, (request.group_id,))


def _register_producer(
    permissions: Permissions, view: View, request: messages.RegisterProducerRequest, _: memoryview
) -> None:
    for selection in request.topics:
        require(permissions, Verb.WRITE, ResourceKind.TOPIC, selection.topic)
    if request.name.startswith(DEAD_LETTERS_PREFIX):
        require(permissions, Verb.CONFIGURE, ResourceKind.PRODUCER, request.name)
    if request.producer_id is not None:
        require_producer(permissions, view, request.producer_id)


def _register_consumer(
    permissions: Permissions, view: View, request: messages.RegisterConsumerRequest, _: memoryview
) -> None:
    for selection in request.topics:
        require(permissions, Verb.READ, ResourceKind.TOPIC, selection.topic)
    if request.consumer_id is not None:
        require_consumers(permissions, view, (request.consumer_id,))


def _forget_client(permissions: Permissions, view: View, request: messages.ForgetClientRequest, _: memoryview) -> None:
    require_known(permissions)
    row: ProducerRow | ConsumerRow | None = view.producers.get(ProducerId(request.id))
    if request.kind == "consumer":
        row = view.consumers.get(ConsumerId(request.id))
    if row is not None and not row.owner:
        require(permissions, Verb.CONFIGURE, _KINDS[request.kind], client_name(row))
    require_owner(permissions, row, request.kind)


def _join_group(permissions: Permissions, view: View, request: group_messages.JoinGroup, _: memoryview) -> None:
    require_known(permissions)  # the coordinator leaves out topics of a pattern that a member may not read
    for topic in request.topics:
        require(permissions, Verb.READ, ResourceKind.TOPIC, topic)
    require_owner(permissions, view.consumer(request.group), "consumer")


def _group_id(
    permissions: Permissions,
    view: View,
    request: group_messages.GroupHeartbeat | group_messages.LeaveGroup,
    _: memoryview,
) -> None:
    require_known(permissions)
    require_consumers(permissions, view, (request.group_id,))


def _group(
    permissions: Permissions,
    view: View,
    request: group_messages.ConfigureGroup | group_messages.DeleteGroup | group_messages.RestartGroup,
    _: memoryview,
) -> None:
    require_known(permissions)
    for topic in getattr(request, "topics", ()):
        require(permissions, Verb.READ, ResourceKind.TOPIC, topic)
    if isinstance(request, group_messages.ConfigureGroup) and request.settings.dead_letter_topic:
        # The partitions' leaders write dead letters on their own authority.
        require(permissions, Verb.WRITE, ResourceKind.TOPIC, request.settings.dead_letter_topic)
    row = view.consumer(request.group)
    if row is None or not row.owner:
        require(permissions, Verb.CONFIGURE, ResourceKind.CONSUMER, request.group)
    require_owner(permissions, row, "consumer")


def _release_hold(
    permissions: Permissions, view: View, request: admin_messages.ReleaseHoldRequest, _: memoryview
) -> None:
    require_known(permissions)
    if request.topic_id is not None:
        require_topic_id(permissions, view, Verb.READ, request.topic_id)
    for (topic_id, name), hold in view.holds.items():  # those of others stay
        if name == request.name and request.topic_id is None and hold.principal in ("", permissions.owner):
            require_topic_id(permissions, view, Verb.READ, topic_id)


def _explain_access(
    permissions: Permissions, _: View, request: security_messages.ExplainAccess, __: memoryview
) -> None:
    require_known(permissions)
    if parse_principal(request.principal) != permissions.principal:
        require(permissions, Verb.ADMIN, ResourceKind.CLUSTER)


def _list_clients(permissions: Permissions, _: View, request: admin_messages.ListClients, __: memoryview) -> None:
    require_known(permissions)
    if request.topic is None or permissions.sees_topic(request.topic):
        return
    if not permissions.allows(Verb.READ, ResourceKind.CLUSTER):  # `is_partial` would say whether it exists
        raise deny(permissions, f"see {describe_resource(ResourceKind.TOPIC, request.topic)}")


def _describe_node(permissions: Permissions, _: View, request: admin_messages.DescribeNode, __: memoryview) -> None:
    about_topic = admin_messages.DescribeNode(topic=request.topic, with_replicas=request.with_replicas)
    asked = msgspec.structs.replace(request, is_forwarded=False, known_index=about_topic.known_index, on_behalf_of="")
    if request.topic is not None and asked == about_topic:  # all else is about other topics, too
        require(permissions, Verb.READ, ResourceKind.TOPIC, request.topic)
    else:
        require(permissions, Verb.READ, ResourceKind.CLUSTER)


def _join(permissions: Permissions, _: View, __: object, ___: memoryview) -> None:
    require_known(permissions)
    parse_join_user(str(permissions.principal))


_VERBS[_create_topic] = Verb.CREATE
_VERBS.update(dict.fromkeys((_produce, _begin_epoch, _register_producer), Verb.WRITE))
_VERBS.update(
    dict.fromkeys((_fetch, _consume, _consume_many, _get_cursors, _move_cursor, _queue, _register_consumer), Verb.READ)
)
_VERBS.update({_join_group: Verb.READ, _group_id: Verb.READ, _group: Verb.CONFIGURE})
_VERBS.update({_forget_client: Verb.CONFIGURE, _release_hold: Verb.READ, _describe_node: Verb.READ})
_VERBS.update({_explain_access: Verb.ADMIN, _nodes_only: Verb.ADMIN, _join: Verb.ADMIN})

RULES: dict[type[Request[Any]], Rule] = {
    # Authentication.
    security_messages.Authenticate: _public,
    security_messages.BeginScram: _public,
    security_messages.FinishScram: _public,
    # The cluster.
    messages.GetMetadata: _known,
    admin_messages.DescribeNode: _describe_node,
    admin_messages.ListClients: _list_clients,
    admin_messages.ListHolds: _known,
    admin_messages.ListMoves: _cluster(Verb.READ),
    admin_messages.ListManagers: _cluster(Verb.READ),
    ExplainReplica: _topic_id(Verb.READ),
    messages.DrainBroker: _cluster(Verb.ADMIN),
    messages.RemoveBroker: _cluster(Verb.ADMIN),
    messages.RebalanceBrokers: _cluster(Verb.ADMIN),
    admin_messages.AddManager: _cluster(Verb.ADMIN),
    admin_messages.RemoveManager: _cluster(Verb.ADMIN),
    admin_messages.UpgradeCluster: _cluster(Verb.ADMIN),
    # Topics.
    messages.CreateTopicRequest: _create_topic,
    messages.ConfigureTopicRequest: _topic(Verb.CONFIGURE),
    messages.AddPartitionsRequest: _topic(Verb.CONFIGURE),
    messages.DeleteTopicRequest: _topic(Verb.DELETE),
    messages.RestoreTopicRequest: _topic(Verb.DELETE),
    admin_messages.PlaceHoldRequest: _topic_id(Verb.READ),
    admin_messages.ReleaseHoldRequest: _release_hold,
    # Clients and data.
    messages.RegisterProducerRequest: _register_producer,
    messages.RegisterConsumerRequest: _register_consumer,
    messages.ForgetClientRequest: _forget_client,
    messages.Produce: _produce,
    messages.BeginEpoch: _begin_epoch,
    messages.Fetch: _fetch,
    messages.ReadReplica: _topic_id(Verb.READ),
    messages.FindOffset: _topic_id(Verb.READ),
    messages.Consume: _consume,
    messages.ConsumeMany: _consume_many,
    messages.GetCursors: _get_cursors,
    messages.MoveCursor: _move_cursor,
    QueueReceive: _queue,
    QueueSettle: _queue,
    GetQueue: _queue,
    # Consumer groups.
    group_messages.JoinGroup: _join_group,
    group_messages.GroupHeartbeat: _group_id,
    group_messages.LeaveGroup: _group_id,
    group_messages.DescribeGroups: _known,
    group_messages.ConfigureGroup: _group,
    group_messages.DeleteGroup: _group,
    group_messages.RestartGroup: _group,
    # Between nodes.
    messages.SubmitCommand: _nodes_only,
    messages.BrokerHeartbeatRequest: _nodes_only,
    messages.GetMembers: _nodes_only,
    security_messages.SignNode: _join,
    # Users, roles, grants and quotas.
    security_messages.ExplainAccess: _explain_access,
    security_messages.ListUsers: _cluster(Verb.ADMIN),
    security_messages.ListRoles: _cluster(Verb.ADMIN),
    security_messages.ListGrants: _cluster(Verb.ADMIN),
    security_messages.ListQuotas: _cluster(Verb.ADMIN),
    **dict.fromkeys(get_args(security_messages.SecurityChange), _cluster(Verb.ADMIN)),
}
"""The rule of every request; a test fails if one has none."""


# -- filters -----------------------------------------------------------------------------------------


def _seen_metadata(permissions: Permissions, _: View, found: messages.MetadataFound) -> Response:
    topics = (one for one in found.topics if permissions.sees_topic(one.topic))
    return msgspec.structs.replace(found, topics=tuple(_without_owner(permissions, one) for one in topics))


def _without_owner(permissions: Permissions, topic: messages.TopicInfo) -> messages.TopicInfo:
    """Return a topic without its owner, unless it may be read."""
    is_seen = not topic.owner or permissions.allows(Verb.READ, ResourceKind.TOPIC, topic.topic)
    return topic if is_seen else msgspec.structs.replace(topic, owner="")


def _seen_clients(permissions: Permissions, view: View, found: admin_messages.ClientsFound) -> Response:
    if permissions.allows(Verb.READ, ResourceKind.CLUSTER):
        return found
    seen = []
    for one in found.clients:
        row: ProducerRow | ConsumerRow | None = view.producers.get(ProducerId(one.id))
        if one.kind == "consumer":
            row = view.consumers.get(ConsumerId(one.id))
        if row is None:
            continue
        if row.owner == permissions.owner:
            seen.append(one)
        elif permissions.allows(Verb.READ, _KINDS[one.kind], client_name(row)):
            seen.append(msgspec.structs.replace(one, topics=_seen_topics(permissions, one.topics)))
    return admin_messages.ClientsFound(clients=tuple(seen), is_partial=len(seen) < len(found.clients))


def _seen_groups(permissions: Permissions, view: View, found: group_messages.GroupsFound) -> Response:
    if permissions.allows(Verb.READ, ResourceKind.CLUSTER):
        return found
    seen = []
    for one in found.groups:
        row = view.consumers.get(one.group_id)
        if row is not None and row.owner == permissions.owner:
            seen.append(one)
        elif permissions.allows(Verb.READ, ResourceKind.CONSUMER, one.group):
            seen.append(_without_topics(permissions, one))
    return msgspec.structs.replace(found, groups=tuple(seen))


def _without_topics(permissions: Permissions, group: group_messages.GroupInfo) -> group_messages.GroupInfo:
    """Return a group without the names of topics that are not seen: its own, its members', that of its dead letters."""
    settings = group.settings
    if settings is not None and not permissions.sees_topic(settings.dead_letter_topic):
        settings = msgspec.structs.replace(settings, dead_letter_topic="")
    return msgspec.structs.replace(
        group,
        topics=_seen_topics(permissions, group.topics),
        members=tuple(
            msgspec.structs.replace(
                member,
                topics=_seen_topics(permissions, member.topics),
                owned=tuple(one for one in member.owned if permissions.sees_topic(one.topic)),
                revoking=tuple(one for one in member.revoking if permissions.sees_topic(one.topic)),
            )
            for member in group.members
        ),
        settings=settings,
    )


def _seen_topics(permissions: Permissions, topics: Iterable[str]) -> tuple[str, ...]:
    return tuple(topic for topic in topics if permissions.sees_topic(topic))


def _seen_holds(permissions: Permissions, _: View, found: admin_messages.HoldsFound) -> Response:
    return admin_messages.HoldsFound(holds=tuple(one for one in found.holds if permissions.sees_topic(one.topic)))


def _seen_node(permissions: Permissions, _: View, found: admin_messages.NodeDescribed) -> Response:
    if permissions.allows(Verb.READ, ResourceKind.CLUSTER):
        return found
    problems = tuple(one for one in found.problems if not one.topic or permissions.sees_topic(one.topic))
    return msgspec.structs.replace(found, problems=problems)


FILTERS: dict[type[Request[Any]], ResponseFilter] = {
    admin_messages.DescribeNode: _seen_node,
    messages.GetMetadata: _seen_metadata,
    admin_messages.ListClients: _seen_clients,
    admin_messages.ListHolds: _seen_holds,
    group_messages.DescribeGroups: _seen_groups,
}

AUDITED: frozenset[type[Request[Any]]] = frozenset(
    (
        messages.DrainBroker,
        messages.RemoveBroker,
        messages.RebalanceBrokers,
        admin_messages.AddManager,
        admin_messages.RemoveManager,
        admin_messages.UpgradeCluster,
        messages.CreateTopicRequest,
        messages.ConfigureTopicRequest,
        messages.AddPartitionsRequest,
        messages.DeleteTopicRequest,
        messages.RestoreTopicRequest,
        messages.ForgetClientRequest,
        group_messages.ConfigureGroup,
        group_messages.DeleteGroup,
        group_messages.RestartGroup,
        *get_args(security_messages.SecurityChange),
    )
)
"""Administrative changes, which are recorded in the audit log whatever their outcome."""


def describe_operation(request: Request[Any], correlation_id: int = 0) -> AuditedOperation:
    """Return what a request does, for the audit log; never a secret."""
    verb = _VERBS.get(RULES[type(request)])
    return AuditedOperation(
        request=request_name(request),
        verb="" if verb is None else verb.value,
        resource=_describe_resource(request),
        request_id=str(correlation_id) if correlation_id else "",
    )


def _describe_resource(request: Any) -> str:
    if isinstance(request, security_messages.ChangeOwnerRequest):
        return f"{request.kind} {request.id} to {request.owner or 'nobody'}"
    for field in (
        "topic",
        "group",
        "user",
        "role",
        "token_id",
        "grant",
        "subject",
        "broker",
        "node",
        "topic_id",
        "id",
        "name",
    ):
        value = getattr(request, field, None)
        if value is not None and value != "":
            return f"{field} {value}"
    return ""
