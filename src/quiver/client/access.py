"""Who may use a cluster, for what and how much: users, their tokens, roles, grants, quotas, and what they own.

`Access` is the blocking face of `AsyncAccess`.

Every call needs `admin` on the cluster; in development mode, nobody needs anything. A new token's secret is in one
response only: the cluster stores a hash of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

import msgspec

from quiver.client.arguments import check_arguments
from quiver.routing.router import Router
from quiver.security.limits import QuotaLimits
from quiver.security.permissions import AccessVerdict, Grant, ResourceKind, Verb
from quiver.security.scram import ScramVerifier, make_new_verifier
from quiver.security.secrets import Secret
from quiver.wire.requests import Done, R, Request
from quiver.wire.security_messages import (
    AddGrantRequest,
    ChangeMemberRequest,
    ChangeOwnerRequest,
    ChangeUserRequest,
    CreateRoleRequest,
    CreateTokenRequest,
    CreateUserRequest,
    DeleteRoleRequest,
    DeleteUserRequest,
    ExplainAccess,
    ListGrants,
    ListQuotas,
    ListRoles,
    ListUsers,
    QuotaInfo,
    RemoveGrantRequest,
    RemoveQuotaRequest,
    RevokeTokenRequest,
    RoleInfo,
    SetQuotaRequest,
    TokenInfo,
    UserInfo,
)

T = TypeVar("T")


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was just created; `secret.reveal()` is the text that clients send, and is never shown again."""

    token_id: str
    secret: Secret
    expires_ms: int | None = None


