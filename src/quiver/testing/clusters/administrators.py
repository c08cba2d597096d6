"""Administrators of users, tokens, roles, grants and quotas, and the users whose requests they allow and forbid.

An administrator works through the SDK, like everybody else, while nodes and networks fail. Nobody else touches its
users, so it knows what each of them may do, until the outcome of a change is unknown: then it leaves the user alone.
Its users keep connections to all nodes, authenticated before anything is revoked.

A1: after an acknowledged revoke, no node permits a request that carries the metadata index of that revoke.
A2: at the end, every user is what the acknowledged changes made of it, and has the quotas that were set.
A3: at the end, all nodes decide alike about every user, as the acknowledged changes say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from quiver.errors import OutcomeUnknownError, QuiverError, RequestError
from quiver.metadata import View
from quiver.model import Index
from quiver.security.limits import QuotaLimits
from quiver.security.permissions import ADMIN_ROLE, USER_PREFIX, ResourceKind, Verb, admin_grant
from quiver.testing.clusters.clients import ClientWorkload
from quiver.testing.simulator.report import require, violated
from quiver.wire.security_messages import ListUsers

if TYPE_CHECKING:
    from quiver.testing.clusters.swarm import TopicPlan
    from quiver.testing.clusters.world import ClusterWorld
    from quiver.testing.transport import SimulatedRequester

T = TypeVar("T")

_USERS_MAX = 3
"""Users of one administrator at a time."""
_TOKENS_MAX = 2
_REQUEST_TIMEOUT_MS = 1_500
_P_WARM = 0.7
"""How likely the users' connections are used right before something is revoked."""
_REVOKED_KEPT = 6
"""Revoked tokens that are still tried."""
_PAUSE_S = 0.3


@dataclass(slots=True, eq=False)
class UserPlan:
    """What an administrator made of one user; the user's name is never used again."""

    name: str
    is_enabled: bool = True
    is_deleted: bool = False
    tokens: dict[str, SimulatedRequester] = field(default_factory=dict)
    """By id, the client that uses the token."""
    is_admin: bool = False
    has_grant: bool = False
    is_member: bool = False
    """Whether it has the role of its own."""
    has_role: bool = False
    """Whether that role exists, with a grant."""
    had_role: bool = False
    """Whether it had the role before, whose name is never used again either."""
    limits: QuotaLimits | None = None

    @property
    def subject(self) -> str:
        """Return the subject of its grants and quotas."""
        return USER_PREFIX + self.name

    @property
    def role(self) -> str:
        """Return the name of the role that only it has."""
        return f"{self.name}-role"

    @property
    def may_act(self) -> bool:
        """Return whether requests with a valid token of it are to be permitted."""
        is_granted = self.is_admin or self.has_grant or (self.is_member and self.has_role)
        return self.is_enabled and not self.is_deleted and is_granted


