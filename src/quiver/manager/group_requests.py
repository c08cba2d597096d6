"""The primary's handler of requests of consumer groups; `group_coordinator` does what outlasts a request.

Called only on a node that believes to be the primary. Joins, and changes by operators, are one command each; `apply`
refuses what is invalid by stable code.
"""

from __future__ import annotations

import re
from typing import Any, assert_never, get_args

import msgspec

from quiver.clock import Clock
from quiver.errors import NotAllowedError, NotFoundError, OutOfRangeError
from quiver.groups.settings import DEAD_LETTERS_PREFIX, QueueSettings, dead_letter_topic_of, find_dead_letter_fault
from quiver.manager.describe_groups import describe_assignment, find_topics
from quiver.manager.group_coordinator import GroupCoordinator
from quiver.metadata import (
    ConfigureGroupCommand,
    DeleteGroupCommand,
    GroupKind,
    JoinGroupCommand,
    MetadataStore,
    RestartGroupCommand,
    StartFrom,
    TopicSelection,
)
from quiver.metadata.clients import OWNERS_LEVEL
from quiver.model import Index
from quiver.security.identity import ConnectionIdentity
from quiver.security.permissions import ResourceKind, Verb
from quiver.wire.group_messages import (
    HEARTBEATS_PER_TIMEOUT,
    ConfigureGroup,
    DeleteGroup,
    GroupConfigured,
    GroupHeartbeat,
    GroupJoined,
    GroupRestarted,
    JoinGroup,
    LeaveGroup,
    QueueSettingsChange,
    RestartGroup,
)
from quiver.wire.requests import Done, Response

