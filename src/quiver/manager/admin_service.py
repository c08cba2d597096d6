"""Handles requests about the cluster on every node.

Reads are served from this node's own copy of the metadata, at most `metadata.staleness_ms_max` old; linearizable reads
by the primary. Changes are made by the primary (`change_handler`); any other node forwards them (`node_router`). The
service keeps no state, but for heartbeats of members of groups that wait for a new assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, get_args

import msgspec

from quiver.clock import Clock
from quiver.config import EncryptionSettings, ManagerSettings
from quiver.errors import NotAllowedError, UnavailableError
from quiver.manager import describe
from quiver.manager.assignment_waiters import AssignmentWaiters
from quiver.manager.change_handler import ChangeHandler, ChangeRequest, HeartbeatHandler
from quiver.manager.describe_groups import describe_assignment, describe_groups
from quiver.manager.group_requests import GROUP_CHANGES, GroupChange, GroupRequestHandler
from quiver.manager.node_claims import check_sender
from quiver.manager.node_router import NodeRouter
from quiver.metadata import MetadataStore, NotPrimaryError
from quiver.metadata.commands import decode_payload
from quiver.security import PrincipalKind
from quiver.security.certificates import Authority
from quiver.security.tokens import Token, new_token
from quiver.tasks import gather_in_steps
from quiver.wire.admin_messages import ClientsFound, ListClients, ListHolds, ListManagers, ListMoves
from quiver.wire.group_messages import HEARTBEAT_WAIT_MS_MAX, DescribeGroups, GroupAssignment, GroupHeartbeat
from quiver.wire.messages import BrokerHeartbeatRequest, GetMetadata, SubmitCommand
from quiver.wire.requests import Request
from quiver.wire.serving import Answer, Caller, RequestHandler


class AdminService:
    """One node's answers about the cluster. `heartbeats` is None on nodes that are no managers."""

    def __init__(
        self,
        store: MetadataStore,
        router: NodeRouter,
        *,
        clock: Clock,
        settings: ManagerSettings,
        heartbeats: HeartbeatHandler | None = None,
        authority: Authority | None = None,
        encryption: EncryptionSettings | None = None,
        make_token: Callable[[], Token] = new_token,
    ) -> None:
        self._store = store
        self._router = router
        self._clock = clock
        self._settings = settings
        self._heartbeats = heartbeats
        self._groups = GroupRequestHandler(store, clock=clock)
        self._waiters = AssignmentWaiters(store)
        self._changes = ChangeHandler(
            store,
            clock=clock,
            settings=settings,
            heartbeats=heartbeats,
            authority=authority,
            encryption=encryption,
            make_token=make_token,
        )

    def handlers(self) -> dict[type[Request[Any]], RequestHandler]:
        """Return the handlers of the requests that any node serves, for `dispatch`."""
        reads: dict[type[Request[Any]], RequestHandler] = {
            GetMetadata: self._get_metadata,
            ListClients: self._list_clients,
            ListMoves: self._list_moves,
            ListManagers: self._list_managers,
            ListHolds: self._list_holds,
            DescribeGroups: self._describe_groups,
        }
        groups: dict[type[Request[Any]], RequestHandler] = dict.fromkeys(GROUP_CHANGES, self._change_group)
        groups[GroupHeartbeat] = self._group_heartbeat
        return reads | groups | dict.fromkeys(get_args(ChangeRequest), self._change)

    async def _get_metadata(self, caller: Caller, request: GetMetadata, payload: memoryview) -> Answer:
        if request.is_linearizable:
            # Forwarded before any wait for `known_index`: only the primary's index counts, this node may lag behind.
            return await self._router.forward(
                request, payload, deadline_ms=caller.deadline_ms, locally=partial(self._read_current, request)
            )
        if request.known_index > self._store.applied_index:
            await self._store.wait_known(request.known_index, caller.wait_ms(self._clock.monotonic_ms()))
        view = self._store.view() if request.is_stale_ok else await self._store.read()
        return describe.describe_metadata(view, request, primary=self._store.primary), ()

    async def _list_clients(self, _: Caller, request: ListClients, __: memoryview) -> Answer:
        view = await self._store.read()
        now_ms, alive_ms = self._clock.wall_ms(), self._settings.client_alive_ms
        parts = describe.describe_clients(view, request, now_ms=now_ms, alive_ms=alive_ms)
        return ClientsFound(clients=tuple(chain.from_iterable(await gather_in_steps(parts)))), ()

    async def _list_moves(self, _: Caller, __: ListMoves, ___: memoryview) -> Answer:
        return describe.describe_moves(await self._store.read()), ()

    async def _list_managers(self, _: Caller, __: ListManagers, ___: memoryview) -> Answer:
        store = self._store  # readable without a primary: operators need it most then
        is_changing = store.members != store.committed_members or store.members.is_joint
        voters = store.members.voters
        return describe.describe_managers(store.view(), voters, primary=store.primary, is_changing=is_changing), ()

    async def _list_holds(self, _: Caller, __: ListHolds, ___: memoryview) -> Answer:
        return describe.describe_holds(await self._store.read()), ()

    async def _describe_groups(self, _: Caller, request: DescribeGroups, __: memoryview) -> Answer:
        return describe_groups(await self._store.read(), request), ()

    async def _change_group(self, caller: Caller, request: GroupChange, payload: memoryview) -> Answer:
        return await self._router.forward(
            request,
            payload,
            deadline_ms=caller.deadline_ms,
            locally=partial(self._change_group_here, caller, request),
            on_behalf_of="" if caller.principal.kind is PrincipalKind.NODE else caller.identity.on_behalf_of,
        )

    async def _change_group_here(self, caller: Caller, request: GroupChange) -> Answer:
        if self._heartbeats is None:
            raise NotPrimaryError("not done: this node is not a manager")
        return await self._groups.carry_out(request, caller.identity, self._heartbeats.groups), ()

    async def _group_heartbeat(self, caller: Caller, request: GroupHeartbeat, payload: memoryview) -> Answer:
        """Pass a heartbeat to the primary; wait here, not there, if the member has seen its assignment."""
        begun_ms = self._clock.monotonic_ms()
        answer, parts = await self._change_group(caller, msgspec.structs.replace(request, wait_ms=0), payload)
        assert isinstance(answer, GroupAssignment)
        now_ms = self._clock.monotonic_ms()
        end_ms = begun_ms + min(request.wait_ms, HEARTBEAT_WAIT_MS_MAX)
        wait_ms = min(end_ms - now_ms, caller.wait_ms(now_ms))
        if request.is_forwarded or answer.version > request.seen or wait_ms <= 0:
            return answer, parts
        try:
            await self._store.wait_known(answer.index, wait_ms)
        except UnavailableError:
            return answer, parts
        key, wait_ms = (request.group_id, request.member_id), max(0, end_ms - self._clock.monotonic_ms())
        found = await self._waiters.wait_newer(key, request.seen, wait_ms=wait_ms)
        return (answer if found is None else describe_assignment(*found)), parts

    async def _read_current(self, request: GetMetadata) -> Answer:
        view = await self._store.read(linearizable=True)
        return describe.describe_metadata(view, request, primary=self._store.primary), ()

    async def _change(self, caller: Caller, request: ChangeRequest, payload: memoryview) -> Answer:
        if isinstance(request, SubmitCommand | BrokerHeartbeatRequest):
            if caller.node is None:
                raise NotAllowedError("not done: only nodes may send this request")
            command = decode_payload(payload) if isinstance(request, SubmitCommand) else None
            managers = self._store.members.voters
            check_sender(caller.node, request, command, view=self._store.view(), managers=managers)
        return await self._router.forward(
            request,
            payload,
            deadline_ms=caller.deadline_ms,
            locally=partial(self._changes.carry_out, request, payload, caller.identity),
            on_behalf_of="" if caller.principal.kind is PrincipalKind.NODE else caller.identity.on_behalf_of,
        )
