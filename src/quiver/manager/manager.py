"""A manager: while it is the primary, it handles heartbeats, reconciles the cluster, coordinates consumer groups, and
forms the cluster the first time.

`Manager` owns only the tasks of that work, which start and end with each term of leadership. A replica manager runs no
tasks here: it votes, follows the log and is ready to take over.

`Reconciler` is the primary's control loop: after each metadata change, and periodically, it submits the commands of
`repairs`. It keeps no state: the next step follows from the metadata alone, so it can stop anywhere and the next
primary continues. A refused command was planned from stale metadata; the next round plans again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec

from quiver.clock import Clock
from quiver.config import ManagerSettings
from quiver.errors import OutcomeUnknownError, RequestError, UnavailableError
from quiver.faults import supervise
from quiver.logs import facts
from quiver.manager.group_coordinator import GroupCoordinator, GroupsStatus
from quiver.manager.liveness import Liveness
from quiver.manager.repairs import plan_members, plan_repairs
from quiver.manager.upgrade import ClusterUpgrade
from quiver.metadata import (
    BrokerRow,
    BrokerState,
    Command,
    EntityKind,
    InitCluster,
    MetadataStore,
    NotPrimaryError,
    Table,
)
from quiver.metadata.commands import command_name
from quiver.metadata.journal import describe
from quiver.model import NodeId
from quiver.tasks import timeout
from quiver.wire.messages import BrokerHeartbeatRequest

logger = logging.getLogger(__name__)

GATHER_MS = 20
"""How long to collect changes before reconciling: most come in bursts."""
_MATTERS = frozenset((Table.BROKERS, Table.TOPICS, Table.PARTITIONS, Table.MOVES))
"""The tables that a plan depends on; changes of clients and heartbeats do not wake the loop."""


class Reconciler:
    """Reconciles the cluster with its desired state."""

    def __init__(
        self, store: MetadataStore, *, clock: Clock, settings: ManagerSettings, is_emptied: Callable[[BrokerRow], bool]
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._is_emptied = is_emptied
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            while True:
                self._changed.clear()
                self.change_members()
                await self.reconcile()
                await self._wait()

    async def reconcile(self) -> None:
        """Plan and submit the current repairs once."""
        view, now_ms = self._store.view(), self._clock.wall_ms()
        plan = plan_repairs(view, now_ms=now_ms, settings=self._settings, is_emptied=self._is_emptied)
        for repair in plan:
            command: Command[Any] = repair
            subject, broker = describe(repair)
            known = {"command": command_name(repair), "subject": subject, "broker": broker}
            try:
                await self._store.submit(command)
            except RequestError as error:
                logger.debug("repair refused", extra=facts(**known, code=error.code))
            except (UnavailableError, OutcomeUnknownError):
                return
            else:
                logger.info("repair made", extra=facts(**known))

    def reconcile_soon(self) -> None:
        """Reconcile without waiting for a change of the metadata or the interval."""
        self._changed.set()

    def change_members(self) -> None:
        """Start the next membership change of the metadata group, if one is needed."""
        members = self._store.members
        target = plan_members(self._store.view(), members)
        if target is None or target == members:
            return
        try:
            self._store.change_members(voters=target.voters, learners=target.learners)
        except (UnavailableError, OutcomeUnknownError) as error:
            logger.debug("metadata members not changed yet", extra=facts(target=target, reason=error.message))
        except RequestError as error:
            logger.warning("metadata members not changed", extra=facts(target=target, reason=error.message))
        else:
            logger.info("metadata members changed", extra=facts(target=target))

    async def _watch(self) -> None:
        async for changed in self._store.watch(self._store.applied_index):
            if changed.is_reset or any(change.table in _MATTERS for change in changed.changes):
                self._changed.set()

    async def _wait(self) -> None:
        try:
            async with timeout(self._settings.reconcile_interval_ms / 1000):
                await self._changed.wait()
                await asyncio.sleep(GATHER_MS / 1000)
        except TimeoutError:
            pass


FORM_RETRY_MS = 100
"""Delay before another attempt to form the cluster."""


class ManagerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a manager."""

    is_primary: bool
    terms: int
    """How many times it became the primary since the start of this process."""
    brokers: int
    brokers_alive: int
    moves: int
    is_rebalancing: bool
    members: tuple[NodeId, ...]
    """The managers that vote."""
    groups: GroupsStatus | None = None
    """Only the primary knows it."""


