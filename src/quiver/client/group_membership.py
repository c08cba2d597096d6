"""The membership of one consumer in a group: joining, signs of life, assignments, releasing and leaving.

`GroupMembership` runs on the loop of its `MembershipHost`, which is usually a thread of its own: neither a slow handler
nor a blocked event loop of the application stops the heartbeats. It owns the member's id and the last assignment; it
reads no record and moves no cursor. The consumer reads `view`, an immutable value that is replaced as a whole, from
its own loop, and is told of changes by `on_change`.

A member that expired joins again under a new id. What it owned before is lost: the partitions refuse its old epochs.
One whose group was deleted, or whose instance name another process has now, does not: its consumer fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from quiver.client.consumer_core import Place
from quiver.errors import (
    OutcomeUnknownError,
    QuiverError,
    RequestError,
    StorageError,
    UnavailableError,
)
from quiver.model import ConsumerId, Index
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.tasks import timeout
from quiver.wire.group_messages import (
    HEARTBEATS_PER_TIMEOUT,
    AssignedPartition,
    GroupAssignment,
    GroupHeartbeat,
    JoinGroup,
    LeaveGroup,
    PartitionEpoch,
)

logger = logging.getLogger(__name__)

ATTEMPT_MS_MIN: Final = 250
ATTEMPTS_PER_TIMEOUT: Final = 6
"""The part of the session timeout that an answer may take beyond the time that it waits for news, but at least
`ATTEMPT_MS_MIN`: a node that does not answer costs a third for the wait and a sixth, and there is time for another."""
IDLE_MS_MIN: Final = 50
"""Shortest interval between two heartbeats that bring nothing new, even if they are answered immediately."""


class MembershipView(msgspec.Struct, frozen=True, kw_only=True):
    """What a member knows of its membership."""

    member_id: str = ""
    joins: int = 0
    """How often it has joined; partitions of an earlier time are lost."""
    version: int = 0
    """The version of the assignment; 0: none has arrived since it joined."""
    owned: tuple[AssignedPartition, ...] = ()
    revoking: tuple[AssignedPartition, ...] = ()
    index: Index = Index(0)
    """The metadata index that a node must have applied to know this assignment."""
    failure: QuiverError | None = None
    """The error that ended the membership, such as a group that was deleted."""


class AssignmentChanges(NamedTuple):
    """What a consumer has to do to follow its assignment."""

    lost: tuple[Place, ...]
    """Held, but not its own any more: drop them; they cannot be committed."""
    revoked: tuple[AssignedPartition, ...]
    """Held, and asked for: finish, commit and release them."""
    unused: tuple[AssignedPartition, ...]
    """Not held, and asked for: release them at once."""
    granted: tuple[AssignedPartition, ...]
    """Not held at this epoch: begin there."""


def find_changes(held: Mapping[Place, int], view: MembershipView) -> AssignmentChanges:
    """Compare the partitions that a consumer holds, by epoch, with its assignment. Pure."""
    own = {(one.topic, one.partition_id): one for one in (*view.owned, *view.revoking)}
    lost = tuple(place for place, epoch in held.items() if place not in own or own[place].epoch != epoch)
    kept = held.keys() - set(lost)
    return AssignmentChanges(
        lost=lost,
        revoked=tuple(one for one in view.revoking if (one.topic, one.partition_id) in kept),
        unused=tuple(one for one in view.revoking if (one.topic, one.partition_id) not in kept),
        granted=tuple(one for one in view.owned if (one.topic, one.partition_id) not in kept),
    )


class GroupMembership:
    """Keep one member of a group alive; all methods run on the loop of the membership's host."""

    def __init__(
        self,
        router: Router,
        join: JoinGroup,
        *,
        on_change: Callable[[], object],
        is_abandoned: Callable[[], bool] = lambda: False,
        processing_ms_max: int | None = None,
    ) -> None:
        """Join with the subscription and settings of `join`; its member id is replaced.

        `is_abandoned` says whether the consumer can never be read again, which ends the membership.
        """
        attempt_ms = max(ATTEMPT_MS_MIN, join.session_timeout_ms // ATTEMPTS_PER_TIMEOUT)
        options = msgspec.structs.replace(
            router.options, attempt_timeout_ms=min(router.options.attempt_timeout_ms, attempt_ms)
        )
        self.view = MembershipView()
        self.group_id: ConsumerId | None = None
        self.busy_since_ms: int | None = None
        """When the application received records that it has not finished; set by the consumer, None: all finished."""
        self.turned_ms = router.clock.monotonic_ms()
        """When the last heartbeat that ended was begun. In a process that runs it is not old; if it is, the answer may
        have waited as long as the process stood still, and says nothing about now."""
        self._router = router.with_options(options)
        self._join, self._on_change, self._is_abandoned = join, on_change, is_abandoned
        self._processing_ms_max = processing_ms_max
        self._heartbeat_ms = join.session_timeout_ms // HEARTBEATS_PER_TIMEOUT
        self._released: dict[Place, AssignedPartition] = {}
        self._failure_count = 0
        self._is_leaving = False
        self._is_out = False
        self._resumed = asyncio.Event()

    # -- called through the host -----------------------------------------------------------------

    async def join(self, deadline: Deadline) -> None:
        """Become a member, under a new id."""
        request = msgspec.structs.replace(self._join, member_id=f"{self._router.rng.randrange(1 << 62):016x}")
        joined, _ = await self._router.ask(request, deadline=deadline)
        self._router.cache.record_index(joined.index)
        self.group_id, self._heartbeat_ms = joined.group_id, max(1, joined.heartbeat_ms)
        self._released.clear()
        self._set(MembershipView(member_id=request.member_id, joins=self.view.joins + 1, index=joined.index))

    async def subscribe(self, topics: Sequence[str], deadline: Deadline) -> None:
        """Change the topics of the subscription; partitions of those that stay do not move for it."""
        self._join = msgspec.structs.replace(self._join, topics=tuple(topics))
        if self.view.member_id:
            request = msgspec.structs.replace(self._join, member_id=self.view.member_id)
            joined, _ = await self._router.ask(request, deadline=deadline)
            self._router.cache.record_index(joined.index)

    async def run(self) -> None:
        """Send heartbeats until the member leaves, joining again when it is not known any more."""
        while not self._is_leaving and self.view.failure is None:
            if self._is_abandoned():
                await self.leave(self._router.deadline())
            elif self._is_out:
                await self._wait_resumed()
            elif not self.view.member_id:
                await self._rejoin()
            elif self._is_overdue():
                await self._step_out()
            else:
                await self._beat(wait_ms=self._wait_ms())

    async def release(self, partitions: Sequence[AssignedPartition]) -> None:
        """Tell the coordinator, in a heartbeat of its own, that partitions are not used any more."""
        self._released |= {(one.topic, one.partition_id): one for one in partitions}
        with suppress(QuiverError):  # the next heartbeat repeats it
            await self._ask_heartbeat(wait_ms=0)

    async def leave(self, deadline: Deadline) -> None:
        """Leave the group: its partitions are free at once. Idempotent."""
        is_member, self._is_leaving = bool(self.view.member_id) and not self._is_leaving, True
        if is_member and self.group_id is not None:
            request = LeaveGroup(group_id=self.group_id, member_id=self.view.member_id)
            done, _ = await self._router.ask(request, deadline=deadline)
            self._set(MembershipView(joins=self.view.joins, index=done.index))

    async def check(self) -> None:
        """Ask at once whether it is still a member; the consumer is told that there is an answer."""
        if self.view.member_id:
            await self._beat(wait_ms=0)
        self._on_change()

    async def resume(self) -> None:
        """Join again if the application took longer than it may and has asked for records since."""
        self._resumed.set()

    # -- heartbeats ------------------------------------------------------------------------------

    async def _beat(self, *, wait_ms: int) -> None:
        """Send one heartbeat and take its answer."""
        begun_ms, before = self._router.clock.monotonic_ms(), self.view
        try:
            await self._ask_heartbeat(wait_ms=wait_ms)
        except RequestError as error:
            if error.code != "unknown_member":
                self._fail(error)
            elif self.view.member_id == before.member_id:
                self._lose_all()
        except (UnavailableError, OutcomeUnknownError, StorageError) as error:
            facts = {"group": self._join.group, "error": str(error)}
            logger.info("a heartbeat of a group member was not answered, it is repeated", extra={"facts": facts})
            self._prefer_another_node()
        finally:
            self._turn(begun_ms)  # last: the consumer trusts its assignment again from here on
        passed_ms = self._router.clock.monotonic_ms() - begun_ms
        if wait_ms and self.view is before and passed_ms < IDLE_MS_MIN:
            await asyncio.sleep((IDLE_MS_MIN - passed_ms) / 1000)

    async def _ask_heartbeat(self, *, wait_ms: int) -> None:
        assert self.group_id is not None, "a member has joined"
        view = self.view
        request = GroupHeartbeat(
            group_id=self.group_id,
            member_id=view.member_id,
            seen=view.version,
            released=tuple(
                PartitionEpoch(one.topic_id, one.partition_id, one.epoch) for one in self._released.values()
            ),
            wait_ms=wait_ms,
        )
        router = self._router
        attempt_ms = router.options.attempt_timeout_ms + wait_ms
        router = router.with_options(msgspec.structs.replace(router.options, attempt_timeout_ms=attempt_ms))
        answer, _ = await router.ask(request, deadline=router.deadline(attempt_ms))
        if view.member_id == self.view.member_id and answer.version >= self.view.version:
            self._take(answer)

    def _prefer_another_node(self) -> None:
        """Ask another node next: the one that did not answer may accept requests and never answer one."""
        addresses = sorted(self._router.cache.addresses())
        self._failure_count += 1
        self._router.cache.prefer(addresses[self._failure_count % len(addresses)])

    def _turn(self, begun_ms: int) -> None:
        """Record the end of a heartbeat; tell the consumer if it may have doubted its membership."""
        before_ms, self.turned_ms = self.turned_ms, max(self.turned_ms, begun_ms)
        if self._router.clock.monotonic_ms() - before_ms > self._join.session_timeout_ms:
            self._on_change()

    def _take(self, answer: GroupAssignment) -> None:
        asked = {(one.topic, one.partition_id): one.epoch for one in answer.revoking}
        self._released = {at: one for at, one in self._released.items() if asked.get(at) == one.epoch}
        if answer.version != self.view.version:
            self._set(
                MembershipView(
                    member_id=self.view.member_id,
                    joins=self.view.joins,
                    version=answer.version,
                    owned=answer.owned,
                    revoking=answer.revoking,
                    index=answer.index,
                )
            )

    def _lose_all(self) -> None:
        """Stop being a member, with all partitions; `run` joins again."""
        self._set(MembershipView(joins=self.view.joins, index=self.view.index))

    async def _rejoin(self) -> None:
        facts = {"group": self._join.group}
        logger.warning("a group member was not known any more and joins again", extra={"facts": facts})
        try:
            await self.join(self._router.deadline())
        except (UnavailableError, OutcomeUnknownError, StorageError):
            pass  # repeated by `run`: the router has waited between its attempts
        except RequestError as error:
            self._fail(error)

    def _wait_ms(self) -> int:
        """Return how long a heartbeat may wait: less if the application's time is over before the next one."""
        left_ms = self._processing_left_ms()
        return self._heartbeat_ms if left_ms is None else max(1, min(self._heartbeat_ms, left_ms))

    # -- the application's time ------------------------------------------------------------------

    def _processing_left_ms(self) -> int | None:
        busy_since_ms = self.busy_since_ms
        if self._processing_ms_max is None or busy_since_ms is None:
            return None
        return busy_since_ms + self._processing_ms_max - self._router.clock.monotonic_ms()

    def _is_overdue(self) -> bool:
        left_ms = self._processing_left_ms()
        return left_ms is not None and left_ms <= 0

    async def _step_out(self) -> None:
        """Leave until the application asks for records again: it is stuck, and others continue its work."""
        facts = {"group": self._join.group, "max_processing_ms": self._processing_ms_max}
        logger.warning("a group member processes its records for too long and leaves the group", extra={"facts": facts})
        assert self.group_id is not None, "a member has joined"
        request = LeaveGroup(group_id=self.group_id, member_id=self.view.member_id)
        with suppress(UnavailableError, OutcomeUnknownError, StorageError):  # then it expires
            await self._router.ask(request, deadline=self._router.deadline())
        self._is_out = True
        self._resumed.clear()
        self._lose_all()

    async def _wait_resumed(self) -> None:
        with suppress(TimeoutError):
            async with timeout(self._heartbeat_ms / 1000):
                await self._resumed.wait()
        self._is_out = not self._resumed.is_set() and self.busy_since_ms is not None

    # -- internals -------------------------------------------------------------------------------

    def _fail(self, error: QuiverError) -> None:
        self._set(MembershipView(joins=self.view.joins, index=self.view.index, failure=error))

    def _set(self, view: MembershipView) -> None:
        self.view = view
        self._on_change()