@check_arguments
class AsyncAccess:
    """Administer the users, tokens, roles, grants and quotas of a cluster; made by `AsyncCluster.access`.

    Example:
        await cluster.access.create_user("alice")
        token = await cluster.access.create_token("alice", lasting=90 * 86_400)
        grant = Grant(subject="user:alice", verb=Verb.READ, kind=ResourceKind.TOPIC, name="logs.", is_prefix=True)
        await cluster.access.add_grant(grant)
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def users(self) -> list[UserInfo]:
        """Return all users with their roles and tokens, by name."""
        return list((await self._ask(ListUsers())).users)

    async def create_user(self, user: str, *, password: str | Secret = "") -> None:
        """Create a user without permissions and without a token; a `password` is not sent, but a verifier of it.

        Raises:
            ConflictError: the user exists (`user_exists`).
            RequestError: the password is too short or too long, or has characters that are not allowed (`bad_scram`).
        """
        verifier = await _make_verifier(password) if password else None
        await self._change(CreateUserRequest(user=user, verifier=verifier))

    async def set_password(self, user: str, password: str | Secret) -> None:
        """Give a user another password; connections that used the old one lose their permissions.

        Raises:
            RequestError: the password is too short or too long, or has characters that are not allowed (`bad_scram`).
        """
        await self._change(ChangeUserRequest(user=user, verifier=await _make_verifier(password)))

    async def enable_user(self, user: str, *, is_enabled: bool = True) -> None:
        """Let a user authenticate again; with `is_enabled` false, refuse the user and its open connections."""
        await self._change(ChangeUserRequest(user=user, is_enabled=is_enabled))

    async def delete_user(self, user: str) -> None:
        """Delete a user with its tokens, roles and grants."""
        await self._change(DeleteUserRequest(user=user))

    async def tokens(self, user: str | None = None) -> list[TokenInfo]:
        """Return the tokens of all users or of one, without their secrets."""
        found = (await self._ask(ListUsers(user=user))).users
        return [token for one in found for token in one.tokens]

    async def create_token(self, user: str, *, lasting: float | None = None) -> NewToken:
        """Create a token of a user, which expires after `lasting` seconds, or never; a user has two at most.

        Raises:
            ConflictError: the user has two tokens (`too_many_tokens`): revoke one first.
        """
        lasting_ms = None if lasting is None else round(lasting * 1000)
        created = await self._ask(CreateTokenRequest(user=user, lasting_ms=lasting_ms))
        self._router.cache.record_index(created.index)
        return NewToken(token_id=created.token_id, secret=Secret(created.token), expires_ms=created.expires_ms)

    async def revoke_token(self, token_id: str) -> None:
        """Revoke a token; connections that it authenticated lose their permissions."""
        await self._change(RevokeTokenRequest(token_id=token_id))

    async def roles(self) -> list[RoleInfo]:
        """Return all roles with their members and grants, by name."""
        return list((await self._ask(ListRoles())).roles)

    async def create_role(self, role: str) -> None:
        """Create a role without members and grants."""
        await self._change(CreateRoleRequest(role=role))

    async def delete_role(self, role: str) -> None:
        """Delete a role with its grants; its members lose what it allowed."""
        await self._change(DeleteRoleRequest(role=role))

    async def add_member(self, role: str, user: str) -> None:
        """Give a role to a user."""
        await self._change(ChangeMemberRequest(role=role, user=user))

    async def remove_member(self, role: str, user: str) -> None:
        """Take a role from a user."""
        await self._change(ChangeMemberRequest(role=role, user=user, is_member=False))

    async def grants(self, subject: str | None = None) -> list[Grant]:
        """Return all grants, or those of a subject: `user:alice`, `role:ops` or `anonymous`."""
        return list((await self._ask(ListGrants(subject=subject))).grants)

    async def add_grant(self, grant: Grant) -> None:
        """Add a grant; one that exists is no error."""
        await self._change(AddGrantRequest(grant=grant))

    async def remove_grant(self, grant: Grant) -> None:
        """Remove a grant, named by all its parts."""
        await self._change(RemoveGrantRequest(grant=grant))

    async def quotas(self, subject: str | None = None) -> list[QuotaInfo]:
        """Return all quotas, or those of a subject: `user:alice`, `role:ops`, `default`, `topic:logs` or `topic:*`."""
        return list((await self._ask(ListQuotas(subject=subject))).quotas)

    async def set_quota(self, subject: str, limits: QuotaLimits) -> None:
        """Set limits of a subject: 0 is no limit, and those that are None stay as they are."""
        await self._change(SetQuotaRequest(subject=subject, limits=limits))

    async def remove_quota(self, subject: str) -> None:
        """Remove all limits of a subject, to which those of its roles, or the default, apply from then on."""
        await self._change(RemoveQuotaRequest(subject=subject))

    async def change_owner(self, kind: Literal["topic", "producer", "consumer"], id: int, owner: str) -> None:  # noqa: A002 - the public name of the argument
        """Give a topic, producer or consumer, by id, to a user such as `user:alice`; a group goes with its consumer.

        The user need not exist yet. An empty owner is nobody: the first user of the client's name becomes its owner.
        """
        await self._change(ChangeOwnerRequest(kind=kind, id=id, owner=owner))

    async def explain(
        self, principal: str, verb: Verb, kind: ResourceKind = ResourceKind.TOPIC, name: str = ""
    ) -> AccessVerdict:
        """Return whether a principal, such as `user:alice`, may do something, and the grant or rule that decides."""
        return (await self._ask(ExplainAccess(principal=principal, verb=verb, kind=kind, name=name))).verdict

    async def _ask(self, request: Request[R]) -> R:
        return (await self._router.ask(request, deadline=self._router.deadline()))[0]

    async def _change(self, request: Request[Done]) -> None:
        self._router.cache.record_index((await self._ask(request)).index)


async def _make_verifier(password: str | Secret) -> ScramVerifier:
    text = password.reveal() if isinstance(password, Secret) else password
    return await asyncio.to_thread(make_new_verifier, text)


@check_arguments
class Access:
    """Administer the users, tokens, roles, grants and quotas of a cluster; made by `Cluster.access`.

    Example:
        cluster.access.create_user("alice")
        token = cluster.access.create_token("alice", lasting=90 * 86_400)
        cluster.access.add_grant(Grant(subject="user:alice", verb=Verb.READ, kind=ResourceKind.TOPIC, name="logs"))
    """

    def __init__(self, access: AsyncAccess, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._access = access
        self._run_any = run

    def users(self) -> list[UserInfo]:
        """Return all users with their roles and tokens, by name."""
        return self._run(self._access.users())

    def create_user(self, user: str, *, password: str | Secret = "") -> None:
        """Create a user without permissions and without a token; a `password` is not sent, but a verifier of it.

        Raises:
            ConflictError: the user exists (`user_exists`).
            RequestError: the password is too short or too long, or has characters that are not allowed (`bad_scram`).
        """
        self._run(self._access.create_user(user, password=password))

    def set_password(self, user: str, password: str | Secret) -> None:
        """Give a user another password; connections that used the old one lose their permissions.

        Raises:
            RequestError: the password is too short or too long, or has characters that are not allowed (`bad_scram`).
        """
        self._run(self._access.set_password(user, password))

    def enable_user(self, user: str, *, is_enabled: bool = True) -> None:
        """Let a user authenticate again; with `is_enabled` false, refuse the user and its open connections."""
        self._run(self._access.enable_user(user, is_enabled=is_enabled))

    def delete_user(self, user: str) -> None:
        """Delete a user with its tokens, roles and grants."""
        self._run(self._access.delete_user(user))

    def tokens(self, user: str | None = None) -> list[TokenInfo]:
        """Return the tokens of all users or of one, without their secrets."""
        return self._run(self._access.tokens(user))

    def create_token(self, user: str, *, lasting: float | None = None) -> NewToken:
        """Create a token of a user, which expires after `lasting` seconds, or never; a user has two at most.

        Raises:
            ConflictError: the user has two tokens (`too_many_tokens`): revoke one first.
        """
        return self._run(self._access.create_token(user, lasting=lasting))

    def revoke_token(self, token_id: str) -> None:
        """Revoke a token; connections that it authenticated lose their permissions."""
        self._run(self._access.revoke_token(token_id))

    def roles(self) -> list[RoleInfo]:
        """Return all roles with their members and grants, by name."""
        return self._run(self._access.roles())

    def create_role(self, role: str) -> None:
        """Create a role without members and grants."""
        self._run(self._access.create_role(role))

    def delete_role(self, role: str) -> None:
        """Delete a role with its grants; its members lose what it allowed."""
        self._run(self._access.delete_role(role))

    def add_member(self, role: str, user: str) -> None:
        """Give a role to a user."""
        self._run(self._access.add_member(role, user))

    def remove_member(self, role: str, user: str) -> None:
        """Take a role from a user."""
        self._run(self._access.remove_member(role, user))

    def grants(self, subject: str | None = None) -> list[Grant]:
        """Return all grants, or those of a subject: `user:alice`, `role:ops` or `anonymous`."""
        return self._run(self._access.grants(subject))

    def add_grant(self, grant: Grant) -> None:
        """Add a grant; one that exists is no error."""
        self._run(self._access.add_grant(grant))

    def remove_grant(self, grant: Grant) -> None:
        """Remove a grant, named by all its parts."""
        self._run(self._access.remove_grant(grant))

    def quotas(self, subject: str | None = None) -> list[QuotaInfo]:
        """Return all quotas, or those of a subject: `user:alice`, `role:ops`, `default`, `topic:logs` or `topic:*`."""
        return self._run(self._access.quotas(subject))

    def set_quota(self, subject: str, limits: QuotaLimits) -> None:
        """Set limits of a subject: 0 is no limit, and those that are None stay as they are."""
        self._run(self._access.set_quota(subject, limits))

    def remove_quota(self, subject: str) -> None:
        """Remove all limits of a subject, to which those of its roles, or the default, apply from then on."""
        self._run(self._access.remove_quota(subject))

    def change_owner(self, kind: Literal["topic", "producer", "consumer"], id: int, owner: str) -> None:  # noqa: A002 - the public name of the argument
        """Give a topic, producer or consumer, by id, to a user such as `user:alice`; a group goes with its consumer.

        The user need not exist yet. An empty owner is nobody: the first user of the client's name becomes its owner.
        """
        self._run(self._access.change_owner(kind, id, owner))

    def explain(
        self, principal: str, verb: Verb, kind: ResourceKind = ResourceKind.TOPIC, name: str = ""
    ) -> AccessVerdict:
        """Return whether a principal, such as `user:alice`, may do something, and the grant or rule that decides."""
        return self._run(self._access.explain(principal, verb, kind, name))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = self._run_any(work)
        return result
