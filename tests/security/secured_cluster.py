"""A secure cluster of one node in this process, with the files that `quiver security init` makes, and its users."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import quiver
from quiver.errors import NotAllowedError, UnavailableError
from quiver.security.bootstrap import initialize, node_directory
from quiver.security.files import CA_NAME, TOKEN_NAME
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.secrets import write_secret
from quiver.testing import LocalCluster


class SecuredCluster:
    """The node, the files of its administrator, and helpers to make users."""

    def __init__(self, local: LocalCluster, directory: Path) -> None:
        self.local = local
        self.directory = directory
        self.ca_file = str(directory / CA_NAME)
        self.admin_file = str(directory / TOKEN_NAME)
        self.secrets: list[str] = [Path(self.admin_file).read_text().strip()]
        """Every token that was made."""

    @property
    def url(self) -> str:
        return self.local.urls[0]

    def connect(self, token_file: str = "", **options: Any) -> quiver.Cluster:
        return quiver.connect(self.url, ca_file=self.ca_file, token_file=token_file, **options)

    def admin(self) -> quiver.Cluster:
        return self.connect(self.admin_file)

    def flags(self, token_file: str = "") -> list[str]:
        """Return the flags by which a command reaches the cluster."""
        return ["--url", self.url, "--ca-file", self.ca_file, "--token-file", token_file or self.admin_file]

    def add_user(self, name: str, *grants: tuple[Verb, str]) -> str:
        """Create a user that may do some verbs on topics by prefix; return the file of its token."""
        with self.admin() as cluster:
            cluster.access.create_user(name)
            for verb, prefix in grants:
                cluster.access.add_grant(
                    Grant(subject=f"user:{name}", verb=verb, kind=ResourceKind.TOPIC, name=prefix, is_prefix=True)
                )
            return self.add_token(cluster, name)

    def add_token(self, cluster: quiver.Cluster, name: str) -> str:
        """Create a token of a user; return its file."""
        token = cluster.access.create_token(name)
        self.secrets.append(token.secret.reveal())
        path = str(self.directory / f"{name}-{token.token_id}.token")
        write_secret(path, token.secret)
        return path


@contextmanager
def secured_cluster(directory: Path) -> Iterator[SecuredCluster]:
    """Run a secure cluster; its administrator can connect when this returns."""
    initialize(str(directory), {1: ["127.0.0.1", "localhost"]})
    settings = {"security.mode": "secure", "security.directory": node_directory(str(directory), 1)}
    with LocalCluster(nodes=1, settings=settings) as local:
        secured = SecuredCluster(local, directory)
        _wait_for_admin(secured)
        yield secured


def _wait_for_admin(secured: SecuredCluster) -> None:
    """Wait until the primary has created the first administrator; failures are limited, so do not ask at once again."""
    while True:
        try:
            with secured.admin() as cluster:
                cluster.access.users()
                return
        except (NotAllowedError, UnavailableError):
            time.sleep(0.5)
