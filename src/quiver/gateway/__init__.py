"""The HTTP gateway of a node: serves the API of `docs/protocol/http.md`.

It translates HTTP requests into the requests of `quiver.wire.messages`, sends data to partition leaders through the
SDK's producer core, and everything else to this node's handler. It keeps no state that a restart would lose.
"""

from __future__ import annotations

from quiver.gateway.gateway import Gateway, GatewayServices

__all__ = ["Gateway", "GatewayServices"]
