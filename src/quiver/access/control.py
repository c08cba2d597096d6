"""`AccessControl`: the one decision whether a request may be done, for wire and HTTP.

Each connection has a `ConnectionIdentity`. Its permissions are compiled once and used until users, tokens, memberships
or grants change; then the credential is checked again. What is decided here never waits.

An open cluster (development mode, `insecure`) gives everybody without credentials the role of an administrator: a
grant like any other, and the only difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from quiver.access.audit import AUTHENTICATE, AuditedOperation, AuditEvent, AuditLog
from quiver.access.rules import FILTERS, RULES, ResponseFilter, deny, describe_operation
from quiver.clock import Clock
from quiver.errors import NotAllowedError, NotFoundError, QuiverError, RequestError
from quiver.metadata import View
from quiver.security.identity import ConnectionIdentity, parse_acting
from quiver.security.permissions import (
    AccessTable,
    AccessVerdict,
    Permissions,
    ResourceKind,
    Verb,
    admin_grant,
    explain,
)
from quiver.security.principal import ANONYMOUS, PrincipalKind, parse_principal
from quiver.wire.requests import Request, Response

ACTED_FOR_MAX = 4_096
"""Principals for which other nodes have sent requests that are remembered; beyond it, they begin again."""


class AccessControl:
    """Decide about requests by this node's copy of the metadata."""

    def __init__(self, *, view: Callable[[], View], clock: Clock, is_open: bool, audit: AuditLog) -> None:
        """`is_open`: whether a client without credentials may do everything."""
        self.is_open = is_open
        self.audit = audit
        self.view = view
        """Returns the metadata by which is decided."""
        self._clock = clock
        self._acted_for: dict[str, ConnectionIdentity] = {}
        self._anonymous = ConnectionIdentity()
        """Holds what everybody without credentials may do: each of their connections has an identity of its own."""
        self._seen: View | None = None
        self._table: AccessTable | None = None
        """Grants and memberships of `_seen`, the view by which was decided last."""

    # -- requests --------------------------------------------------------------------------------

    def check(
        self, identity: ConnectionIdentity, request: Request[Any], payload: memoryview, correlation_id: int = 0
    ) -> tuple[ConnectionIdentity, ResponseFilter | None]:
        """Return who a request is done for, and the filter of its response; identities of nodes may act for others.

        Raises:
            NotAllowedError: it is not allowed; or, as `unauthenticated`, the credential is missing or not valid.
            NotFoundError: the topic that it names by id does not exist.
        """
        if request.on_behalf_of:
            identity = self._act_for(identity, request.on_behalf_of)
        permissions = self.permissions(identity)
        if permissions.is_admin:
            return identity, None
        kind = type(request)
        view = self._seen
        assert view is not None  # `permissions` has just taken it
        try:
            RULES[kind](permissions, view, request, payload)
        except NotAllowedError as error:
            self.note_denial(identity, describe_operation(request, correlation_id), error)
            raise
        return identity, FILTERS.get(kind)

    def is_allowed(self, identity: ConnectionIdentity, request: Request[Any], payload: memoryview) -> bool:
        """Return whether a request that nobody else forwards is allowed; nothing is recorded.

        Raises:
            NotAllowedError: the credential is not valid any more (`unauthenticated`).
        """
        permissions = self.permissions(identity)
        if permissions.is_admin:
            return True
        try:
            RULES[type(request)](permissions, self.view(), request, payload)
        except (NotAllowedError, NotFoundError):
            return False
        return True

    def check_early(
        self, identity: ConnectionIdentity, permissions: Permissions, describe: Callable[[], AuditedOperation]
    ) -> None:
        """Raise `NotAllowedError` for somebody who may do nothing at all, before a request is decoded or waits."""
        if permissions.is_powerless:
            error = deny(permissions, "do this")
            self.note_denial(identity, describe(), error)
            raise error

    def filter(self, identity: ConnectionIdentity, keep: ResponseFilter, response: Response) -> Response:
        """Return a response without what its receiver may not see."""
        return keep(self.permissions(identity), self.view(), response)

    def permissions(self, identity: ConnectionIdentity) -> Permissions:
        """Return what the principal of a connection may do now.

        Raises:
            NotAllowedError: its credential is not valid any more (`unauthenticated`).
        """
        found, credential, view = identity.permissions, identity.credential, self.view()
        if view is not self._seen:
            self._seen, self._table = view, view.access
        if found is None or identity.version is not self._table:
            found = self._renew(identity, view)
        expires_ms = None if credential is None else credential.expires_ms
        if expires_ms is not None and self._clock.wall_ms() >= expires_ms:
            raise self._demote(identity, "the credential has expired")
        return found

    def _renew(self, identity: ConnectionIdentity, view: View) -> Permissions:
        principal = identity.principal
        if principal.kind is PrincipalKind.USER and not self._is_valid(identity, view):
            raise self._demote(identity, "the credential was revoked, or the user disabled or deleted")
        if identity.permissions is None and identity.credential is not None and identity.roles is None:
            # Others are recorded when they are checked.
            self._record_authentication(identity, outcome="done", detail="certificate")
        known = self._anonymous if principal == ANONYMOUS else identity
        if known.permissions is None or known.version is not view.access:
            known.permissions, known.version = self._compile(identity, view), view.access
        identity.permissions, identity.version = known.permissions, known.version
        return known.permissions

    def _record_authentication(self, identity: ConnectionIdentity, *, outcome: str, detail: str) -> None:
        self.audit.record(
            AuditEvent(
                kind="authentication",
                verb=AUTHENTICATE,
                principal=str(identity.principal),
                address=identity.address,
                outcome=outcome,
                detail=detail,
            )
        )

    def _compile(self, identity: ConnectionIdentity, view: View) -> Permissions:
        principal = identity.principal
        is_trusted = principal.kind is PrincipalKind.NODE or (self.is_open and principal == ANONYMOUS)
        grants = view.access.grants_of(principal, identity.roles or ())
        return Permissions(principal, [admin_grant(str(principal)), *grants] if is_trusted else grants)

    def _is_valid(self, identity: ConnectionIdentity, view: View) -> bool:
        user = view.users.get(identity.principal.name)
        if identity.roles is not None:  # the identity provider keeps its users: this cluster may only refuse one
            return user is None or user.is_enabled
        if user is None or not user.is_enabled:
            return False
        credential = identity.credential
        if credential is None or credential.kind not in ("token", "scram"):
            return True
        if credential.kind == "scram":
            return user.verifier is not None and user.verifier.stored_key == credential.stamp
        token = view.tokens.get(credential.id)
        return token is not None and token.secret_hash == credential.stamp and token.user == user.name

    def _demote(self, identity: ConnectionIdentity, reason: str) -> NotAllowedError:
        error = NotAllowedError(f"not done: {reason}; authenticate again", code="unauthenticated")
        self._record_authentication(identity, outcome=error.code, detail=reason)
        # Not anonymous: a client that was somebody must not go on with what everybody may do.
        identity.permissions, identity.version = Permissions(identity.principal, ()), None
        return error

    def _act_for(self, identity: ConnectionIdentity, principal: str) -> ConnectionIdentity:
        if identity.principal.kind is not PrincipalKind.NODE:
            raise NotAllowedError("not done: only nodes send requests on behalf of others")
        acting = self._acted_for.get(principal)
        if acting is None:
            if len(self._acted_for) >= ACTED_FOR_MAX:
                self._acted_for.clear()
            acting = self._acted_for[principal] = parse_acting(principal, address=identity.address)
        return acting

    # -- records ---------------------------------------------------------------------------------

    def note_denial(self, identity: ConnectionIdentity, operation: AuditedOperation, error: QuiverError) -> None:
        """Record that something was not allowed."""
        self._note("denial", identity, operation, outcome=error.code, detail=error.message)

    def note_change(self, identity: ConnectionIdentity, operation: AuditedOperation, outcome: str) -> None:
        """Record the outcome of an administrative change, on the node that it entered."""
        self._note("change", identity, operation, outcome=outcome)

    def _note(
        self,
        kind: Literal["denial", "change"],
        identity: ConnectionIdentity,
        operation: AuditedOperation,
        *,
        outcome: str,
        detail: str = "",
    ) -> None:
        self.audit.record(
            AuditEvent(
                kind=kind,
                principal=str(identity.principal),
                address=operation.address or identity.address,
                request=operation.request,
                verb=operation.verb,
                resource=operation.resource,
                request_id=operation.request_id,
                outcome=outcome,
                detail=detail,
            )
        )

    # -- explanation -----------------------------------------------------------------------------

    def explain(self, principal: str, verb: Verb, kind: ResourceKind, name: str) -> AccessVerdict:
        """Explain whether a principal may do something; raises `RequestError` for what is no principal."""
        found = parse_principal(principal)
        view = self.view()
        if self.is_open and found == ANONYMOUS:
            reason = "this cluster is open: everybody without credentials may do everything"
            return AccessVerdict(is_allowed=True, reason=reason, grant=admin_grant(str(found)))
        if found.kind is PrincipalKind.USER:
            user = view.users.get(found.name)
            if user is None:
                return AccessVerdict(is_allowed=False, reason=f"there is no user {found.name!r}")
            if not user.is_enabled:
                return AccessVerdict(is_allowed=False, reason=f"user {found.name!r} is disabled")
        if kind is ResourceKind.CLUSTER and name:
            raise RequestError("not done: the cluster has no name", code="bad_resource")
        return explain(view.access, found, verb, kind, name)
