"""Requests for authentication, and for the administration of users, tokens, roles, grants and quotas. Pure.

`Authenticate`, or `BeginScram` and `FinishScram`, are the first requests on a connection; from then on the connection
speaks for the user. A secret is in a response exactly once: in that of `CreateTokenRequest`.

No change is repeated after an unknown outcome, although a second one would change nothing: a late duplicate of a grant
must not undo the revoke that was acknowledged in between.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.model import Index
from quiver.security.limits import QuotaLimits, QuotaSubject
from quiver.security.permissions import AccessVerdict, Grant, ResourceKind, ResourceName, SubjectName, Verb
from quiver.security.scram import MESSAGE_LENGTH_MAX, ScramVerifier
from quiver.wire.requests import Count, Done, Name, Request, Response

TokenText = Annotated[str, Meta(max_length=8_000)]
"""A token, or a JSON web token."""
ScramMessage = Annotated[str, Meta(max_length=MESSAGE_LENGTH_MAX)]

# -- authentication ----------------------------------------------------------------------------------


class Authenticated(Response, frozen=True):
    """The connection speaks for a principal from now on."""

    principal: str
    """Such as `user:alice`."""
    expires_ms: int | None = None
    """When the credential expires, by the cluster's wall clock."""
    message: str = ""
    """The server's last SCRAM message, which proves the server to the client."""


class Authenticate(Request[Authenticated], frozen=True, tag="authenticate"):
    """Authenticate this connection with a token."""

    response = Authenticated
    is_read = True

    token: TokenText

    def __repr__(self) -> str:
        return "Authenticate(token=<hidden>)"


class ScramChallenge(Response, frozen=True):
    """The server's first SCRAM message."""

    message: ScramMessage


class BeginScram(Request[ScramChallenge], frozen=True, tag="begin_scram"):
    """Begin to authenticate this connection with a password, by SCRAM-SHA-256; `message` is the client's first."""

    response = ScramChallenge
    is_read = True

    message: ScramMessage


class FinishScram(Request[Authenticated], frozen=True, tag="finish_scram"):
    """Finish what `BeginScram` began on the same connection; `message` is the client's last, with its proof."""

    response = Authenticated
    is_read = True

    message: ScramMessage


AUTHENTICATIONS = frozenset((Authenticate, BeginScram, FinishScram))
"""Requests without a quota, and with turns of their host's: a stranger who uses up those of the anonymous would lock
everybody out. Failures of one host are limited by the authenticator."""


# -- certificates ------------------------------------------------------------------------------------


class NodeSigned(Response, frozen=True):
    """A node's certificate and the authority's, as PEM."""

    certificate: str
    authority: str


class SignNode(Request[NodeSigned], frozen=True, tag="sign_node"):
    """Sign the certificate of a new node; the sender's join token says which, and is used up."""

    response = NodeSigned
    _repeatable = False

    csr: Annotated[str, Meta(max_length=16_000)]
    """A certificate signing request, as PEM, of which only the key counts."""


# -- users and tokens --------------------------------------------------------------------------------


class TokenInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token, without its secret."""

    token_id: str
    user: str
    created_ms: int
    expires_ms: int | None = None


class UserInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A user."""

    user: str
    created_ms: int
    is_enabled: bool = True
    has_password: bool = False
    roles: tuple[str, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()


class UsersFound(Response, frozen=True):
    """Users, by name."""

    users: tuple[UserInfo, ...] = ()


class ListUsers(Request[UsersFound], frozen=True, tag="list_users"):
    """List all users, or one; an unknown user is left out of the response."""

    response = UsersFound
    waits_for_index = True
    is_read = True

    user: Name | None = None


class CreateUserRequest(Request[Done], frozen=True, tag="create_user"):
    """Create a user; without a verifier it can log in by token or certificate only."""

    response = Done
    _repeatable = False

    user: Name
    verifier: ScramVerifier | None = None


class ChangeUserRequest(Request[Done], frozen=True, tag="change_user"):
    """Enable or disable a user, or give it another password; None leaves as it is."""

    response = Done
    _repeatable = False

    user: Name
    is_enabled: bool | None = None
    verifier: ScramVerifier | None = None


class DeleteUserRequest(Request[Done], frozen=True, tag="delete_user"):
    """Delete a user with its tokens, memberships and grants."""

    response = Done
    _repeatable = False

    user: Name


class TokenCreated(Response, frozen=True):
    """A new token; the cluster stores only its hash, so this is the only time that it is shown."""

    token_id: str
    token: str
    expires_ms: int | None = None
    index: Index = Index(0)

    def __repr__(self) -> str:
        return f"TokenCreated(token_id={self.token_id!r}, token=<hidden>)"


class CreateTokenRequest(Request[TokenCreated], frozen=True, tag="create_token"):
    """Create a token of a user, which may have two at a time: for rotation."""

    response = TokenCreated
    _repeatable = False

    user: Name
    lasting_ms: Count | None = None
    """None: it does not expire."""


class RevokeTokenRequest(Request[Done], frozen=True, tag="revoke_token"):
    """Delete a token; connections that it authenticated lose their permissions."""

    response = Done
    _repeatable = False

    token_id: Name


# -- roles and grants --------------------------------------------------------------------------------


class RoleInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A role and its members."""

    role: str
    created_ms: int = 0
    users: tuple[str, ...] = ()
    grants: tuple[Grant, ...] = ()


class RolesFound(Response, frozen=True):
    """Roles, by name."""

    roles: tuple[RoleInfo, ...] = ()


class ListRoles(Request[RolesFound], frozen=True, tag="list_roles"):
    """List all roles with their members and grants."""

    response = RolesFound
    waits_for_index = True
    is_read = True


class CreateRoleRequest(Request[Done], frozen=True, tag="create_role"):
    """Create a role."""

    response = Done
    _repeatable = False

    role: Name


class DeleteRoleRequest(Request[Done], frozen=True, tag="delete_role"):
    """Delete a role with its memberships and grants."""

    response = Done
    _repeatable = False

    role: Name


class ChangeMemberRequest(Request[Done], frozen=True, tag="change_member"):
    """Give a role to a user, or take it."""

    response = Done
    _repeatable = False

    role: Name
    user: Name
    is_member: bool = True


class GrantsFound(Response, frozen=True):
    """Grants, sorted."""

    grants: tuple[Grant, ...] = ()


class ListGrants(Request[GrantsFound], frozen=True, tag="list_grants"):
    """List all grants, or those of a subject such as `user:alice`, `role:ops` or `anonymous`."""

    response = GrantsFound
    waits_for_index = True
    is_read = True

    subject: SubjectName | None = None


class AddGrantRequest(Request[Done], frozen=True, tag="add_grant"):
    """Add a grant."""

    response = Done
    _repeatable = False

    grant: Grant


class RemoveGrantRequest(Request[Done], frozen=True, tag="remove_grant"):
    """Remove a grant, which is named by all its parts."""

    response = Done
    _repeatable = False

    grant: Grant


# -- quotas ------------------------------------------------------------------------------------------


class QuotaInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a subject."""

    subject: str
    limits: QuotaLimits
    changed_ms: int = 0


class QuotasFound(Response, frozen=True):
    """Quotas, by subject."""

    quotas: tuple[QuotaInfo, ...] = ()


class ListQuotas(Request[QuotasFound], frozen=True, tag="list_quotas"):
    """List all quotas, or those of a subject such as `user:alice`, `role:ops`, `default` or `topic:logs`."""

    response = QuotasFound
    waits_for_index = True
    is_read = True

    subject: QuotaSubject | None = None


class SetQuotaRequest(Request[Done], frozen=True, tag="set_quota"):
    """Set limits of a subject; those that are None stay as they are."""

    response = Done
    _repeatable = False

    subject: QuotaSubject
    limits: QuotaLimits


class RemoveQuotaRequest(Request[Done], frozen=True, tag="remove_quota"):
    """Remove all limits of a subject."""

    response = Done
    _repeatable = False

    subject: QuotaSubject


class ChangeOwnerRequest(Request[Done], frozen=True, tag="change_owner"):
    """Give a topic, producer or consumer to another user, or to nobody: then to the first user that uses its name.

    A group belongs to the owner of its consumer.
    """

    response = Done
    _repeatable = False

    kind: Literal["topic", "producer", "consumer"]
    id: Count
    owner: Name
    """Such as `user:alice`, who need not exist; empty: nobody."""


# -- explanation -------------------------------------------------------------------------------------


class AccessExplained(Response, frozen=True):
    """Whether a principal may do something, and what decides it."""

    verdict: AccessVerdict


class ExplainAccess(Request[AccessExplained], frozen=True, tag="explain_access"):
    """Explain whether a principal, such as `user:alice` or `anonymous`, may do something."""

    response = AccessExplained
    waits_for_index = True
    is_read = True

    principal: SubjectName
    verb: Verb
    kind: ResourceKind = ResourceKind.TOPIC
    name: ResourceName = ""


AuthenticationRequest = Authenticate | BeginScram | FinishScram
SecurityRead = ListUsers | ListRoles | ListGrants | ListQuotas | ExplainAccess
SecurityChange = (
    CreateUserRequest
    | ChangeUserRequest
    | DeleteUserRequest
    | CreateTokenRequest
    | RevokeTokenRequest
    | CreateRoleRequest
    | DeleteRoleRequest
    | ChangeMemberRequest
    | AddGrantRequest
    | RemoveGrantRequest
    | SetQuotaRequest
    | RemoveQuotaRequest
    | ChangeOwnerRequest
)
SecurityRequest = AuthenticationRequest | SecurityRead | SecurityChange | SignNode
