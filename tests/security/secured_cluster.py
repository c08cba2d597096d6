"""A secure cluster in this process, with the files that `quiver security init` makes, and its users."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

import quiver
from quiver.security.bootstrap import initialize
from quiver.security.files import CA_KEY_NAME, CA_NAME, TOKEN_NAME
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.secrets import write_secret
from quiver.testing import LocalCluster

PATIENCE_S = 120
"""How long is waited for an answer; nothing is said about speed."""


class SecuredCluster:
    """The nodes, the files of the administrator, and helpers to make users and to ask over HTTP."""

    def __init__(self, local: LocalCluster, directory: Path, **options: Any) -> None:
        """`options` are passed to every `connect`."""
        self.local = local
        self._options = options
        self.directory = directory
        self.data = directory / "data"
        self.ca_file = str(directory / CA_NAME)
        self._tls = ssl.create_default_context(cafile=self.ca_file)
        self.admin_file = str(directory / TOKEN_NAME)
        self.secrets: list[str] = [Path(self.admin_file).read_text().strip()]
        """Every token that was made."""

    @property
    def url(self) -> str:
        return self.local.urls[0]

    def connect(self, token_file: str = "", *, url: str = "", **options: Any) -> quiver.Cluster:
        return quiver.connect(url or self.url, ca_file=self.ca_file, token_file=token_file, **self._options, **options)

    def admin(self) -> quiver.Cluster:
        return self.connect(self.admin_file)

    def audit_files(self) -> list[Path]:
        return sorted(self.data.glob("*/audit.log"))

    def audit_events(self) -> list[dict[str, Any]]:
        """Return the events in the first node's audit file."""
        return [json.loads(line)["event"] for line in self.audit_files()[0].read_text().splitlines()]

    def call(
        self, method: str, path: str, body: object = None, *, token: str | None = None, node: int = 1
    ) -> tuple[int, dict[str, Any]]:
        """Return status and answer of an HTTP call, by the administrator unless another token, or "", is given."""
        address = urlsplit(self.local.urls[node - 1]).netloc
        headers = {"Content-Type": "application/json"}
        if text := self.secrets[0] if token is None else token:
            headers["Authorization"] = f"Bearer {text}"
        with closing(http.client.HTTPSConnection(address, timeout=PATIENCE_S, context=self._tls)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
        return response.status, json.loads(data) if data else {}

    def must(self, method: str, path: str, body: object = None, *, token: str | None = None) -> dict[str, Any]:
        """Return the answer of a call that must succeed."""
        status, answer = self.call(method, path, body, token=token)
        assert status < 300, answer
        return answer

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
    directory: Path, settings: Mapping[str, str] | None = None, *, nodes: int = 1, **options: Any
) -> Iterator[SecuredCluster]:
    """Run a secure cluster; its administrator can connect to every node when this returns."""
    initialize(str(directory), {node: ["127.0.0.1", "localhost"] for node in range(1, nodes + 1)})
    own = {"security.mode": "secure", "security.directory": f"{directory}/node-{{node}}"}
    with LocalCluster(nodes=nodes, directory=str(directory / "data"), settings={**own, **(settings or {})}) as local:
        secured = SecuredCluster(local, directory, **options)
        for url in local.urls:
            with secured.connect(secured.admin_file, url=url) as cluster:
                cluster.access.users()  # waits until the node knows the first administrator
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
