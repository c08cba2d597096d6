"""Who somebody is and what they may do: principals, credentials, permissions. Pure values and decisions.

Asked in one place, where a request enters a node, whichever protocol it came by.
"""

from __future__ import annotations

from quiver.security.principal import (
    ANONYMOUS,
    Principal,
    PrincipalKind,
    node_principal,
    parse_principal,
    user_principal,
)

__all__ = ["ANONYMOUS", "Principal", "PrincipalKind", "node_principal", "parse_principal", "user_principal"]
