"""A client of the HTTP interface that tells the truth about every call: done, certainly not done, or unknown.

Plain `http.client`; each call is one attempt at one node. Retrying is the caller's business, since only the caller
knows what may be repeated.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

CALL_TIMEOUT_S = 15
_NOT_DONE = frozenset((429, 503, 507))
_UNKNOWN = frozenset((504,))


@dataclass(frozen=True)
class Answer:
    """What came of a call; `status` is 0 if there was no answer."""

    outcome: str
    """`ok`, `fail` (certainly not done) or `info` (unknown)."""
    status: int
    body: dict[str, Any]

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def code(self) -> str:
        """Return the failure's code, or an empty string."""
        return str(self.body.get("code", ""))


class SurpriseError(Exception):
    """An answer that the contract does not have for this call."""


class HttpClient:
    """One connection at a time, to one of several nodes; a node that fails is left for the next."""

    def __init__(self, addresses: Sequence[str], first: int = 0) -> None:
        self._addresses = addresses
        self._at = first
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, **parameters: object) -> Answer:
        return self._call("GET", f"{path}?{urlencode(parameters)}" if parameters else path, None)

    def post(self, path: str, **parameters: object) -> Answer:
        return self._call("POST", path, json.dumps(parameters).encode())

    def delete(self, path: str) -> Answer:
        return self._call("DELETE", path, None)

    def turn(self) -> None:
        """Ask the next node from now on."""
        self.close()
        self._at += 1

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, method: str, target: str, body: bytes | None) -> Answer:
        try:
            connection = self._connect()
        except OSError as error:
            self.turn()
            return Answer("fail", 0, {"message": f"not connected: {error}"})
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.turn()
            return Answer("info", 0, {"message": f"no answer: {error!r}"})
        return self._classify(target, response.status, content)

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            address = self._addresses[self._at % len(self._addresses)]
            connection = http.client.HTTPConnection(address, timeout=CALL_TIMEOUT_S)
            connection.connect()
            self._connection = connection
        return self._connection

    def _classify(self, target: str, status: int, content: bytes) -> Answer:
        body: dict[str, Any] = json.loads(content) if content else {}
        if status < 300:
            return Answer("ok", status, body)
        if status in _NOT_DONE or status in _UNKNOWN:
            self.turn()
            is_unknown = status in _UNKNOWN or body.get("outcome") == "unknown"
            return Answer("info" if is_unknown else "fail", status, body)
        if status >= 500:
            raise SurpriseError(f"{target}: {status} {body}")
        return Answer("fail", status, body)


def wait_for(what: str, condition: Any, timeout_s: float) -> Any:
    """Return what `condition` returns as soon as that is true; raise TimeoutError if it takes too long."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.1)
    return value
