"""HTTP over TLS, with the node's own certificate.

Clients are browsers and scripts: they show no certificate, and TLS 1.2 is let in beside 1.3. A file that cannot be used
is a `ConfigError` at the start, never a server without encryption later.
"""

from __future__ import annotations

import ssl

from quiver.config import GatewaySettings, TlsSettings
from quiver.errors import ConfigError


def make_http_context(tls: TlsSettings, gateway: GatewaySettings) -> ssl.SSLContext | None:
    """Return how HTTP connections are accepted; None: without TLS.

    Raises:
        ConfigError: there is no certificate, or a file cannot be used.
    """
    if gateway.tls == "off" or (gateway.tls == "auto" and not tls.is_enabled):
        return None
    if not tls.certificate_file:
        raise ConfigError("tls.certificate_file is needed to serve HTTP over TLS")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(tls.certificate_file, tls.key_file or None, password=_ask_nobody)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls: {error}; the files are {tls.certificate_file}, {tls.key_file}") from None
    return context


def _ask_nobody() -> str:
    """Give no password: OpenSSL would ask for one at the terminal."""
    raise ValueError("the key is encrypted, which is not supported")
