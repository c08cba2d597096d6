"""Principals: who a connection speaks for, resolved once when it is authenticated. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec


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


ANONYMOUS = Principal(PrincipalKind.ANONYMOUS)
"""Nobody known: a connection without credentials."""
