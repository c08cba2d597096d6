"""The identity of one connection: the principal that it speaks for, and how it proved that. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quiver.security.permissions import Permissions, ResourceKind, Verb
from quiver.security.principal import ANONYMOUS, USER_URI, Principal, PrincipalKind, user_principal
from quiver.security.scram import ScramServer


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """How a connection proved its principal, so that it can be checked again when the metadata changes."""

    kind: str
    """`token`, `scram` or `certificate`."""
    id: str = ""
    """A token's id."""
    stamp: str = ""
    """What must still be stored for the credential to hold, such as a token's hash."""
    expires_ms: int | None = None


class ConnectionIdentity:
    """Who a connection speaks for. Only its authentication changes the principal."""

    __slots__ = ("address", "credential", "permissions", "principal", "scram", "version")

    def __init__(self, principal: Principal = ANONYMOUS, *, address: str = "") -> None:
        self.principal = principal
        self.address = address
        self.credential: Credential | None = None
        self.permissions: Permissions | None = None
        """Compiled permissions, valid while `version` is the access table of the newest metadata."""
        self.version: object = None
        self.scram: ScramServer | None = None
        """An exchange that the client has begun."""

    @property
    def owner(self) -> str:
        """Return the principal as the owner of what it registers, and in the metadata's log; empty unless a user."""
        return str(self.principal) if self.principal.kind is PrincipalKind.USER else ""

    def allows(self, verb: Verb, kind: ResourceKind, name: str) -> bool:
        """Return whether the permissions by which a request was let in allow something else, too."""
        return self.permissions is None or self.permissions.allows(verb, kind, name)


def certificate_identity(certificate: Mapping[str, Any] | None, *, address: str) -> ConnectionIdentity:
    """Return the identity of a client by its verified certificate; anonymous if that names no user, or several."""
    names = [] if certificate is None else certificate.get("subjectAltName", ())
    users = [value[len(USER_URI) :] for kind, value in names if kind == "URI" and value.startswith(USER_URI)]
    if len(users) != 1 or not users[0]:
        return ConnectionIdentity(address=address)
    identity = ConnectionIdentity(user_principal(users[0]), address=address)
    identity.credential = Credential(kind="certificate")
    return identity
