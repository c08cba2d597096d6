"""Encryption of the wire by TLS, and who must show a certificate for what.

Contexts are made once, from files that the settings name; a file that cannot be used is a `ConfigError` at the start,
never a connection without encryption later. Nobody is let in by an unverified certificate. A node's certificate names
it by the alternative name `node-<id>`, which is what its peers check instead of its host name, in both directions: so a
certificate for one node, or for a client, does not make anybody another node.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from typing import Any

from quiver.config import TlsSettings
from quiver.errors import ConfigError
from quiver.model import NodeId
from quiver.wire.handshake import HandshakeRefusal, RefusalCode, refuse

_VERIFICATION = {"none": ssl.CERT_NONE, "nodes": ssl.CERT_OPTIONAL, "all": ssl.CERT_REQUIRED}

Certificate = Mapping[str, Any]
"""What `ssl` tells of a verified certificate; empty if none was shown."""


def make_server_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return how connections are accepted; None: without TLS.

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
    """Return how connections are made; None: without TLS. A certificate is shown if there is one.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not settings.is_enabled:
        return None
    # Verifies the other side's certificate and its name.
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), settings)


def _load(context: ssl.SSLContext, settings: TlsSettings) -> ssl.SSLContext:
    # Both ends are this program or its SDK: nothing older needs to be understood.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        if settings.certificate_file:
            context.load_cert_chain(settings.certificate_file, settings.key_file or None, password=_ask_nobody)
        if settings.ca_file:
            context.load_verify_locations(settings.ca_file)
        else:
            context.load_default_certs()
    except (OSError, ValueError) as error:
        files = ", ".join(filter(None, (settings.certificate_file, settings.key_file, settings.ca_file)))
        raise ConfigError(f"tls: {error}; the files are {files}") from None
    return context


def _ask_nobody() -> str:
    """Give no password: OpenSSL would ask for one at the terminal."""
    raise ValueError("the key is encrypted, which is not supported")


def node_name(node: NodeId) -> str:
    """Return the name by which a certificate vouches for a node."""
    return f"node-{node}"


def judge_certificate(
    certificate: Certificate | None, settings: TlsSettings, node: int | None
) -> HandshakeRefusal | None:
    """Decide whether whoever has dialled may be what it says it is; return why not.

    `certificate` is what it has shown, verified; `node` is the node that it says it is, None for a client.
    """
    if not settings.is_enabled or settings.client_certificates == "none":
        return None
    # That clients show one, if they must, was seen to when the connection was made.
    if node is None or node_name(NodeId(node)) in _names_of(certificate or {}):
        return None
    return refuse(RefusalCode.BAD_CERTIFICATE, f"no certificate was shown that names {node_name(NodeId(node))}")


def _names_of(certificate: Certificate) -> Iterable[str]:
    return (name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")
