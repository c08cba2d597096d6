"""The metadata commands of requests that change users, tokens, roles, grants, quotas and owners."""

from __future__ import annotations

from typing import Any, assert_never

from quiver.metadata import (
    AddGrantCommand,
    ChangeMemberCommand,
    ChangeOwnerCommand,
    ChangeUserCommand,
    Command,
    CreateRoleCommand,
    CreateTokenCommand,
    CreateUserCommand,
    DeleteRoleCommand,
    DeleteUserCommand,
    OwnedKind,
    RemoveGrantCommand,
    RemoveQuotaCommand,
    RevokeTokenCommand,
    SetQuotaCommand,
)
from quiver.security.tokens import Token, hash_secret
from quiver.wire import security_messages as messages

AccessChange = (
    messages.CreateUserRequest
    | messages.ChangeUserRequest
    | messages.DeleteUserRequest
    | messages.RevokeTokenRequest
    | messages.CreateRoleRequest
    | messages.DeleteRoleRequest
    | messages.ChangeMemberRequest
    | messages.AddGrantRequest
    | messages.RemoveGrantRequest
    | messages.SetQuotaRequest
    | messages.RemoveQuotaRequest
    | messages.ChangeOwnerRequest
)
"""Changes whose response is `Done`."""


def access_command(request: AccessChange, *, now_ms: int, principal: str) -> Command[Any]:
    """Return the command of a request."""
    match request:
        case messages.CreateUserRequest():
            return CreateUserCommand(now_ms=now_ms, principal=principal, user=request.user, verifier=request.verifier)
        case messages.ChangeUserRequest():
            return ChangeUserCommand(
                now_ms=now_ms,
                principal=principal,
                user=request.user,
                is_enabled=request.is_enabled,
                verifier=request.verifier,
            )
        case messages.DeleteUserRequest():
            return DeleteUserCommand(now_ms=now_ms, principal=principal, user=request.user)
        case messages.RevokeTokenRequest():
            return RevokeTokenCommand(now_ms=now_ms, principal=principal, token_id=request.token_id)
        case messages.CreateRoleRequest():
            return CreateRoleCommand(now_ms=now_ms, principal=principal, role=request.role)
        case messages.DeleteRoleRequest():
            return DeleteRoleCommand(now_ms=now_ms, principal=principal, role=request.role)
        case messages.ChangeMemberRequest():
            return ChangeMemberCommand(
                now_ms=now_ms, principal=principal, role=request.role, user=request.user, is_member=request.is_member
            )
        case messages.AddGrantRequest():
            return AddGrantCommand(now_ms=now_ms, principal=principal, grant=request.grant)
        case messages.RemoveGrantRequest():
            return RemoveGrantCommand(now_ms=now_ms, principal=principal, grant=request.grant)
        case messages.SetQuotaRequest():
            return SetQuotaCommand(now_ms=now_ms, principal=principal, subject=request.subject, limits=request.limits)
        case messages.RemoveQuotaRequest():
            return RemoveQuotaCommand(now_ms=now_ms, principal=principal, subject=request.subject)
        case messages.ChangeOwnerRequest():
            return ChangeOwnerCommand(
                now_ms=now_ms,
                principal=principal,
                owned=OwnedKind(request.kind),
                id=request.id,
                owner=request.owner,
            )
        case _:
            assert_never(request)


def token_command(
    request: messages.CreateTokenRequest, token: Token, *, now_ms: int, principal: str
) -> CreateTokenCommand:
    """Return the command that stores the hash of a new token."""
    expires_ms = None if request.lasting_ms is None else now_ms + request.lasting_ms
    return CreateTokenCommand(
        now_ms=now_ms,
        principal=principal,
        user=request.user,
        token_id=token.id,
        secret_hash=hash_secret(token.secret),
        expires_ms=expires_ms,
    )
