"""Principals: who a connection speaks for, resolved once when it is authenticated. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from quiver.errors import RequestError
from quiver.model import NodeId

NODE_URI = "urn:quiver:node:"
"""Begins the URI by which a node's certificate names it, before its id."""
USER_URI = "urn:quiver:user:"
"""Begins the URI by which a user's certificate names the user."""


class PrincipalKind(StrEnum):
    """What a principal is; the kinds have separate names."""

    ANONYMOUS = "anonymous"
    USER = "user"
    NODE = "node"


class Principal(msgspec.Struct, frozen=True):
    """Who a connection speaks for: a user by name, a node by the decimal form of its id, or nobody known."""

    kind: PrincipalKind
    name: str = ""

    def __str__(self) -> str:
        return self.kind.value if self.kind is PrincipalKind.ANONYMOUS else f"{self.kind}:{self.name}"


def node_principal(node: NodeId) -> Principal:
    """Return the principal of a node."""
    return Principal(PrincipalKind.NODE, str(node))


def user_principal(name: str) -> Principal:
    """Return the principal of a user."""
    return Principal(PrincipalKind.USER, name)


def parse_principal(text: str) -> Principal:
    """Return the principal that `str` wrote; a name without a kind is a user's.

    Raises:
        RequestError: the text names no principal.
    """
    if text == PrincipalKind.ANONYMOUS.value:
        return ANONYMOUS
    kind, colon, name = text.partition(":")
    if not colon:
        kind, name = PrincipalKind.USER.value, text
    if kind not in (PrincipalKind.USER.value, PrincipalKind.NODE.value) or not name:
        raise RequestError(
            f"not done: {text!r} is not a principal; give user:<name>, node:<id> or anonymous", code="bad_principal"
        )
    return Principal(PrincipalKind(kind), name)


ANONYMOUS = Principal(PrincipalKind.ANONYMOUS)
"""Nobody known: a connection without credentials."""
