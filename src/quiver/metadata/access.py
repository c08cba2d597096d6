"""Commands on users, tokens, roles and grants. Pure; called only by `apply`.

Every table is bounded. Names are letters, digits, `.`, `_`, `@` and `-`, so that `user:alice` and `role:ops` can be
written anywhere without quotes. Deleting a user or a role deletes everything that names it: a later one of the same
name must not inherit anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from quiver.metadata.commands import (
    AddGrantCommand,
    ChangeMemberCommand,
    ChangeUserCommand,
    CreateRoleCommand,
    CreateTokenCommand,
    CreateUserCommand,
    DeleteRoleCommand,
    DeleteUserCommand,
    RemoveGrantCommand,
    RevokeTokenCommand,
)
from quiver.metadata.decision import CommandDecision, CommandRefusal, refuse
from quiver.metadata.quotas import drop_quota
from quiver.metadata.rows import GrantRow, MembershipRow, RoleRow, Table, TokenRow, UserRow
from quiver.metadata.state import Change, MetadataState, drop, put
from quiver.security.permissions import (
    ADMIN_ROLE,
    ANONYMOUS_SUBJECT,
    ROLE_PREFIX,
    USER_PREFIX,
    Grant,
    ResourceKind,
)
from quiver.security.tokens import is_hash, is_token_id

USERS_MAX = 10_000
TOKENS_PER_USER_MAX = 2
"""Two, so that a new token can be distributed before the old one is revoked."""
ROLES_MAX = 1_000
ROLES_PER_USER_MAX = 100
GRANTS_MAX = 20_000
GRANTS_PER_SUBJECT_MAX = 1_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


# -- users and tokens --------------------------------------------------------------------------------


def create_user(state: MetadataState, command: CreateUserCommand) -> CommandDecision | CommandRefusal:
    """Create a user."""
    users: Mapping[str, UserRow] = state.tables[Table.USERS]
    if not _NAME.fullmatch(command.user):
        return _bad_name("user", command.user)
    if command.user in users:
        return refuse("user_exists", f"not done: user {command.user!r} exists already")
    if len(users) >= USERS_MAX:
        return refuse("too_many_users", f"not done: the cluster has {USERS_MAX} users, the maximum; delete some")
    row = UserRow(name=command.user, is_enabled=True, created_ms=command.now_ms, verifier=command.verifier)
    return CommandDecision([put(row)])


def change_user(state: MetadataState, command: ChangeUserCommand) -> CommandDecision | CommandRefusal:
    """Enable, disable, or change the password."""
    user = _find_user(state, command.user)
    if isinstance(user, CommandRefusal):
        return user
    changed = msgspec.structs.replace(
        user,
        is_enabled=user.is_enabled if command.is_enabled is None else command.is_enabled,
        verifier=user.verifier if command.verifier is None else command.verifier,
    )
    return CommandDecision([] if changed == user else [put(changed)])


def delete_user(state: MetadataState, command: DeleteUserCommand) -> CommandDecision | CommandRefusal:
    """Delete a user and everything that names it."""
    user = _find_user(state, command.user)
    if isinstance(user, CommandRefusal):
        return user
    memberships: Mapping[tuple[str, str], MembershipRow] = state.tables[Table.MEMBERSHIPS]
    changes = [drop(user), *(drop(token) for token in _tokens_of(state, command.user))]
    changes += [drop(memberships[key]) for key in sorted(memberships) if key[1] == command.user]
    changes += drop_quota(state, USER_PREFIX + command.user)
    return CommandDecision(changes + _drop_grants(state, USER_PREFIX + command.user))


def create_token(state: MetadataState, command: CreateTokenCommand) -> CommandDecision | CommandRefusal:
    """Store a token's hash; expired tokens of the user are deleted."""
    user = _find_user(state, command.user)
    if isinstance(user, CommandRefusal):
        return user
    if not is_token_id(command.token_id) or not is_hash(command.secret_hash):
        return refuse("bad_token", "not done: not the id and the hash of a token; make one with quiver token create")
    if command.token_id in state.tables[Table.TOKENS]:
        return refuse("token_exists", f"not done: token {command.token_id} exists already")
    if command.expires_ms is not None and command.expires_ms <= command.now_ms:
        return refuse("bad_token", "not done: the token would have expired already; give a later time")
    found = _tokens_of(state, command.user)
    expired = [token for token in found if token.expires_ms is not None and token.expires_ms <= command.now_ms]
    if len(found) - len(expired) >= TOKENS_PER_USER_MAX:
        return refuse(
            "too_many_tokens",
            f"not done: user {command.user!r} has {TOKENS_PER_USER_MAX} tokens, the maximum; revoke one first",
        )
    row = TokenRow(
        token_id=command.token_id,
        user=command.user,
        secret_hash=command.secret_hash,
        created_ms=command.now_ms,
        expires_ms=command.expires_ms,
    )
    return CommandDecision([*(drop(token) for token in expired), put(row)])


