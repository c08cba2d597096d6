"""Nodes as a client of plain HTTP sees them, one that knows nothing of Quiver; `chaos_cluster` runs them."""

from __future__ import annotations

import http.client
import json
from typing import Any

PATIENCE_S = 120
"""How long is waited for an answer; nothing is said about speed."""


def ask(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    """Send one request with a JSON body; return the status and the decoded answer."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    is_json = (response.getheader("Content-Type") or "").startswith("application/json")
    return response.status, json.loads(data) if data and is_json else {}
