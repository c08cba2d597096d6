"""The primary's control loop: after each metadata change, and periodically, submit the commands of `repairs`.

It keeps no state: the next step follows from the metadata alone, so it can stop anywhere and the next primary
continues. A refused command was planned from stale metadata; the next round plans again.

Only the primary runs it: `run` lasts for one term of leadership.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from quiver.clock import Clock
from quiver.config import ManagerSettings
from quiver.errors import OutcomeUnknownError, RequestError, UnavailableError
from quiver.logs import facts
from quiver.manager.repairs import plan_members, plan_repairs
from quiver.metadata import Command, MetadataStore, Table
from quiver.metadata.commands import command_name
from quiver.metadata.journal import describe
from quiver.tasks import timeout

logger = logging.getLogger(__name__)

GATHER_MS = 20
"""How long to collect changes before reconciling: most come in bursts."""
_MATTERS = frozenset((Table.BROKERS, Table.TOPICS, Table.PARTITIONS, Table.MOVES))
"""The tables that a plan depends on; changes of clients and heartbeats do not wake the loop."""


class Reconciler:
    """Reconciles the cluster with its desired state."""

    def __init__(self, store: MetadataStore, *, clock: Clock, settings: ManagerSettings) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
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
        plan = plan_repairs(self._store.view(), now_ms=self._clock.wall_ms(), settings=self._settings)
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

    def change_members(self) -> None:
        """Start the next membership change of the metadata group, if one is needed."""
        members = self._store.members
        target = plan_members(self._store.view(), members)
        if target is None or target == members:
            return
        try:
            self._store.change_members(voters=target.voters, learners=target.learners)
        except UnavailableError as error:
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
