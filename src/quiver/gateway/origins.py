"""Which pages of other origins may call this gateway: the console of another node of the same cluster, nothing else.

A console outlives the node that served it: when that node dies, the page goes on with another node, whose origin is
another one for the browser. So a gateway allows (CORS) the origins that are HTTP addresses of registered nodes, with
its own scheme: with TLS, a page that came without it is nobody's. Cookies are not used and not allowed; a token is sent
by the page itself. What a page may call is decided as for every other client.
"""

from __future__ import annotations

from collections.abc import Callable

from quiver.addresses import is_loopback
from quiver.gateway.http import HttpResponse
from quiver.metadata import BrokerState, View

PREFLIGHT_AGE_S = 600
"""How long a browser need not ask again whether it may call."""


class NodeOrigins:
    """The origins of the nodes of this cluster."""

    def __init__(self, view: Callable[[], View], *, is_tls: bool) -> None:
        self._view = view
        self._scheme = "https" if is_tls else "http"

    def accepts(self, origin: bytes) -> bool:
        """Return whether an Origin header is that of a page of a node."""
        scheme, separator, address = origin.decode("latin-1").partition("://")
        if not separator or scheme != self._scheme:
            return False
        wanted = _normalize(address)
        return any(_normalize(one) == wanted for one in self._addresses())

    def sources(self) -> list[str]:
        """Return the origins of all nodes, as a content security policy lists them."""
        return sorted({f"{self._scheme}://{address}" for address in self._addresses()})

    def _addresses(self) -> list[str]:
        brokers = self._view().brokers.values()
        return [one.http_address for one in brokers if one.http_address and one.state is not BrokerState.REMOVED]


def preflight(origin: bytes) -> HttpResponse:
    """Return the answer to a browser that asks whether a page of a node may call."""
    return HttpResponse(
        status=204,
        headers=(
            *allowing(origin),
            ("Access-Control-Allow-Methods", "GET, POST, DELETE"),
            ("Access-Control-Allow-Headers", "Authorization, Content-Type"),
            ("Access-Control-Max-Age", str(PREFLIGHT_AGE_S)),
        ),
    )


def allowing(origin: bytes) -> tuple[tuple[str, str], ...]:
    """Return the headers that let a page of a node read an answer."""
    return (("Access-Control-Allow-Origin", origin.decode("latin-1")), ("Vary", "Origin"))


def _normalize(address: str) -> str:
    """Return an address whose host is one word for all names of this machine."""
    host, _, port = address.lower().rpartition(":")
    return f"localhost:{port}" if is_loopback(host.strip("[]")) else f"{host}:{port}"
