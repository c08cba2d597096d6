"""The identity of one connection: the principal that it speaks for, and how it proved that. No I/O."""

from __future__ import annotations

import msgspec

from quiver.security.permissions import Permissions
from quiver.security.principal import ANONYMOUS, Principal
from quiver.security.scram import ScramServer


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """How a connection proved its principal, so that it can be checked again when the metadata changes."""

    kind: str
    """`token`, `scram`, `certificate` or `jwt`."""
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
        """Compiled permissions, valid while `version` is that of the access control."""
        self.version = -1
        self.scram: ScramServer | None = None
        """An exchange that the client has begun."""
