"""Handlers of the requests that list users, roles, grants and quotas, and explain access, from this node's view."""

from __future__ import annotations

from typing import Any

from quiver.access.control import AccessControl
from quiver.metadata import TokenRow, UserRow, View
from quiver.security.permissions import ADMIN_ROLE, ROLE_PREFIX, admin_grant
from quiver.wire.requests import Request
from quiver.wire.security_messages import (
    AccessExplained,
    ExplainAccess,
    GrantsFound,
    ListGrants,
    ListQuotas,
    ListRoles,
    ListUsers,
    QuotaInfo,
    QuotasFound,
    RoleInfo,
    RolesFound,
    TokenInfo,
    UserInfo,
    UsersFound,
)
from quiver.wire.serving import Answer, Caller, RequestHandler


class AccessRequests:
    """The handlers, for `dispatch`."""

    def __init__(self, control: AccessControl) -> None:
        self._control = control

    def handlers(self) -> dict[type[Request[Any]], RequestHandler]:
        """Return the handlers of the requests that any node serves."""
        return {
            ListUsers: self._list_users,
            ListRoles: self._list_roles,
            ListGrants: self._list_grants,
            ListQuotas: self._list_quotas,
            ExplainAccess: self._explain,
        }

    async def _list_users(self, _: Caller, request: ListUsers, __: memoryview) -> Answer:
        view = self._control.view()
        rows = view.users.items() if request.user is None else [(request.user, view.users.get(request.user))]
        return UsersFound(users=tuple(_user_info(view, row) for _, row in sorted(rows) if row is not None)), ()

    async def _list_roles(self, _: Caller, __: ListRoles, ___: memoryview) -> Answer:
        view = self._control.view()
        names = sorted({ADMIN_ROLE, *view.roles})
        return RolesFound(roles=tuple(_role_info(view, name) for name in names)), ()

    async def _list_grants(self, _: Caller, request: ListGrants, __: memoryview) -> Answer:
        view = self._control.view()
        grants = (row.grant for _, row in sorted(view.grants.items()))
        return GrantsFound(grants=tuple(one for one in grants if request.subject in (None, one.subject))), ()

    async def _list_quotas(self, _: Caller, request: ListQuotas, __: memoryview) -> Answer:
        found = (row for _, row in sorted(self._control.view().quotas.items()))
        quotas = (
            QuotaInfo(subject=row.subject, limits=row.limits, changed_ms=row.changed_ms)
            for row in found
            if request.subject in (None, row.subject)
        )
        return QuotasFound(quotas=tuple(quotas)), ()

    async def _explain(self, _: Caller, request: ExplainAccess, __: memoryview) -> Answer:
        verdict = self._control.explain(request.principal, request.verb, request.kind, request.name)
        return AccessExplained(verdict=verdict), ()


def _user_info(view: View, row: UserRow) -> UserInfo:
    return UserInfo(
        user=row.name,
        created_ms=row.created_ms,
        is_enabled=row.is_enabled,
        has_password=row.verifier is not None,
        roles=tuple(role for role, user in sorted(view.memberships) if user == row.name),
        tokens=tuple(_token_info(token) for _, token in sorted(view.tokens.items()) if token.user == row.name),
    )


def _token_info(row: TokenRow) -> TokenInfo:
    return TokenInfo(token_id=row.token_id, user=row.user, created_ms=row.created_ms, expires_ms=row.expires_ms)


def _role_info(view: View, name: str) -> RoleInfo:
    row, subject = view.roles.get(name), ROLE_PREFIX + name
    grants = [one.grant for _, one in sorted(view.grants.items()) if one.subject == subject]
    return RoleInfo(
        role=name,
        created_ms=view.counters.formed_ms if row is None else row.created_ms,
        users=tuple(user for role, user in sorted(view.memberships) if role == name),
        grants=(admin_grant(subject), *grants) if name == ADMIN_ROLE else tuple(grants),
    )
