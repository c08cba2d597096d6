"""The primary's handler of change requests: it turns each request into metadata commands and submits them.

Called only on a node that believes to be the primary; `MetadataStore.submit` decides whether it is. The index in the
reply covers the change. `apply` refuses invalid changes by stable code; this module checks only the input of
placement. It keeps no state of its own: every change is in the metadata.

Placement also counts assignments that are in flight: topics that are created concurrently share replication rounds and
are still spread evenly.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol, assert_never

import msgspec

from quiver.access.rules import client_name
from quiver.clock import Clock
from quiver.config import EncryptionSettings, ManagerSettings
from quiver.errors import (
    ConflictError,
    NotAllowedError,
    NotFoundError,
    OutOfRangeError,
    RequestError,
    UnavailableError,
)
from quiver.manager.access_changes import AccessChange, access_command, token_command
from quiver.manager.describe import read_retention
from quiver.manager.group_coordinator import GroupCoordinator
from quiver.manager.manager_changes import add_manager, remove_manager
from quiver.manager.placement import Assignments, count_brokers, default_replicas, place_topic
from quiver.manager.upgrade import ClusterUpgrade
from quiver.metadata import (
    AddPartitionsCommand,
    BrokerState,
    ChangeBrokerState,
    ChangeRebalancing,
    Command,
    ConfigureTopicCommand,
    CreateTopicCommand,
    DeleteTopicCommand,
    DeleteUserCommand,
    EntityKind,
    ForgetClientCommand,
    HoldPosition,
    InitCluster,
    MetadataStore,
    NotPrimaryError,
    PlaceHoldCommand,
    RegisterBroker,
    RegisterConsumerCommand,
    RegisterProducerCommand,
    ReleaseHoldCommand,
    RestoreTopicCommand,
    StartFrom,
    TopicSelection,
    UndrainBroker,
    View,
)
from quiver.metadata.clients import OWNERS_LEVEL
from quiver.metadata.commands import CreateTopicResult, decode_payload, encode_result
from quiver.metadata.topics import PARTITIONS_MAX, REPLICAS_MAX
from quiver.model import Index, NodeId
from quiver.security.certificates import Authority
from quiver.security.identity import ConnectionIdentity
from quiver.security.joining import parse_join_user
from quiver.security.permissions import ResourceKind, Verb
from quiver.security.tokens import Token, new_token
from quiver.wire import admin_messages, messages, security_messages
from quiver.wire.requests import Done, Response
from quiver.wire.serving import Answer

SingleRequest = (
    messages.ConfigureTopicRequest
    | messages.DeleteTopicRequest
    | messages.RestoreTopicRequest
    | messages.DrainBroker
    | messages.RemoveBroker
    | messages.RebalanceBrokers
    | messages.ForgetClientRequest
    | admin_messages.PlaceHoldRequest
    | admin_messages.ReleaseHoldRequest
)
"""Requests that need one command, or none."""
ChangeRequest = (
    SingleRequest
    | messages.CreateTopicRequest
    | messages.AddPartitionsRequest
    | messages.RegisterProducerRequest
    | messages.RegisterConsumerRequest
    | admin_messages.AddManager
    | admin_messages.RemoveManager
    | messages.SubmitCommand
    | messages.BrokerHeartbeatRequest
    | admin_messages.UpgradeCluster
    | AccessChange
    | security_messages.CreateTokenRequest
    | security_messages.SignNode
)
"""Requests that only the primary serves."""


PLACEMENTS_MAX = 5
"""Attempts to place replicas while brokers come and go."""


class HeartbeatHandler(Protocol):
    """The receiver of heartbeats on a manager."""

    upgrade: ClusterUpgrade

    @property
    def groups(self) -> GroupCoordinator:
        """Return the coordinator of consumer groups.

        Raises:
            NotPrimaryError: not done; this manager is not the primary, or not yet.
        """
        ...

    async def handle_heartbeat(self, heartbeat: messages.BrokerHeartbeatRequest) -> bool:
        """Record a node's heartbeat; return whether the node is registered with this identity.

        Raises:
            NotPrimaryError: not done; this manager is not the primary, or not yet.
        """
        ...

    def handle_registered(self, kind: EntityKind, id_: int) -> None:
        """Count a registration as a sign of life."""
        ...

    def full_nodes(self) -> tuple[NodeId, ...]:
        """Return the living brokers whose disk is nearly full."""
        ...


class ChangeHandler:
    """Carries out change requests on the primary."""

    def __init__(
        self,
        store: MetadataStore,
        *,
        clock: Clock,
        settings: ManagerSettings,
        heartbeats: HeartbeatHandler | None,
        authority: Authority | None = None,
        encryption: EncryptionSettings | None = None,
        make_token: Callable[[], Token] = new_token,
    ) -> None:
        self._make_token = make_token
        self._encryption = encryption or EncryptionSettings()
        self._authority = authority
        self._store = store
        self._clock = clock
        self._settings = settings
        self._heartbeats = heartbeats
        self._growing = asyncio.Lock()
        """Serializes requests that add partitions: the number to add depends on the current number."""
        self._in_flight: list[CreateTopicCommand | AddPartitionsCommand] = []
        """Commands with assignments that are submitted and not answered yet."""

    async def carry_out(self, request: ChangeRequest, payload: memoryview, identity: ConnectionIdentity) -> Answer:
        """Carry out a request; raises as `submit` does, and `UnavailableError` before the cluster is formed.

        The principal is in the commands, so that the metadata's log says who asked.
        """
        command: Command[Any] | None = decode_payload(payload) if isinstance(request, messages.SubmitCommand) else None
        if not self._store.view().cluster_id and not isinstance(command, InitCluster):
            # Retriable, unlike the refusal of `apply`: the first primary is about to form the cluster.
            raise UnavailableError("not done: the cluster is not formed yet; retry", code="not_formed")
        match request:
            case messages.SubmitCommand():
                assert command is not None
                if self._heartbeats is not None:
                    self._heartbeats.upgrade.check(request)
                    if isinstance(command, RegisterBroker):  # before it counts: it may run an older program now
                        self._heartbeats.upgrade.record(command.broker_id, request)
                result = await self._store.submit(command)
                return messages.CommandSubmitted(index=self._index), (encode_result(result),)
            case messages.BrokerHeartbeatRequest():
                return await self._hear(request), ()
            case admin_messages.UpgradeCluster():
                return await self._manager.upgrade.carry_out(request), ()
            case messages.CreateTopicRequest():
                return await self._create_topic(request, request.owner or self._asker(identity)), ()
            case messages.AddPartitionsRequest():
                return await self._add_partitions(request, self._asker(identity)), ()
            case messages.RegisterProducerRequest():
                return await self._register_producer(request, identity), ()
            case messages.RegisterConsumerRequest():
                return await self._register_consumer(request, identity), ()
            case security_messages.CreateTokenRequest():
                return await self._create_token(request, self._asker(identity)), ()
            case security_messages.SignNode():
                return await self._sign_node(request, self._asker(identity)), ()
            case messages.RemoveBroker():
                await self._remove_vote(request.broker)
                return await self._submit_single(request, identity)
            case admin_messages.AddManager():
                await add_manager(self._store, request.node)
                return Done(index=self._index), ()
            case admin_messages.RemoveManager():
                await remove_manager(self._store, request.node)
                return Done(index=self._index), ()
            case _:
                return await self._submit_single(request, identity)

    def _asker(self, identity: ConnectionIdentity) -> str:
        """Return the principal for the metadata's log; none below the feature level that knows it."""
        return identity.owner if self._store.feature_level >= OWNERS_LEVEL else ""

    async def _submit_single(self, request: SingleRequest | AccessChange, identity: ConnectionIdentity) -> Answer:
        asker = self._asker(identity)
        if isinstance(request, AccessChange):
            await self._store.submit(access_command(request, now_ms=self._clock.wall_ms(), principal=asker))
            return Done(index=self._index), ()
        command = self._command(request, identity)
        if command is not None:
            await self._store.submit(msgspec.structs.replace(command, principal=asker) if asker else command)
        return Done(index=self._index), ()

    async def _create_token(self, request: security_messages.CreateTokenRequest, asker: str) -> Response:
        token = self._make_token()
        command = token_command(request, token, now_ms=self._clock.wall_ms(), principal=asker)
        await self._store.submit(command)
        return security_messages.TokenCreated(
            token_id=token.id, token=token.text, expires_ms=command.expires_ms, index=self._index
        )

    async def _sign_node(self, request: security_messages.SignNode, asker: str) -> Response:
        """Sign the certificate of the node that a join token is for; the token is deleted before it is returned."""
        user, node, hosts = parse_join_user(asker)
        if self._authority is None:
            raise ConflictError(
                "not done: the primary has no key of the certificate authority (security.ca_key_file): make the "
                "certificate with quiver security init",
                code="no_authority",
            )
        if NodeId(node) in self._store.view().brokers or NodeId(node) in self._store.members.voters:
            raise ConflictError(f"not done: node {node} exists; a new node needs an id of its own", code="node_exists")
        certificate = self._authority.issue(node, hosts, request.csr)
        now_ms = self._clock.wall_ms()
        await self._store.submit(DeleteUserCommand(now_ms=now_ms, principal=asker, user=user))
        return security_messages.NodeSigned(certificate=certificate, authority=self._authority.certificate)

    async def _remove_vote(self, node: NodeId) -> None:
        """Remove a node that is about to leave the cluster from the managers first.

        Its operator turns it off next; as a voter it would still count for majorities.
        """
        broker = self._store.view().brokers.get(node)
        is_leaving = broker is not None and broker.state in (BrokerState.DRAINED, BrokerState.DEAD)
        if is_leaving and node in self._store.members.voters:
            await remove_manager(self._store, node)

    def _command(self, request: SingleRequest, identity: ConnectionIdentity) -> Command[Any] | None:
        """Return the command of a request; None if there is nothing to change."""
        now_ms = self._clock.wall_ms()
        match request:
            case messages.ConfigureTopicRequest():
                return ConfigureTopicCommand(
                    now_ms=now_ms, topic=request.topic, retention=read_retention(request.retention)
                )
            case messages.DeleteTopicRequest():
                purge_ms = now_ms + self._settings.purge_delay_ms
                return DeleteTopicCommand(now_ms=now_ms, topic=request.topic, purge_ms=purge_ms)
            case messages.RestoreTopicRequest():
                return self._restore(request.topic, now_ms)
            case messages.DrainBroker():
                return self._drain(request, now_ms)
            case messages.RemoveBroker():
                return ChangeBrokerState(now_ms=now_ms, broker_id=request.broker, state=BrokerState.REMOVED)
            case messages.RebalanceBrokers():
                return ChangeRebalancing(now_ms=now_ms, is_rebalancing=True)
            case messages.ForgetClientRequest():
                return ForgetClientCommand(now_ms=now_ms, kind=EntityKind(request.kind), id=request.id)
            case admin_messages.PlaceHoldRequest():
                return _hold(request, now_ms, takes_over=self._may_take_over(identity, ResourceKind.CLUSTER))
            case admin_messages.ReleaseHoldRequest():
                return ReleaseHoldCommand(
                    now_ms=now_ms,
                    name=request.name,
                    topic_id=request.topic_id,
                    takes_over=self._may_take_over(identity, ResourceKind.CLUSTER),
                )
            case _:
                assert_never(request)

    # -- topics ----------------------------------------------------------------------------------

    async def _create_topic(self, request: messages.CreateTopicRequest, asker: str) -> messages.TopicCreated:
        _check_bounds(partitions=request.partitions, replicas=request.replicas)
        view = await self._store.read(linearizable=True)
        made = view.topic_made_by(request.request_id, request.topic)
        made = made or self._store.topic_requests.find(request.request_id, request.topic)  # purged since
        # Check both before placement, which may fail although nothing needs to be placed.
        if made is not None:
            topic_id, partitions, is_encrypted = made.topic_id, made.partitions, made.is_encrypted
        elif view.topic(request.topic) is not None:
            raise ConflictError(f"not done: topic {request.topic!r} exists already", code="topic_exists")
        else:
            is_encrypted = self._decide_encryption(request)
            place = partial(self._place, request, asker, is_encrypted=is_encrypted)
            created: CreateTopicResult = await self._submit_placed(place)
            topic_id, partitions = created.topic_id, created.partitions
        return messages.TopicCreated(
            topic_id=topic_id, partitions=partitions, index=self._index, is_encrypted=is_encrypted
        )

    def _decide_encryption(self, request: messages.CreateTopicRequest) -> bool:
        """Return whether a new topic is encrypted; refuse it early where no replica could ever be opened."""
        if not request.is_encrypted:
            return request.is_encrypted is None and self._encryption.encrypt_new_topics
        if not self._encryption.has_keys:
            raise ConflictError(
                f"not done: topic {request.topic!r} cannot be encrypted: the primary has no key; set "
                "encryption.key_file or encryption.key_command on every node",
                code="no_encryption_key",
            )
        return True

    def _place(self, request: messages.CreateTopicRequest, asker: str, *, is_encrypted: bool) -> CreateTopicCommand:
        view = self._store.view()
        replicas = default_replicas(view) if request.replicas is None else request.replicas
        wanted = default_replicas(view, self._store.members.voters) if request.replicas is None else replicas
        return CreateTopicCommand(
            now_ms=self._clock.wall_ms(),
            principal=asker,
            topic=request.topic,
            replicas=wanted,
            assignments=self._place_within_bounds(view, partitions=request.partitions, replicas=replicas),
            retention=read_retention(request.retention),
            request_id=request.request_id,
            is_encrypted=is_encrypted,
        )

    def _place_within_bounds(self, view: View, *, partitions: int, replicas: int) -> Assignments:
        """Place new partitions; refuse what would exceed the bounds of the cluster or of a broker."""
        waiting = (command.assignments for command in self._in_flight if not _is_applied(view, command))
        underway = tuple(chain.from_iterable(waiting))
        total, total_max = len(view.partitions) + len(underway) + partitions, self._settings.partitions_max
        if total > total_max:
            raise ConflictError(
                f"not done: the cluster would have {total} partitions, and at most {total_max} are allowed "
                "(manager.partitions_max); delete topics, or use fewer partitions",
                code="too_many_partitions",
            )
        assignments = place_topic(view, partitions=partitions, replicas=replicas, underway=underway)
        bound = self._settings.replicas_per_broker_max
        held = Counter(chain.from_iterable((*underway, *assignments)))
        for partition in view.partitions.values():
            held.update((*partition.replicas, *partition.learners))
        fullest, count = max(held.items(), key=itemgetter(1))
        if bound and count > bound:
            raise ConflictError(
                f"not done: broker {fullest} would hold {count} replicas, and at most {bound} are allowed "
                "(manager.replicas_per_broker_max, by default derived from the limit of open files); add brokers, "
                "delete topics, use fewer partitions, or raise the limit of open files",
                code="too_many_replicas",
            )
        return assignments

    async def _add_partitions(self, request: messages.AddPartitionsRequest, asker: str) -> Done:
        _check_bounds(partitions=request.partitions)
        async with self._growing:
            await self._submit_placed(partial(self._place_more, request, asker))
        return Done(index=self._index)

    def _place_more(self, request: messages.AddPartitionsRequest, asker: str) -> AddPartitionsCommand:
        view = self._store.view()
        topic = view.topic(request.topic)
        assignments: Assignments = ()  # `apply` refuses: unknown topic, or not more partitions than now
        if topic is not None and request.partitions > topic.partitions:
            added = request.partitions - topic.partitions
            replicas = min(topic.replicas, max(1, count_brokers(view)))
            assignments = self._place_within_bounds(view, partitions=added, replicas=replicas)
        return AddPartitionsCommand(
            now_ms=self._clock.wall_ms(),
            principal=asker,
            topic=request.topic,
            partitions=request.partitions,
            assignments=assignments,
        )

    async def _submit_placed(self, place: Callable[[], CreateTopicCommand | AddPartitionsCommand]) -> Any:
        """Submit a command with assignments; place again if one of the brokers was drained or lost meanwhile."""
        attempts = 0
        while True:
            attempts += 1
            command = place()
            try:
                with self._counting(command):
                    return await self._store.submit(command)
            except RequestError as error:
                if error.code != "broker_not_eligible" or attempts == PLACEMENTS_MAX:
                    raise

    @contextmanager
    def _counting(self, command: CreateTopicCommand | AddPartitionsCommand) -> Iterator[None]:
        """Count a command's assignments in concurrent placements until they are in the metadata."""
        self._in_flight.append(command)
        try:
            yield
        finally:
            self._in_flight.remove(command)

    def _restore(self, name: str, now_ms: int) -> RestoreTopicCommand:
        """Return the command that restores the newest deleted topic of a name."""
        found = [topic.topic_id for topic in self._store.view().deleted_topics() if topic.name == name]
        if not found:
            raise NotFoundError(f"not done: no deleted topic {name!r} to restore", code="unknown_topic")
        return RestoreTopicCommand(now_ms=now_ms, topic_id=found[-1])

    # -- brokers ---------------------------------------------------------------------------------

    def _drain(self, request: messages.DrainBroker, now_ms: int) -> Command[Any] | None:
        if request.is_undone:
            return UndrainBroker(now_ms=now_ms, broker_id=request.broker)
        broker = self._store.view().brokers.get(request.broker)
        if broker is not None and broker.is_draining and broker.state is not BrokerState.REMOVED:
            return None
        self._require_room(request.broker)
        return ChangeBrokerState(now_ms=now_ms, broker_id=request.broker, state=BrokerState.DRAINING)

    def _require_room(self, leaver: NodeId) -> None:
        """Refuse to drain a broker whose replicas have nowhere to go: it would drain forever."""
        view = self._store.view()
        broker = view.brokers.get(leaver)
        if broker is None or broker.is_unwanted:
            return  # `apply` refuses, or it is being drained already
        left = count_brokers(view) - 1
        for topic in view.active_topics():
            if topic.replicas > left and any(leaver in one.replicas for one in view.partitions_of(topic.topic_id)):
                raise ConflictError(
                    f"not done: broker {leaver} holds replicas of topic {topic.name!r}, which has {topic.replicas} "
                    f"replicas on different brokers, and only {left} would remain; add a broker first",
                    code="too_few_brokers",
                )

    async def _hear(self, request: messages.BrokerHeartbeatRequest) -> messages.HeartbeatReceived:
        manager = self._manager
        manager.upgrade.check(request)
        is_known = await manager.handle_heartbeat(request)
        if is_known:
            manager.upgrade.record(request.node, request)
        return messages.HeartbeatReceived(is_known=is_known, full_nodes=manager.full_nodes())

    # -- clients ---------------------------------------------------------------------------------

    async def _register_producer(
        self, request: messages.RegisterProducerRequest, identity: ConnectionIdentity
    ) -> messages.ProducerRegistered:
        view, asker = self._store.view(), self._asker(identity)
        if request.producer_id is None or request.producer_id in view.producers:
            for selection in request.topics:
                if view.topic(selection.topic) is None and request.creates_topics and self._settings.creates_topics:
                    await self._create_missing(selection.topic, identity)
        known = view.producers.get(request.producer_id) if request.producer_id is not None else None
        name = request.name or (client_name(known) if known is not None else "")
        registered = await self._store.submit(
            RegisterProducerCommand(
                now_ms=self._clock.wall_ms(),
                principal=asker,
                topics=_selections(request.topics),
                name=request.name,
                producer_id=request.producer_id,
                takes_over=self._may_take_over(identity, ResourceKind.PRODUCER, name),
            )
        )
        self._note_registered(EntityKind.PRODUCER, registered.producer_id)
        return messages.ProducerRegistered(
            producer_id=registered.producer_id, epoch=registered.epoch, index=self._index
        )

    def _may_take_over(self, identity: ConnectionIdentity, kind: ResourceKind, name: str = "") -> bool:
        """Return whether somebody may use a client of that name, or (`CLUSTER`) any hold, although another owns it."""
        verb = Verb.ADMIN if kind is ResourceKind.CLUSTER else Verb.CONFIGURE
        return self._store.feature_level >= OWNERS_LEVEL and identity.allows(verb, kind, name)

    async def _create_missing(self, topic: str, identity: ConnectionIdentity) -> None:
        """Create a topic with default settings; a concurrent creation of the same topic is fine."""
        if not identity.allows(Verb.CREATE, ResourceKind.TOPIC, topic):
            raise NotAllowedError(
                f"not done: topic {topic!r} does not exist, and {identity.principal} may not create it; ask an "
                "administrator for the topic or for a grant"
            )
        try:
            await self._create_topic(messages.CreateTopicRequest(topic=topic), self._asker(identity))
        except ConflictError as error:
            if error.code != "topic_exists":
                raise

    async def _register_consumer(
        self, request: messages.RegisterConsumerRequest, identity: ConnectionIdentity
    ) -> messages.ConsumerRegistered:
        known = self._store.view().consumers.get(request.consumer_id) if request.consumer_id is not None else None
        name = request.request_id if known is None else client_name(known)
        registered = await self._store.submit(
            RegisterConsumerCommand(
                now_ms=self._clock.wall_ms(),
                principal=self._asker(identity),
                topics=_selections(request.topics),
                consumer_id=request.consumer_id,
                start=StartFrom(request.start),
                request_id=request.request_id,
                takes_over=self._may_take_over(identity, ResourceKind.CONSUMER, name),
            )
        )
        self._note_registered(EntityKind.CONSUMER, registered.consumer_id)
        base = self._store.view().counters.session_base
        return messages.ConsumerRegistered(
            consumer_id=registered.consumer_id,
            index=self._index,
            session_index=Index(self._index + base) if base else Index(0),
        )

    def _note_registered(self, kind: EntityKind, id_: int) -> None:
        if self._heartbeats is not None:
            self._heartbeats.handle_registered(kind, id_)

    @property
    def _manager(self) -> HeartbeatHandler:
        if self._heartbeats is None:
            raise NotPrimaryError("not done: this node is not a manager")
        return self._heartbeats

    @property
    def _index(self) -> Index:
        """Return an index that covers everything submitted so far."""
        return self._store.applied_index


