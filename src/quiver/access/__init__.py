"""Who may do what: asked where a request enters a node, on the wire and over HTTP alike.

`AccessControl` decides by the rules of `rules` (requests) and of the gateway's routes; `Authenticator` finds out who a
connection speaks for; `AuditLog` records both. All of them read the node's own copy of the metadata and keep only
caches.
"""

from quiver.access.audit import AuditEvent, AuditLog
from quiver.access.authentication import Authenticator
from quiver.access.control import AccessControl
from quiver.access.requests import AccessRequests
from quiver.access.rules import RULES
from quiver.access.shared_catch_up import SharedCatchUp

__all__ = ["RULES", "AccessControl", "AccessRequests", "AuditEvent", "AuditLog", "Authenticator", "SharedCatchUp"]
