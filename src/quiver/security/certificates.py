"""The cluster's certificate authority: its own certificate, and those of nodes. Only `cryptography` does cryptography.

A node's certificate names the node (`urn:quiver:node:<id>`, and `node-<id>`, which TLS libraries can check) and every
host at which it is dialled. Keys are ECDSA on P-256: browsers and old HTTP clients accept nothing newer. Private keys
are made where they are used; a request for a certificate carries only the public key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quiver.errors import ConfigError, RequestError
from quiver.security.principal import NODE_URI
from quiver.security.secrets import Secret

AUTHORITY_DAYS: Final = 3650
NODE_DAYS: Final = 365
HOSTS_MAX: Final = 16
_CLOCK_SKEW: Final = timedelta(minutes=5)
"""How far the clocks of the machines may differ before a new certificate is not valid yet."""


class Authority:
    """A certificate authority with its key: it signs certificates."""

    def __init__(self, certificate: str, key: Secret) -> None:
        """Load both from PEM.

        Raises:
            ConfigError: one of them cannot be read, or they do not belong together.
        """
        self.certificate = certificate
        """Its own certificate, as PEM."""
        self._certificate = load_certificate(certificate)
        self._key = _load_key(key)
        if self._certificate.public_key() != self._key.public_key():
            raise ConfigError("the authority's key does not belong to its certificate")

    def issue(self, node: int, hosts: Sequence[str], request: str, *, days: int = NODE_DAYS) -> str:
        """Return the certificate, as PEM, of a node that is dialled at `hosts`, for the key of a signing request.

        Everything that the request says besides its key is ignored.

        Raises:
            RequestError: the request or a host is not valid.
        """
        names = x509.SubjectAlternativeName(_alternative_names(node, hosts))
        return self._sign(_name(f"node-{node}"), names, _load_request(request), days=days)

    def renew(self, certificate: str, *, days: int = NODE_DAYS, hosts: Sequence[str] = ()) -> str:
        """Return a certificate, as PEM, for the node, the hosts and the key of one that this authority issued.

        `hosts` are further names or addresses at which the node is dialled.

        Raises:
            ConfigError: the text is no certificate.
            RequestError: another authority issued it, it is not that of a node, or a host is not valid.
        """
        old = load_certificate(certificate)
        try:
            old.verify_directly_issued_by(self._certificate)
            names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
            raise RequestError(
                "not done: this authority did not issue the certificate; name the directory of the one that did",
                code="other_authority",
            ) from None
        key = old.public_key()
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not any(uri.startswith(NODE_URI) for uri in uris):
            raise RequestError("not done: not the certificate of a node", code="bad_node")
        if hosts:
            node = int(next(uri for uri in uris if uri.startswith(NODE_URI)).removeprefix(NODE_URI))
            known = [one for one in list_names(certificate) if one != f"node-{node}"]
            names = x509.SubjectAlternativeName(_alternative_names(node, list(dict.fromkeys((*known, *hosts)))))
        return self._sign(old.subject, names, key, days=days)

    def _sign(
        self, subject: x509.Name, names: x509.SubjectAlternativeName, key: ec.EllipticCurvePublicKey, *, days: int
    ) -> str:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(min(now + timedelta(days=days), self._certificate.not_valid_after_utc))
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def list_names(certificate: str) -> list[str]:
    """Return the hosts and node names in a certificate, given as PEM; raises `ConfigError` if it is none."""
    try:
        names = load_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def make_authority(name: str) -> tuple[str, Secret]:
    """Return the certificate of a new authority and its key, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM).decode(), _as_pem(key)


def make_key() -> Secret:
    """Return a new private key, as PEM."""
    return _as_pem(ec.generate_private_key(ec.SECP256R1()))


def make_request(key: Secret, node: int) -> str:
    """Return a request, as PEM, for the certificate of a node with this key."""
    loaded = _load_key(key)
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(f"node-{node}"))
    return builder.sign(loaded, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def load_certificate(pem: str) -> x509.Certificate:
    """Return the first certificate of a PEM text.

    Raises:
        ConfigError: there is none.
    """
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except ValueError as error:
        raise ConfigError(f"not a certificate in PEM: {error}") from None


def fingerprint(pem: str) -> str:
    """Return the SHA-256 of a certificate, in hexadecimal; raises as `load_certificate` does."""
    return hashlib.sha256(load_certificate(pem).public_bytes(Encoding.DER)).hexdigest()


def expiry_s(pem: str) -> float:
    """Return when a certificate expires, in seconds since 1970; raises as `load_certificate` does."""
    return load_certificate(pem).not_valid_after_utc.timestamp()


def hosts_of(pem: str) -> list[str]:
    """Return the hosts that a node's certificate names; raises as `load_certificate` does."""
    names = load_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return [host for host in hosts if not host.startswith("node-")]


def _alternative_names(node: int, hosts: Sequence[str]) -> list[x509.GeneralName]:
    if not hosts or len(hosts) > HOSTS_MAX:
        raise RequestError(f"a node has 1 to {HOSTS_MAX} hosts, not {len(hosts)}")
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"{NODE_URI}{node}"), x509.DNSName(f"node-{node}")]
    # Its own machine reaches it by these, too.
    return [*names, *map(_host_name, dict.fromkeys((*hosts, "localhost", "127.0.0.1", "::1")))]


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    is_valid = host and len(host) <= 253 and host.isascii() and all(part for part in host.split("."))
    if host.startswith("node-"):
        message = f"host names that begin with node- are reserved for the identities of nodes: {host[:300]!r}"
        raise RequestError(message, code="bad_host")
    if not is_valid or not all(one.isalnum() or one in "-._" for one in host):
        raise RequestError(f"not a host name or an IP address: {host[:300]!r}", code="bad_host")
    return x509.DNSName(host)


def _load_request(pem: str) -> ec.EllipticCurvePublicKey:
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        key = request.public_key()
        is_valid = request.is_signature_valid and isinstance(key, ec.EllipticCurvePublicKey)
    except (ValueError, TypeError) as error:
        raise RequestError(f"not a certificate signing request in PEM: {error}", code="bad_csr") from None
    if not is_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise RequestError("the signing request is not signed with an elliptic curve key of its own", code="bad_csr")
    return key


def _load_key(pem: Secret) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(pem.reveal().encode(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"not an unencrypted private key in PEM: {type(error).__name__}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the private key is not an elliptic curve key")
    return key


def _as_pem(key: ec.EllipticCurvePrivateKey) -> Secret:
    return Secret(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())


def _name(common: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "quiver"), x509.NameAttribute(NameOID.COMMON_NAME, common)]
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
