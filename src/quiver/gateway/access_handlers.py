"""Handlers of the routes for users, tokens, roles, grants and quotas. They pass requests on in the caller's name."""

from __future__ import annotations

import asyncio

from quiver.gateway import access_contract, contract
from quiver.gateway.application import RouteHandler
from quiver.gateway.changes import submit_change
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.security.limits import QuotaLimits
from quiver.security.permissions import Grant
from quiver.security.scram import ScramVerifier, make_new_verifier
from quiver.wire import security_messages as messages
from quiver.wire.requests import Done, Request


class AccessHandlers:
    """Handle the calls on users, tokens, roles, grants and quotas."""

    def __init__(self, router: Router, *, timeout_ms: int) -> None:
        self._router = router
        self._timeout_ms = timeout_ms

    def handlers(self) -> dict[str, RouteHandler]:
        """Return the handlers by the names of their routes."""
        return {
            "list_users": self.list_users,
            "create_user": self.create_user,
            "change_user": self.change_user,
            "delete_user": self.delete_user,
            "list_tokens": self.list_tokens,
            "create_token": self.create_token,
            "revoke_token": self.revoke_token,
            "list_roles": self.list_roles,
            "create_role": self.create_role,
            "delete_role": self.delete_role,
            "add_member": self.add_member,
            "remove_member": self.remove_member,
            "list_acls": self.list_acls,
            "add_acl": self.add_acl,
            "remove_acl": self.remove_acl,
            "test_acl": self.test_acl,
            "list_quotas": self.list_quotas,
            "set_quota": self.set_quota,
            "remove_quota": self.remove_quota,
        }

    # -- users -----------------------------------------------------------------------------------

    async def list_users(self, _: contract.Parameters) -> access_contract.UsersAnswer:
        """List all users with their roles and tokens."""
        found = (await self._router.ask(messages.ListUsers(), deadline=self._deadline()))[0]
        return access_contract.UsersAnswer(users=[_user_item(one) for one in found.users])

    async def create_user(self, given: access_contract.CreateUserBody, on_behalf_of: str) -> contract.Answer:
        """Create a user."""
        verifier = await _make_verifier(given.password)
        request = messages.CreateUserRequest(user=given.user, verifier=verifier, on_behalf_of=on_behalf_of)
        return await self._change(request)

    async def change_user(self, given: access_contract.ChangeUserBody, on_behalf_of: str) -> contract.Answer:
        """Enable or disable a user, or change its password."""
        return await self._change(
            messages.ChangeUserRequest(
                user=given.user,
                is_enabled=given.is_enabled,
                verifier=await _make_verifier(given.password),
                on_behalf_of=on_behalf_of,
            )
        )

    async def delete_user(self, given: access_contract.UserQuery, on_behalf_of: str) -> contract.Answer:
        """Delete a user."""
        return await self._change(messages.DeleteUserRequest(user=given.user, on_behalf_of=on_behalf_of))

    # -- tokens ----------------------------------------------------------------------------------

    async def list_tokens(self, given: access_contract.TokensQuery) -> access_contract.TokensAnswer:
        """List tokens, without their secrets."""
        found = (await self._router.ask(messages.ListUsers(user=given.user), deadline=self._deadline()))[0]
        return access_contract.TokensAnswer(
            tokens=[_token_item(token) for user in found.users for token in user.tokens]
        )

    async def create_token(
        self, given: access_contract.CreateTokenBody, on_behalf_of: str
    ) -> access_contract.TokenCreatedAnswer:
        """Create a token; this is the only time that it is shown."""
        request = messages.CreateTokenRequest(user=given.user, lasting_ms=given.lasting_ms, on_behalf_of=on_behalf_of)
        made, _ = await self._router.ask(request, deadline=self._deadline())
        self._router.cache.record_index(made.index)
        return access_contract.TokenCreatedAnswer(token_id=made.token_id, token=made.token, expires_ms=made.expires_ms)

    async def revoke_token(self, given: access_contract.TokenQuery, on_behalf_of: str) -> contract.Answer:
        """Delete a token."""
        return await self._change(messages.RevokeTokenRequest(token_id=given.token_id, on_behalf_of=on_behalf_of))

    # -- roles and grants ------------------------------------------------------------------------

    async def list_roles(self, _: contract.Parameters) -> access_contract.RolesAnswer:
        """List all roles."""
        found = (await self._router.ask(messages.ListRoles(), deadline=self._deadline()))[0]
        return access_contract.RolesAnswer(
            roles=[access_contract.RoleItem(role=one.role, users=list(one.users)) for one in found.roles]
        )

    async def create_role(self, given: access_contract.RoleQuery, on_behalf_of: str) -> contract.Answer:
        """Create a role."""
        return await self._change(messages.CreateRoleRequest(role=given.role, on_behalf_of=on_behalf_of))

    async def delete_role(self, given: access_contract.RoleQuery, on_behalf_of: str) -> contract.Answer:
        """Delete a role."""
        return await self._change(messages.DeleteRoleRequest(role=given.role, on_behalf_of=on_behalf_of))

    async def add_member(self, given: access_contract.MemberQuery, on_behalf_of: str) -> contract.Answer:
        """Give a role to a user."""
        return await self._change(
            messages.ChangeMemberRequest(role=given.role, user=given.user, on_behalf_of=on_behalf_of)
        )

    async def remove_member(self, given: access_contract.MemberQuery, on_behalf_of: str) -> contract.Answer:
        """Take a role from a user."""
        return await self._change(
            messages.ChangeMemberRequest(role=given.role, user=given.user, is_member=False, on_behalf_of=on_behalf_of)
        )

    async def list_acls(self, given: access_contract.GrantsQuery) -> access_contract.GrantsAnswer:
        """List grants."""
        found = (await self._router.ask(messages.ListGrants(subject=given.subject), deadline=self._deadline()))[0]
        return access_contract.GrantsAnswer(grants=[_grant_item(one) for one in found.grants])

    async def add_acl(self, given: access_contract.GrantBody, on_behalf_of: str) -> contract.Answer:
        """Add a grant."""
        return await self._change(messages.AddGrantRequest(grant=_read_grant(given), on_behalf_of=on_behalf_of))

    async def remove_acl(self, given: access_contract.GrantBody, on_behalf_of: str) -> contract.Answer:
        """Remove a grant."""
        return await self._change(messages.RemoveGrantRequest(grant=_read_grant(given), on_behalf_of=on_behalf_of))

    async def list_quotas(self, given: access_contract.QuotasQuery) -> access_contract.QuotasAnswer:
        """List quotas."""
        found = (await self._router.ask(messages.ListQuotas(subject=given.subject), deadline=self._deadline()))[0]
        quotas = [
            access_contract.QuotaItem(subject=one.subject, limits=one.limits, changed_ms=one.changed_ms)
            for one in found.quotas
        ]
        return access_contract.QuotasAnswer(quotas=quotas)

    async def set_quota(self, given: access_contract.QuotaBody, on_behalf_of: str) -> contract.Answer:
        """Set limits of a subject."""
        limits = QuotaLimits(**{name: getattr(given, name) for name in QuotaLimits.__struct_fields__})
        request = messages.SetQuotaRequest(subject=given.subject, limits=limits, on_behalf_of=on_behalf_of)
        return await self._change(request)

    async def remove_quota(self, given: access_contract.QuotaQuery, on_behalf_of: str) -> contract.Answer:
        """Remove the limits of a subject."""
        return await self._change(messages.RemoveQuotaRequest(subject=given.subject, on_behalf_of=on_behalf_of))

    async def test_acl(self, given: access_contract.AccessTestQuery) -> access_contract.AccessTestAnswer:
        """Explain whether a principal may do something."""
        request = messages.ExplainAccess(principal=given.principal, verb=given.verb, kind=given.kind, name=given.name)
        verdict = (await self._router.ask(request, deadline=self._deadline()))[0].verdict
        return access_contract.AccessTestAnswer(
            is_allowed=verdict.is_allowed,
            reason=verdict.reason,
            grant=None if verdict.grant is None else _grant_item(verdict.grant),
        )

    async def _change(self, request: Request[Done]) -> contract.Answer:
        await submit_change(self._router, request, deadline=self._deadline())
        return contract.Answer()

    def _deadline(self) -> Deadline:
        return self._router.deadline(self._timeout_ms)


async def _make_verifier(password: str | None) -> ScramVerifier | None:
    if password is None:
        return None
    return await asyncio.to_thread(make_new_verifier, password)


def _user_item(one: messages.UserInfo) -> access_contract.UserItem:
    return access_contract.UserItem(
        user=one.user,
        is_enabled=one.is_enabled,
        has_password=one.has_password,
        created_ms=one.created_ms,
        roles=list(one.roles),
        tokens=[_token_item(token) for token in one.tokens],
    )


def _token_item(one: messages.TokenInfo) -> access_contract.TokenItem:
    return access_contract.TokenItem(
        token_id=one.token_id, user=one.user, created_ms=one.created_ms, expires_ms=one.expires_ms
    )


def _grant_item(one: Grant) -> access_contract.GrantItem:
    return access_contract.GrantItem(
        subject=one.subject, verb=one.verb, kind=one.kind, name=one.name, is_prefix=one.is_prefix
    )


def _read_grant(given: access_contract.GrantBody) -> Grant:
    return Grant(subject=given.subject, verb=given.verb, kind=given.kind, name=given.name, is_prefix=given.is_prefix)