def _is_applied(view: View, command: CreateTopicCommand | AddPartitionsCommand) -> bool:
    """Return whether the metadata has the partitions of a submitted command, or will never have them."""
    topic = view.topic(command.topic)
    if isinstance(command, AddPartitionsCommand):
        return topic is None or topic.partitions >= command.partitions
    return topic is not None


def _selections(selections: tuple[messages.Selection, ...]) -> tuple[TopicSelection, ...]:
    return tuple(TopicSelection(selection.topic, selection.partitions) for selection in selections)


def _hold(request: admin_messages.PlaceHoldRequest, now_ms: int, *, takes_over: bool) -> PlaceHoldCommand:
    return PlaceHoldCommand(
        now_ms=now_ms,
        topic_id=request.topic_id,
        name=request.name,
        positions=tuple(HoldPosition(partition_id=part, first_offset=at) for part, at in sorted(request.offsets)),
        lasting_ms=request.lasting_ms,
        owner=request.owner,
        takes_over=takes_over,
    )


def _check_bounds(*, partitions: int, replicas: int | None = None) -> None:
    """Refuse, before placement, numbers that `apply` always refuses."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        message = f"not done: a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}"
        raise OutOfRangeError(message, code="bad_partition_count")
    if replicas is not None and not 1 <= replicas <= REPLICAS_MAX:
        raise OutOfRangeError(
            f"not done: a partition has 1 to {REPLICAS_MAX} replicas, not {replicas}", code="bad_replica_count"
        )
