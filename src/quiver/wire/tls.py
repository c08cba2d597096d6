"""TLS of wire and HTTP connections, and the check of node certificates.

Contexts are made at start from the files that the settings name, and `certificate_reload` keeps them up to date. A file
that cannot be used is a `ConfigError` at start, never an unencrypted connection later. An unverified certificate admits
nothing. A node's certificate names it by the alternative name `node-<id>`; peers check that name instead of the host
name, in both directions. A certificate for one node, or for a client, therefore does not work for another node.

HTTP clients are browsers and scripts: TLS 1.2 is accepted beside 1.3, and they present a certificate only where
`client_certificates` is `all`, which covers every connection to a node.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from quiver.config import GatewaySettings, TlsSettings
from quiver.errors import ConfigError
from quiver.model import NodeId
from quiver.security.principal import NODE_URI
from quiver.wire.handshake import HandshakeRefusal, RefusalCode, refuse

_VERIFICATION = {"none": ssl.CERT_NONE, "nodes": ssl.CERT_OPTIONAL, "all": ssl.CERT_REQUIRED}

_FLIGHTS = 3
"""Turns of both sides after which a handshake of TLS 1.3 is done, also if it needs a second hello."""

Certificate = Mapping[str, Any]
"""A verified certificate as `ssl` describes it; empty if none was presented."""


def make_server_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return the TLS context for accepting wire connections; None: without TLS.

    Raises:
        ConfigError: there is no certificate, or a file cannot be used.
    """
    if not settings.is_enabled:
        return None
    if not settings.certificate_file:
        raise ConfigError("tls.certificate_file is needed to accept connections with TLS")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = _VERIFICATION[settings.client_certificates]
    return _load(context, settings)


def make_client_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return the TLS context for dialling; None: without TLS. It presents a certificate if one is configured.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not settings.is_enabled:
        return None
    # This protocol constant verifies the other side's certificate and its name.
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), settings)


def make_http_context(tls: TlsSettings, gateway: GatewaySettings) -> ssl.SSLContext | None:
    """Return the TLS context for accepting HTTP connections; None: without TLS.

    Raises:
        ConfigError: there is no certificate, or a file cannot be used.
    """
    if not gateway.serves_https(tls):
        return None
    if not tls.certificate_file:
        raise ConfigError("tls.certificate_file is needed to serve HTTP over TLS")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if tls.client_certificates == "all":
        context.verify_mode = ssl.CERT_REQUIRED
    return load_files(context, tls)


def _load(context: ssl.SSLContext, settings: TlsSettings) -> ssl.SSLContext:
    # Both ends are this program or its SDK, so no older version is needed.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return load_files(context, settings)


def load_files(context: ssl.SSLContext, settings: TlsSettings) -> ssl.SSLContext:
    """Load certificate, key and authorities into a context, also into one that is in use; return it.

    Raises:
        ConfigError: a file cannot be used.
    """
    try:
        if settings.certificate_file:
            context.load_cert_chain(settings.certificate_file, settings.key_file or None, password=_refuse_password)
        if settings.ca_file:
            context.load_verify_locations(settings.ca_file)
        else:
            context.load_default_certs()
    except (OSError, ValueError) as error:
        files = ", ".join(filter(None, (settings.certificate_file, settings.key_file, settings.ca_file)))
        raise ConfigError(f"tls: {error}; the files are {files}") from None
    return context


def explain_distrust(error: ssl.SSLCertVerificationError, host: str) -> str:
    """Return why the certificate of a node that was dialled at `host` is refused, and what to do."""
    if "mismatch" not in error.verify_message:
        return str(error)
    return (
        f"{error}: its certificate does not name {host}; dial a name that it has, or add this one where ca.key is: "
        f"quiver security renew node.pem --host {host}"
    )


def rehearse_handshake(settings: TlsSettings, name: str) -> str:
    """Return why a node or client with the same authorities that dials `name` refuses this node; empty if it does not.

    Raises:
        ConfigError: a file cannot be used.
    """
    server, client = make_server_context(settings), make_client_context(settings)
    assert server is not None, "asked only with TLS"
    assert client is not None
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        sides = (
            client.wrap_bio(to_client, to_server, server_hostname=name),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for _ in range(_FLIGHTS):
            for side in sides:
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (ssl.SSLError, ValueError) as error:
        return str(error)
    return ""


def _refuse_password() -> str:
    """Raise instead of returning a password: without this OpenSSL would prompt at the terminal."""
    raise ValueError("the key is encrypted, which is not supported")


def node_name(node: NodeId) -> str:
    """Return the alternative name in a node's certificate."""
    return f"node-{node}"


def check_certificate(
    certificate: Certificate | None, settings: TlsSettings, node: int | None
) -> HandshakeRefusal | None:
    """Return why the dialling side is refused, or None if its certificate allows what its hello says.

    `certificate` is the verified one that it presented; `node` is the node id in its hello, None for a client.
    """
    if not settings.is_enabled or settings.client_certificates == "none":
        return None
    # A certificate that clients must present was verified by `ssl` when the connection was made.
    if node is None or not {node_name(NodeId(node)), f"{NODE_URI}{node}"}.isdisjoint(_names_of(certificate or {})):
        return None
    return refuse(RefusalCode.BAD_CERTIFICATE, f"no certificate was presented that names {node_name(NodeId(node))}")


def _names_of(certificate: Certificate) -> Iterable[str]:
    return (name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI"))
