"""A secure cluster of one node in this process, with the files that `quiver security init` makes, and its users."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

import quiver
from quiver.errors import NotAllowedError, UnavailableError
from quiver.security.bootstrap import initialize, node_directory
from quiver.security.files import CA_KEY_NAME, CA_NAME, TOKEN_NAME
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.secrets import write_secret
from quiver.testing import LocalCluster


class SecuredCluster:
    """The node, the files of its administrator, and helpers to make users."""

    def __init__(self, local: LocalCluster, directory: Path, **options: Any) -> None:
        """`options` are passed to every `connect`."""
        self.local = local
        self._options = options
        self.directory = directory
        self.ca_file = str(directory / CA_NAME)
        self.admin_file = str(directory / TOKEN_NAME)
        self.secrets: list[str] = [Path(self.admin_file).read_text().strip()]
        """Every token that was made."""

    @property
    def url(self) -> str:
        return self.local.urls[0]

    def connect(self, token_file: str = "", **options: Any) -> quiver.Cluster:
        return quiver.connect(self.url, ca_file=self.ca_file, token_file=token_file, **self._options, **options)

    def admin(self) -> quiver.Cluster:
        return self.connect(self.admin_file)

    def audit_files(self) -> list[Path]:
        return list((self.directory / "data").rglob("audit.log"))

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
def secured_cluster(
    directory: Path, settings: Mapping[str, str] | None = None, **options: Any
) -> Iterator[SecuredCluster]:
    """Run a secure cluster; its administrator can connect when this returns."""
    initialize(str(directory), {1: ["127.0.0.1", "localhost"]})
    own = {"security.mode": "secure", "security.directory": node_directory(str(directory), 1)}
    with LocalCluster(nodes=1, directory=str(directory / "data"), settings={**own, **(settings or {})}) as local:
        secured = SecuredCluster(local, directory, **options)
        _wait_for_admin(secured)
        yield secured


def issue_certificate(directory: Path, name: str, *uris: str) -> str:
    """Make a client's certificate with URIs, signed by the authority of a directory; return its file, with the key."""
    authority = x509.load_pem_x509_certificate((directory / CA_NAME).read_bytes())
    signer = load_pem_private_key((directory / CA_KEY_NAME).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
    )
    if uris:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        builder = builder.add_extension(names, critical=False)
    path = directory / f"{name}.pem"
    path.write_bytes(
        builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)
        + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return str(path)


def _wait_for_admin(secured: SecuredCluster) -> None:
    """Wait until the primary has created the first administrator; failures are limited, so do not ask at once again."""
    while True:
        try:
            with secured.admin() as cluster:
                cluster.access.users()
                return
        except (NotAllowedError, UnavailableError):
            time.sleep(0.5)