class Manager:
    """One manager. Use as ``async with`` while its store has a member attached."""

    def __init__(self, store: MetadataStore, *, clock: Clock, settings: ManagerSettings, cluster_id: str) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._cluster_id = cluster_id
        self.upgrade = ClusterUpgrade(store, clock=clock, report_ms_max=settings.heartbeat_interval_ms)
        self._liveness: Liveness | None = None
        self._groups: GroupCoordinator | None = None
        self._terms = 0
        self._work: asyncio.Task[None]
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        """Start to wait for leadership."""
        await self._tasks.__aenter__()
        self._work = self._tasks.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; the next primary continues unfinished work."""
        self._work.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    async def handle_heartbeat(self, heartbeat: BrokerHeartbeatRequest) -> bool:
        """Handle a heartbeat; return whether its sender is registered with this identity.

        Raises:
            NotPrimaryError: not done; this manager is not the primary, or not yet.
            UnavailableError: not done; the reported leaders are not in the metadata.
            OutcomeUnknownError: the reported leaders may be in the metadata.
        """
        if self._liveness is None:
            raise NotPrimaryError("not done: this manager is not the primary", leader=self._store.primary)
        return await self._liveness.handle_heartbeat(heartbeat)

    def handle_registered(self, kind: EntityKind, id_: int) -> None:
        """Count a registration as a sign of life."""
        if self._liveness is not None:
            self._liveness.expiry.note_alive(kind, id_)

    @property
    def groups(self) -> GroupCoordinator:
        """Return the coordinator of consumer groups.

        Raises:
            NotPrimaryError: not done; this manager is not the primary, or not yet.
        """
        if self._groups is None:
            raise NotPrimaryError("not done: this manager is not the primary", leader=self._store.primary)
        return self._groups

    def full_nodes(self) -> tuple[NodeId, ...]:
        """Return the living brokers whose disk is nearly full; none unless this manager is the primary."""
        return () if self._liveness is None else self._liveness.full_nodes()

    def status(self) -> ManagerStatus:
        """Return a snapshot for people and metrics."""
        view = self._store.view()
        brokers = [broker for broker in view.brokers.values() if broker.state is not BrokerState.REMOVED]
        return ManagerStatus(
            is_primary=self._store.is_primary,
            terms=self._terms,
            brokers=len(brokers),
            brokers_alive=sum(broker.state not in (BrokerState.DEAD, BrokerState.SUSPECT) for broker in brokers),
            moves=len(view.moves),
            is_rebalancing=view.counters.is_rebalancing,
            members=self._store.members.voters,
            groups=None if self._groups is None else self._groups.status(),
        )

    # -- work ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._store.is_closed:
            await self._store.wait_primary(is_primary=True)
            self._terms += 1
            logger.info("manager is primary", extra=facts(index=self._store.applied_index))
            await self._lead()
            logger.info("manager is no longer primary", extra=facts(primary=self._store.primary))

    async def _lead(self) -> None:
        """Do the primary's work until leadership ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(supervise("primary", self._serve))
                await self._store.wait_primary(is_primary=False)
                work.cancel()
        finally:
            self._liveness = self._groups = None
            self.upgrade.forget()

    async def _serve(self) -> None:
        await self._form()
        self._liveness = Liveness(self._store, clock=self._clock, settings=self._settings)
        note_alive = partial(self._liveness.expiry.note_alive, EntityKind.CONSUMER)
        self._groups = GroupCoordinator(self._store, clock=self._clock, note_alive=note_alive)
        reconciler = Reconciler(
            self._store, clock=self._clock, settings=self._settings, is_emptied=self._liveness.is_emptied
        )
        self._liveness.on_emptied = reconciler.reconcile_soon
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._liveness.run())
            tasks.create_task(self._liveness.expiry.run())
            tasks.create_task(reconciler.run())
            tasks.create_task(self._groups.run())

    async def _form(self) -> None:
        """Assign the cluster id if the cluster has none yet."""
        while not self._store.view().cluster_id:
            command = InitCluster(
                now_ms=self._clock.wall_ms(), cluster_id=self._cluster_id, feature_level=self._store.level_max
            )
            try:
                await self._store.submit(command)
            except (UnavailableError, OutcomeUnknownError):
                await asyncio.sleep(FORM_RETRY_MS / 1000)
            else:
                logger.info("cluster formed", extra=facts(cluster_id=self._cluster_id))
