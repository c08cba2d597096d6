"""The identity of one connection: the principal that it speaks for, and how it proved that. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quiver.security.permissions import Permissions, ResourceKind, Verb
from quiver.security.principal import (
    ANONYMOUS,
    USER_URI,
    Principal,
    PrincipalKind,
    parse_principal,
    user_principal,
)
from quiver.security.scram import ScramServer

PROVIDER = "oidc"
"""Marks a principal for whom an identity provider vouches."""
_SEPARATOR = ";"
"""Separates the roles of such a principal; it is in no name."""


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """How a connection proved its principal, so that it can be checked again when the metadata changes."""

    kind: str
    """`token`, `scram`, `certificate` or `oidc`."""
    id: str = ""
    """A token's id, or that of the key that signed it."""
    stamp: str = ""
    """What must still be stored for the credential to hold, such as a token's hash."""
    expires_ms: int | None = None


class ConnectionIdentity:
    """Who a connection speaks for. Only its authentication changes the principal."""

    __slots__ = ("address", "credential", "is_open", "permissions", "principal", "roles", "scram", "version")

    def __init__(self, principal: Principal = ANONYMOUS, *, address: str = "") -> None:
        self.principal = principal
        self.address = address
        self.is_open = True
        """Whether the connection has not ended; an identity without a connection stays open."""
        self.credential: Credential | None = None
        self.permissions: Permissions | None = None
        """Compiled permissions, valid while `version` is the access table of the newest metadata."""
        self.version: object = None
        self.roles: tuple[str, ...] | None = None
        """Roles by the word of an identity provider; None if none vouches for the principal. With it, the user need not
        exist in the metadata."""
        self.scram: ScramServer | None = None
        """An exchange that the client has begun."""

    @property
    def owner(self) -> str:
        """Return the principal as the owner of what it registers, and in the metadata's log; empty unless a user."""
        return str(self.principal) if self.principal.kind is PrincipalKind.USER else ""

    @property
    def on_behalf_of(self) -> str:
        """Return what another node needs to decide about a request of this principal; `parse_acting` reads it."""
        if self.roles is None:
            return str(self.principal)
        return _SEPARATOR.join((str(self.principal), PROVIDER, *self.roles))

    def allows(self, verb: Verb, kind: ResourceKind, name: str) -> bool:
        """Return whether the permissions by which a request was let in allow something else, too."""
        return self.permissions is None or self.permissions.allows(verb, kind, name)


def parse_acting(text: str, *, address: str) -> ConnectionIdentity:
    """Return the identity for which a node sends a request, as `on_behalf_of` wrote it.

    Raises:
        RequestError: the text names no principal.
    """
    principal, *vouched = text.split(_SEPARATOR)
    identity = ConnectionIdentity(parse_principal(principal), address=address)
    if vouched[:1] == [PROVIDER]:
        identity.roles = tuple(vouched[1:])
    return identity


def certificate_identity(certificate: Mapping[str, Any] | None, *, address: str) -> ConnectionIdentity:
    """Return the identity of a client by its verified certificate; anonymous if that names no user, or several."""
    names = [] if certificate is None else certificate.get("subjectAltName", ())
    users = [value[len(USER_URI) :] for kind, value in names if kind == "URI" and value.startswith(USER_URI)]
    if len(users) != 1 or not users[0]:
        return ConnectionIdentity(address=address)
    identity = ConnectionIdentity(user_principal(users[0]), address=address)
    identity.credential = Credential(kind="certificate")
    return identity