class AdminWorkload(ClientWorkload):
    """Creates, changes and revokes; then lets the users try."""

    def __init__(self, world: ClusterWorld, name: str, topic: TopicPlan) -> None:
        super().__init__(world, name, topic)
        self.users: list[UserPlan] = []
        self.deleted: list[UserPlan] = []
        self._revoked: list[tuple[UserPlan, SimulatedRequester, Index]] = []
        """Tokens that must never be accepted again, with the index of the revoke."""
        self._count = 0

    async def step(self) -> None:
        """Do one thing with one user."""
        if len(self.users) < _USERS_MAX and self.rng.random() < 0.5:
            await self._create_user()
        elif self.users:
            user = self.users[self.rng.randrange(len(self.users))]
            actions = (self._add_token, self._allow, self._set_quota, self._revoke, self._revoke, self._use)
            await actions[self.rng.randrange(len(actions))](user)
        await asyncio.sleep(_PAUSE_S * self.rng.random())

    # -- changes ---------------------------------------------------------------------------------

    async def _create_user(self) -> None:
        self._count += 1
        user = UserPlan(f"{self.name}-user-{self._count}")
        access = self.cluster.access
        if not await self._done(user, "create_user", access.create_user(user.name)):
            return
        self.users.append(user)
        await self._allow(user)
        if user in self.users:
            await self._add_token(user)

    async def _add_token(self, user: UserPlan) -> None:
        if len(user.tokens) >= _TOKENS_MAX:
            return
        made = await self._change(user, "create_token", self.cluster.access.create_token(user.name))
        if made is not None:
            name = f"{user.name}-{made.token_id}"
            user.tokens[made.token_id] = self.world.transport.port(name=name, token=made.secret.reveal())
            await self._use(user)

    async def _allow(self, user: UserPlan) -> None:
        access = self.cluster.access
        match self.rng.randrange(4):
            case 0 if not user.has_grant:
                user.has_grant = await self._done(user, "add_grant", access.add_grant(admin_grant(user.subject)))
            case 1 if not user.is_admin:
                user.is_admin = await self._done(user, "add_member", access.add_member(ADMIN_ROLE, user.name))
            case 2 if not user.is_enabled:
                user.is_enabled = await self._done(user, "enable", access.enable_user(user.name))
            case 3 if not user.had_role:
                user.had_role = True
                await self._give_role(user)

    async def _give_role(self, user: UserPlan) -> None:
        access = self.cluster.access
        grant = admin_grant(f"role:{user.role}")
        if await self._done(user, "create_role", access.create_role(user.role)):
            user.is_member = await self._done(user, "add_member", access.add_member(user.role, user.name))
        if user.is_member:
            user.has_role = await self._done(user, "add_grant", access.add_grant(grant))
        if not user.has_role:
            self._abandon(user)  # a role of that name exists, but its state is not worth a plan

    async def _set_quota(self, user: UserPlan) -> None:
        access = self.cluster.access
        if user.limits is not None and self.rng.random() < 0.3:
            if await self._done(user, "remove_quota", access.remove_quota(user.subject)):
                user.limits = None
            return
        limits = QuotaLimits(topics_max=self.rng.randrange(100), partitions_max=self.rng.randrange(100))
        if await self._done(user, "set_quota", access.set_quota(user.subject, limits)):
            user.limits = limits

    async def _revoke(self, user: UserPlan) -> None:
        """Take something from a user, and let it try at once on all nodes."""
        if user.may_act and self.rng.random() < _P_WARM:
            await self._use(user)
        access, tokens = self.cluster.access, dict(user.tokens)
        match self.rng.randrange(7):
            case 0 if user.has_grant:
                user.has_grant = not await self._done(
                    user, "remove_grant", access.remove_grant(admin_grant(user.subject))
                )
            case 1 if user.is_admin:
                removed = self._done(user, "remove_member", access.remove_member(ADMIN_ROLE, user.name))
                user.is_admin = not await removed
            case 2 if user.is_enabled:
                disabled = self._done(user, "disable", access.enable_user(user.name, is_enabled=False))
                user.is_enabled = not await disabled
            case 3 if user.has_role:
                if await self._done(user, "delete_role", access.delete_role(user.role)):
                    user.has_role = user.is_member = False
            case 4 if user.is_member:
                removed = self._done(user, "remove_member", access.remove_member(user.role, user.name))
                user.is_member = not await removed
            case 5 if len(self.users) == _USERS_MAX:
                if await self._done(user, "delete_user", access.delete_user(user.name)):
                    self._delete(user)
            case _ if user.tokens:
                token_id = sorted(user.tokens)[self.rng.randrange(len(user.tokens))]
                if await self._done(user, "revoke_token", access.revoke_token(token_id)):
                    self._keep_revoked(user, user.tokens.pop(token_id))
        if user in self.users or user.is_deleted:
            await self._try(user, list(tokens.values()))

    def _delete(self, user: UserPlan) -> None:
        user.is_deleted = True
        self.users.remove(user)
        self.deleted.append(user)
        for client in user.tokens.values():
            self._keep_revoked(user, client)
        user.tokens.clear()

    def _keep_revoked(self, user: UserPlan, client: SimulatedRequester) -> None:
        self._revoked = [*self._revoked, (user, client, self._index)][-_REVOKED_KEPT:]

    def _abandon(self, user: UserPlan) -> None:
        """Leave a user alone whose state is not known."""
        if user in self.users:
            self.users.remove(user)

    async def _done(self, user: UserPlan, what: str, change: Awaitable[None]) -> bool:
        """Make a change without a result; return whether it was done."""
        return await self._change(user, what, _true(change)) or False

    async def _change(self, user: UserPlan, what: str, change: Awaitable[T]) -> T | None:
        """Make a change; return None if it was not done, or perhaps not: then the user is abandoned."""
        try:
            result = await change
        except RequestError as error:
            if error.code != "feature_level":
                violated("C", f"{what} of {user.name} was refused: {error!r}", code=error.code)
            self.progress += 1
            self.world.counts["access refused"] += 1
            return None
        except QuiverError as error:
            if error.outcome == "unknown":
                self._abandon(user)
            self.world.counts["access info" if error.outcome == "unknown" else "access fail"] += 1
            return None
        self.progress += 1
        self.world.counts[f"{what} ok"] += 1
        return result

    # -- what users do ---------------------------------------------------------------------------

    @property
    def _index(self) -> Index:
        """The metadata index of the last acknowledged change."""
        return self.cluster.router.cache.known_index

    async def _use(self, user: UserPlan) -> None:
        """Let a user, and another one whose token was revoked, send requests to all nodes."""
        await self._try(user, list(user.tokens.values()))
        if self._revoked:
            gone, client, index = self._revoked[self.rng.randrange(len(self._revoked))]
            await self._send(gone, [client], index, is_allowed=False)

    async def _try(self, user: UserPlan, clients: Sequence[SimulatedRequester]) -> None:
        allowed = [client for client in clients if user.may_act and client in user.tokens.values()]
        denied = [client for client in clients if client not in allowed]
        await self._send(user, allowed, self._index, is_allowed=True)
        await self._send(user, denied, self._index, is_allowed=False)

    async def _send(
        self, user: UserPlan, clients: Sequence[SimulatedRequester], index: Index, *, is_allowed: bool
    ) -> None:
        """A1: send a request that only an administrator may send to every node, with an index."""
        hosts = self.world.live_nodes()
        calls = [self._ask(client, host.address, user, index) for client in clients for host in hosts]
        for address in filter(None, await asyncio.gather(*calls)):
            facts = {"user": user.name, "node": address, "index": index}
            require(is_allowed, "A1", "a request is permitted after its revoke", **facts)

    async def _ask(self, client: SimulatedRequester, address: str, user: UserPlan, index: Index) -> str:
        """Return the address if the request was permitted."""
        request = ListUsers(user=user.name, known_index=index)
        try:
            await client.call(address, request, timeout_ms=_REQUEST_TIMEOUT_MS)
        except QuiverError as error:
            self.world.counts[f"access {'unknown' if isinstance(error, OutcomeUnknownError) else error.code}"] += 1
            return ""
        self.world.counts["access permitted"] += 1
        return address

    # -- the end ---------------------------------------------------------------------------------

    def require_state(self, view: View) -> None:
        """A2: the metadata is what the acknowledged changes made of it."""
        for user in self.deleted:
            found = _found(view, user.name)
            require(found is None, "A2", "a deleted user is back", user=user.name)
            is_named = user.subject in view.quotas or any(row.subject == user.subject for row in view.grants.values())
            require(not is_named, "A2", "a deleted user left something behind", user=user.name)
        for user in self.users:
            expected, known = _expected(user), _found(view, user.name)
            require(known == expected, "A2", "a user is not as it was made", user=user.name, is_=known, was=expected)


