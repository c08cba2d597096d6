"""Heartbeats of members that wait for a new assignment, on the node that received them.

Every node has the metadata: it waits for the member's row to change in its own copy. So a waiting heartbeat takes no
room on the connection to the primary, where nodes send their own heartbeats, and survives a change of the primary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quiver.metadata import Change, GroupMemberRow, MetadataStore, Table, View
from quiver.metadata.state import Counters, LogPosition
from quiver.model import ConsumerId
from quiver.tasks import timeout

MemberKey = tuple[ConsumerId, str]


class AssignmentWaiters:
    """Those who wait on one node; a listener of its metadata."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._waiting: dict[MemberKey, list[asyncio.Future[None]]] = {}
        store.machine.add_listener(self)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def wait_newer(self, key: MemberKey, seen: int, *, wait_ms: float) -> tuple[View, GroupMemberRow] | None:
        """Return a member, and the view it is from, once its assignment is newer than `seen`; None if it is not.

        None as well once it is no member. The node's metadata must have the member.
        """
        try:
            async with timeout(wait_ms / 1000):
                while True:
                    view = self._store.view()
                    member = view.group_members.get(key)
                    if member is None or self._store.is_closed:
                        return None
                    if member.version > seen:
                        return view, member
                    await self._wait(key)
        except TimeoutError:
            return None

    async def _wait(self, key: MemberKey) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(woken)
        try:
            await woken
        finally:
            waiting = self._waiting.get(key, [])
            if woken in waiting:
                waiting.remove(woken)
                if not waiting:
                    del self._waiting[key]

    # -- the metadata's listener -----------------------------------------------------------------

    def add(self, changes: Sequence[Change], _: Counters, __: LogPosition) -> None:
        """Wake those whose member changed."""
        if self._waiting:
            for change in changes:
                if change.table is Table.GROUP_MEMBERS:
                    self._wake(change.key)

    def replace(self, _: View) -> None:
        """Wake everybody: a snapshot was restored."""
        for key in list(self._waiting):
            self._wake(key)

    def _wake(self, key: MemberKey) -> None:
        for woken in self._waiting.pop(key, ()):
            if not woken.done():
                woken.set_result(None)
