"""An HTTP/1.1 server as an asyncio protocol, and nothing of Quiver: bytes in, requests out, responses in, bytes out.

It owns connections, their limits and their deadlines. An `Application` answers the requests: it gets whole requests,
one at a time per connection, in order of arrival.
"""

from __future__ import annotations

from quiver.gateway.http.messages import Application, HttpHead, HttpRequest, HttpResponse, HttpResult
from quiver.gateway.http.server import HttpServer, HttpStatus

__all__ = ["Application", "HttpHead", "HttpRequest", "HttpResponse", "HttpResult", "HttpServer", "HttpStatus"]