GroupChange = JoinGroup | GroupHeartbeat | LeaveGroup | ConfigureGroup | DeleteGroup | RestartGroup
"""Requests that only the primary serves."""
GROUP_CHANGES: tuple[type[Any], ...] = get_args(GroupChange)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class GroupRequestHandler:
    """Carries out requests of groups on the primary."""

    def __init__(self, store: MetadataStore, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def carry_out(
        self, request: GroupChange, identity: ConnectionIdentity, coordinator: GroupCoordinator
    ) -> Response:
        """Carry out a request, without waiting for changes; raises as `MetadataStore.submit` and `GroupCoordinator`."""
        match request:
            case GroupHeartbeat():
                return describe_assignment(*await coordinator.handle_heartbeat(request, identity))
            case JoinGroup():
                return await self._join(request, identity, coordinator)
            case LeaveGroup():
                await coordinator.handle_leave((request.group_id, request.member_id))
                return Done(index=self._index)
            case ConfigureGroup():
                return await self._configure(request, identity)
            case DeleteGroup():
                await self._store.submit(
                    DeleteGroupCommand(
                        now_ms=self._clock.wall_ms(),
                        principal=self._asker(identity),
                        group=request.group,
                        is_forced=request.is_forced,
                    )
                )
                return Done(index=self._index)
            case RestartGroup():
                return await self._restart(request, identity)
            case _:
                assert_never(request)

    async def _join(
        self, request: JoinGroup, identity: ConnectionIdentity, coordinator: GroupCoordinator
    ) -> GroupJoined:
        _check_name(request.group)
        if request.kind == "queue":
            self._check_dead_letters(request, None, identity)
        registered = await self._store.submit(
            JoinGroupCommand(
                now_ms=self._clock.wall_ms(),
                principal=self._asker(identity),
                group=request.group,
                member_id=request.member_id,
                topics=_selections(request.topics),
                pattern=request.pattern,
                instance=request.instance,
                rack=request.rack,
                session_timeout_ms=request.session_timeout_ms,
                start=StartFrom(request.start),
                group_kind=GroupKind(request.kind),
                client=request.client,
                takes_over=self._may_take_over(identity, request.group),
            )
        )
        group_id = registered.consumer_id
        heartbeat_ms = 0
        if request.kind == "stream":
            heartbeat_ms = request.session_timeout_ms // HEARTBEATS_PER_TIMEOUT
            coordinator.handle_joined((group_id, request.member_id), identity)
        return GroupJoined(group_id=group_id, index=self._index, heartbeat_ms=heartbeat_ms)

    async def _configure(self, request: ConfigureGroup, identity: ConnectionIdentity) -> GroupConfigured:
        _check_name(request.group)
        settings = self._new_settings(request.group, request.settings)
        self._check_dead_letters(request, settings, identity)
        configured = await self._store.submit(
            ConfigureGroupCommand(
                now_ms=self._clock.wall_ms(),
                principal=self._asker(identity),
                group=request.group,
                topics=_selections(request.topics),
                start=StartFrom(request.start),
                group_kind=None if request.kind is None else GroupKind(request.kind),
                settings=settings,
                takes_over=self._may_take_over(identity, request.group),
            )
        )
        return GroupConfigured(group_id=configured.consumer_id, index=self._index)

    def _new_settings(self, name: str, change: QueueSettingsChange) -> QueueSettings | None:
        """Return the settings of a queue with a change; None if nothing changes.

        Raises:
            OutOfRangeError: not done; a setting is out of its range.
        """
        given = {key: value for key, value in msgspec.structs.asdict(change).items() if value is not None}
        if not given:
            return None
        known, _ = self._find_queue(name)
        try:
            return msgspec.convert(msgspec.structs.asdict(known) | given, QueueSettings)
        except msgspec.ValidationError as error:
            raise OutOfRangeError(
                f"not done: a setting of the queue is out of range: {error}", code="bad_group"
            ) from None

    def _find_queue(self, name: str) -> tuple[QueueSettings, tuple[str, ...]]:
        """Return a queue's settings and topics; those of a new one if there is none."""
        view = self._store.view()
        consumer = view.consumer(name)
        if consumer is None:
            return QueueSettings(), ()
        group = view.consumer_groups.get(consumer.consumer_id)
        return QueueSettings() if group is None else group.settings, find_topics(view, consumer)

    def _check_dead_letters(
        self, request: JoinGroup | ConfigureGroup, settings: QueueSettings | None, identity: ConnectionIdentity
    ) -> None:
        """Raise an error if dead letters of a queue with further topics, and new settings, had no place.

        Raises:
            OutOfRangeError: the settings name a place that cannot be.
            NotAllowedError: the topic that they would go to by default exists, and is not the asker's to write.
        """
        name, (known, registered) = request.group, self._find_queue(request.group)
        wanted = settings or known
        topics = (*registered, *request.topics)
        if fault := find_dead_letter_fault(wanted, topics):
            message = f"not done: dead_letter_topic of queue {name!r} is not valid: {fault}; choose another topic"
            raise OutOfRangeError(message, code="bad_group")
        is_queue = self._is_queue(name)
        if wanted.dead_letter_topic or not (is_queue or request.kind == "queue"):
            return
        checked = registered if is_queue and not known.dead_letter_topic else ()
        for topic in topics:
            if topic not in checked:
                self._check_default(name, dead_letter_topic_of(wanted, topic=topic, group=name), identity)

    def _check_default(self, group: str, name: str, identity: ConnectionIdentity) -> None:
        """Raise `NotAllowedError` if the topic to which a queue's dead letters go by default exists, and is another's.

        The leaders of partitions write them on their own authority, and the names of different groups can lead to one
        name. A queue uses what the asker may write, what was made for the queue itself, and for others of its owner.
        """
        view = self._store.view()
        topic, consumer = view.topic(name), view.consumer(group)
        if topic is None or identity.allows(Verb.WRITE, ResourceKind.TOPIC, name):
            return
        owner = identity.owner if consumer is None else consumer.owner
        is_owners = bool(owner) and topic.owner == owner and topic.request_id.startswith(DEAD_LETTERS_PREFIX)
        is_own = consumer is not None and topic.request_id.startswith(f"{DEAD_LETTERS_PREFIX}{consumer.consumer_id}/")
        if not is_own and not is_owners:
            raise NotAllowedError(
                f"not done: dead letters of queue {group!r} would go to topic {name!r}, which exists, and "
                f"{identity.principal} may not write it; choose another name for the group, or ask for a grant"
            )

    def _is_queue(self, name: str) -> bool:
        view = self._store.view()
        consumer = view.consumer(name)
        group = None if consumer is None else view.consumer_groups.get(consumer.consumer_id)
        return group is not None and group.kind is GroupKind.QUEUE

    async def _restart(self, request: RestartGroup, identity: ConnectionIdentity) -> GroupRestarted:
        if self._store.view().consumer(request.group) is None:
            raise NotFoundError(f"not done: unknown group {request.group!r}", code="unknown_group")
        restarted = await self._store.submit(
            RestartGroupCommand(
                now_ms=self._clock.wall_ms(),
                principal=self._asker(identity),
                group=request.group,
                pause_ms=request.pause_ms,
            )
        )
        return GroupRestarted(group_id=restarted.group_id, session=restarted.session, index=self._index)

    def _asker(self, identity: ConnectionIdentity) -> str:
        return identity.owner if self._store.feature_level >= OWNERS_LEVEL else ""

    def _may_take_over(self, identity: ConnectionIdentity, name: str) -> bool:
        """Return whether somebody may use a group although another one owns it."""
        return identity.allows(Verb.CONFIGURE, ResourceKind.CONSUMER, name)

    @property
    def _index(self) -> Index:
        """Return an index that covers everything submitted so far."""
        return self._store.applied_index


def _check_name(group: str) -> None:
    if _CONTROL.search(group):
        message = f"not done: the name of group {group!r:.80} has control characters; leave them out"
        raise OutOfRangeError(message, code="bad_group")


def _selections(topics: tuple[str, ...]) -> tuple[TopicSelection, ...]:
    return tuple(TopicSelection(topic) for topic in topics)