def revoke_token(state: MetadataState, command: RevokeTokenCommand) -> CommandDecision | CommandRefusal:
    """Delete a token."""
    token: TokenRow | None = state.tables[Table.TOKENS].get(command.token_id)
    if token is None:
        return refuse("unknown_token", f"not done: unknown token {command.token_id!r}; list the tokens")
    return CommandDecision([drop(token)])


# -- roles and grants --------------------------------------------------------------------------------


def create_role(state: MetadataState, command: CreateRoleCommand) -> CommandDecision | CommandRefusal:
    """Create a role."""
    roles: Mapping[str, RoleRow] = state.tables[Table.ROLES]
    if not _NAME.fullmatch(command.role):
        return _bad_name("role", command.role)
    if command.role == ADMIN_ROLE or command.role in roles:
        return refuse("role_exists", f"not done: role {command.role!r} exists already")
    if len(roles) >= ROLES_MAX:
        return refuse("too_many_roles", f"not done: the cluster has {ROLES_MAX} roles, the maximum; delete some")
    return CommandDecision([put(RoleRow(name=command.role, created_ms=command.now_ms))])


def delete_role(state: MetadataState, command: DeleteRoleCommand) -> CommandDecision | CommandRefusal:
    """Delete a role and everything that names it."""
    role: RoleRow | None = state.tables[Table.ROLES].get(command.role)
    if role is None:
        return _unknown_role(command.role)
    memberships: Mapping[tuple[str, str], MembershipRow] = state.tables[Table.MEMBERSHIPS]
    changes = [drop(role), *(drop(memberships[key]) for key in sorted(memberships) if key[0] == command.role)]
    changes += drop_quota(state, ROLE_PREFIX + command.role)
    return CommandDecision(changes + _drop_grants(state, ROLE_PREFIX + command.role))


def change_member(state: MetadataState, command: ChangeMemberCommand) -> CommandDecision | CommandRefusal:
    """Give a role to a user, or take it."""
    user = _find_user(state, command.user)
    if isinstance(user, CommandRefusal):
        return user
    if command.role != ADMIN_ROLE and command.role not in state.tables[Table.ROLES]:
        return _unknown_role(command.role)
    memberships: Mapping[tuple[str, str], MembershipRow] = state.tables[Table.MEMBERSHIPS]
    known = memberships.get((command.role, command.user))
    if not command.is_member:
        return CommandDecision([] if known is None else [drop(known)])
    if known is not None:
        return CommandDecision()
    if sum(user == command.user for _, user in memberships) >= ROLES_PER_USER_MAX:
        return refuse(
            "too_many_roles", f"not done: user {command.user!r} has {ROLES_PER_USER_MAX} roles, the maximum; take some"
        )
    return CommandDecision([put(MembershipRow(role=command.role, user=command.user, added_ms=command.now_ms))])


