"""An HTTP/1.1 server as an asyncio protocol, and nothing of Quiver: bytes in, requests out, responses in, bytes out.

It owns connections, their bounds and their deadlines. What a request means is the `Application`'s to say; it is given
whole requests, one at a time for each connection, in the order in which they came.
"""

from __future__ import annotations

from quiver.gateway.http.messages import Application, HttpRequest, HttpResponse, HttpResult
from quiver.gateway.http.server import HttpServer, HttpStatus

__all__ = ["Application", "HttpRequest", "HttpResponse", "HttpResult", "HttpServer", "HttpStatus"]
