"""The HTTP front door: `docs/protocol/http.md` to the letter, on every node with the gateway role.

It turns HTTP requests into the requests of `quiver.wire.messages`, sends data to partitions' leaders through the SDK's
own core, and everything else to this node's handler. It keeps nothing that a restart would lose.
"""

from __future__ import annotations

from quiver.gateway.gateway import Gateway, GatewayServices

__all__ = ["Gateway", "GatewayServices"]