def add_grant(state: MetadataState, command: AddGrantCommand) -> CommandDecision | CommandRefusal:
    """Add a grant."""
    grants: Mapping[tuple[object, ...], GrantRow] = state.tables[Table.GRANTS]
    refusal = _check_grant(state, command.grant)
    if refusal is not None:
        return refusal
    row = _row(command.grant, command.now_ms)
    if row.key in grants:
        return CommandDecision()
    if len(grants) >= GRANTS_MAX:
        return refuse("too_many_grants", f"not done: the cluster has {GRANTS_MAX} grants, the maximum; use prefixes")
    if sum(other.subject == row.subject for other in grants.values()) >= GRANTS_PER_SUBJECT_MAX:
        return refuse(
            "too_many_grants",
            f"not done: {row.subject} has {GRANTS_PER_SUBJECT_MAX} grants, the maximum; use prefixes",
        )
    return CommandDecision([put(row)])


def remove_grant(state: MetadataState, command: RemoveGrantCommand) -> CommandDecision | CommandRefusal:
    """Remove a grant."""
    known: GrantRow | None = state.tables[Table.GRANTS].get(_row(command.grant, 0).key)
    if known is None:
        return refuse("unknown_grant", f"not done: there is no grant that {command.grant}; list them")
    return CommandDecision([drop(known)])


def _check_grant(state: MetadataState, grant: Grant) -> CommandRefusal | None:
    kind, _, name = grant.subject.partition(":")
    if grant.subject.startswith(USER_PREFIX):
        user = _find_user(state, name)
        if isinstance(user, CommandRefusal):
            return user
    elif grant.subject.startswith(ROLE_PREFIX):
        if name not in state.tables[Table.ROLES]:
            return _unknown_role(name)
    elif grant.subject != ANONYMOUS_SUBJECT:
        return refuse(
            "bad_grant",
            f"not done: {kind!r} cannot have grants; give user:<name>, role:<name> or {ANONYMOUS_SUBJECT}",
        )
    if grant.kind is ResourceKind.CLUSTER:
        is_valid = not grant.name and not grant.is_prefix
        message = "a grant on the cluster has no name"
    else:
        # Not `isprintable`: it knows the characters of one version of Unicode, and nodes may run different Pythons.
        is_valid = bool(grant.name or grant.is_prefix) and not _CONTROL.search(grant.name)
        message = f"a grant on a {grant.kind} needs a name, or a prefix, which may be empty"
    return None if is_valid else refuse("bad_grant", f"not done: {message}")


def _row(grant: Grant, now_ms: int) -> GrantRow:
    return GrantRow(
        subject=grant.subject,
        verb=grant.verb,
        kind=grant.kind,
        name=grant.name,
        is_prefix=grant.is_prefix,
        granted_ms=now_ms,
    )


def _drop_grants(state: MetadataState, subject: str) -> list[Change]:
    grants: Mapping[tuple[str, ...], GrantRow] = state.tables[Table.GRANTS]
    return [drop(grants[key]) for key in sorted(grants) if key[0] == subject]


def _tokens_of(state: MetadataState, user: str) -> list[TokenRow]:
    tokens: Mapping[str, TokenRow] = state.tables[Table.TOKENS]
    return [token for _, token in sorted(tokens.items()) if token.user == user]


def _find_user(state: MetadataState, name: str) -> UserRow | CommandRefusal:
    user: UserRow | None = state.tables[Table.USERS].get(name)
    return refuse("unknown_user", f"not done: unknown user {name!r}") if user is None else user


def _unknown_role(name: str) -> CommandRefusal:
    return refuse("unknown_role", f"not done: unknown role {name!r}")


def _bad_name(kind: str, name: str) -> CommandRefusal:
    return refuse(
        "bad_name",
        f"not done: {name!r} is not a name of a {kind}; use 1 to 100 letters, digits, '.', '_', '@' and '-', "
        "beginning with a letter or digit",
    )
