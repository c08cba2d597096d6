"""An identity provider for tests: real keys, real signatures, and an HTTP server on loopback that publishes keys."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://login.example.com/realms/main"
AUDIENCE = "quiver-test"
_ALGORITHMS = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256", ed25519.Ed25519PrivateKey: "EdDSA"}


def new_key(algorithm: str) -> Any:
    if algorithm == "RS256":
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return ec.generate_private_key(ec.SECP256R1()) if algorithm == "ES256" else ed25519.Ed25519PrivateKey.generate()


def claims(**changes: Any) -> dict[str, Any]:
    """Return claims of a good token; a change to None leaves one out, one to a duration is a time from now."""
    now = int(time.time())
    made = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 600, **changes}
    return {name: _at(now, value) for name, value in made.items() if value is not None}


def _at(now: int, value: Any) -> Any:
    return now + int(value.total_seconds()) if isinstance(value, timedelta) else value


def sign(key: Any, key_id: str | None, **changes: Any) -> str:
    """Return a token signed with a key."""
    algorithm = next(name for kind, name in _ALGORITHMS.items() if isinstance(key, kind))
    return jwt.encode(claims(**changes), key, algorithm, headers={} if key_id is None else {"kid": key_id})


def public_jwk(key: Any, key_id: str, **changes: Any) -> dict[str, Any]:
    algorithm = next(name for kind, name in _ALGORITHMS.items() if isinstance(key, kind))
    made = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**made, "kid": key_id, "use": "sig", **changes}


def key_set(keys: Mapping[str, Any]) -> bytes:
    return json.dumps({"keys": [public_jwk(key, key_id) for key_id, key in keys.items()]}).encode()


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing about clients that do not trust the certificate."""


class KeyServer:
    """Serves a key set at `url`; use as ``with``."""

    def __init__(self, content: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.content = content
        self.status = 200
        self.requests = 0
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.requests += 1
                self.send_response(served.status)
                self.send_header("Location", "/other")
                self.send_header("Content-Length", str(len(served.content)))
                self.end_headers()
                self.wfile.write(served.content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}/keys?format=jwks"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