def require_access_state(world: ClusterWorld) -> None:
    """A2, A3: once the cluster has settled, what was acknowledged is there, and all nodes decide alike."""
    view = world.view()
    assert view is not None, "the cluster has settled"
    for admin in world.clients:
        if isinstance(admin, AdminWorkload):
            admin.require_state(view)
            for user in (*admin.users, *admin.deleted):
                _require_equal_verdicts(world, user)


def _require_equal_verdicts(world: ClusterWorld, user: UserPlan) -> None:
    for host in world.live_nodes():
        assert host.node is not None, "the cluster has settled"
        verdict = host.node._access.explain(user.subject, Verb.ADMIN, ResourceKind.CLUSTER, "")
        facts = {"user": user.name, "node": host.id, "reason": verdict.reason}
        require(verdict.is_allowed == user.may_act, "A3", "a node decides otherwise", **facts)


UserState = tuple[bool, tuple[str, ...], tuple[str, ...], bool, bool, QuotaLimits | None]
"""Whether it is enabled, its tokens, its roles, whether it and its role have a grant, its quotas."""


def _expected(user: UserPlan) -> UserState:
    roles = ((ADMIN_ROLE,) if user.is_admin else ()) + ((user.role,) if user.is_member else ())
    has_role = user.has_role
    return (user.is_enabled, tuple(sorted(user.tokens)), tuple(sorted(roles)), user.has_grant, has_role, user.limits)


def _found(view: View, name: str) -> UserState | None:
    row, subject = view.users.get(name), USER_PREFIX + name
    if row is None:
        return None
    subjects = {one.subject for one in view.grants.values()}
    quota = view.quotas.get(subject)
    return (
        row.is_enabled,
        tuple(sorted(token_id for token_id, token in view.tokens.items() if token.user == name)),
        tuple(sorted(role for role, user in view.memberships if user == name)),
        subject in subjects,
        f"role:{name}-role" in subjects,
        None if quota is None else quota.limits,
    )


async def _true(change: Awaitable[None]) -> bool:
    await change
    return True
