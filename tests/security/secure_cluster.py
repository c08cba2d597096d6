"""A cluster whose nodes demand credentials, for tests of access: on loopback and without TLS."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quiver import environment
from quiver.config import SecurityMode
from quiver.security.tokens import Token, hash_secret, new_token
from quiver.testing import LocalCluster


class SecureCluster:
    """A running cluster and the token of its first administrator."""

    def __init__(self, cluster: LocalCluster, admin: Token, data: Path) -> None:
        self.cluster = cluster
        self.admin = admin
        self.data = data

    def call(
        self, method: str, path: str, body: object = None, *, token: str | None = None, node: int = 0
    ) -> tuple[int, dict[str, Any]]:
        """Return status and answer of an HTTP call, by the administrator unless another token is given."""
        address = urlsplit(self.cluster.urls[node]).netloc
        connection = http.client.HTTPConnection(address, timeout=30)
        headers = {"Content-Type": "application/json"}
        text = self.admin.text if token is None else token
        if text:
            headers["Authorization"] = f"Bearer {text}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        return response.status, json.loads(data) if data else {}

    def must(self, method: str, path: str, body: object = None, *, token: str | None = None) -> dict[str, Any]:
        """Return the answer of a call that must succeed."""
        status, answer = self.call(method, path, body, token=token)
        assert status < 300, answer
        return answer

    def add_user(self, name: str, *grants: tuple[str, str]) -> str:
        """Create a user with grants (verb, topic prefix); return its token."""
        self.must("POST", "/users", {"user": name})
        for verb, prefix in grants:
            grant = {"subject": f"user:{name}", "verb": verb, "name": prefix, "is_prefix": True}
            self.must("POST", "/acls", grant)
        token: str = self.must("POST", "/tokens", {"user": name})["token"]
        return token

    def audit(self, node: int = 1) -> list[dict[str, Any]]:
        """Return the events in a node's audit file."""
        files = sorted(self.data.rglob("audit.log"))[node - 1 : node]
        return [json.loads(line)["event"] for path in files for line in path.read_text().splitlines()]


@contextmanager
def run_secure(tmp_path: Path, *, nodes: int = 1) -> Iterator[SecureCluster]:
    """Run a cluster in secure mode; node identity and TLS are others' tests."""
    admin = new_token()
    admin_file = tmp_path / "admin.hash"
    admin_file.write_text(f"{admin.id}:{hash_secret(admin.secret)}\n")
    data = tmp_path / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "decide_mode", lambda _: SecurityMode.SECURE)
        settings = {"security.admin_file": str(admin_file), "log.durability": "none"}
        with LocalCluster(nodes, directory=str(data), settings=settings) as cluster:
            secure = SecureCluster(cluster, admin, data)
            yield secure
