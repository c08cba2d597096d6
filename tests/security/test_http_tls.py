"""HTTP behind TLS: a gateway that wants certificates of clients gets them on HTTP, too."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from quiver.testing import LocalCluster
from quiver.testing.local_cluster import _free_ports


class Secured:
    """A node that wants a certificate of everybody, its two HTTP listeners, and its authority."""

    def __init__(self, addresses: list[str], authority: trustme.CA) -> None:
        self.addresses = addresses
        self.authority = authority

    def context(self, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if certificate is not None:
            certificate.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued: dict[str, Path] = {name: directory / f"{name}.pem" for name in ("ca", "node")}
    authority.cert_pem.write_to_path(str(issued["ca"]))
    authority.issue_cert("127.0.0.1", "node-1").private_key_and_cert_chain_pem.write_to_path(str(issued["node"]))
    admin = f"127.0.0.1:{_free_ports(1)[0]}"
    settings = {
        "tls.is_enabled": "true",
        "tls.ca_file": str(issued["ca"]),
        "tls.certificate_file": str(issued["node"]),
        "tls.client_certificates": "all",
        "gateway.admin_listen": admin,
    }
    with LocalCluster(nodes=1, settings=settings) as cluster:
        yield Secured([cluster.urls[0].removeprefix("https://"), admin], authority)


def ask(address: str, context: ssl.SSLContext | None) -> int:
    if context is None:
        connection = http.client.HTTPConnection(address, timeout=60)
    else:
        connection = http.client.HTTPSConnection(address, timeout=60, context=context)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        assert json.loads(answer.read()) == {"status": "success"}
        return answer.status
    finally:
        connection.close()


@pytest.mark.parametrize("listener", [0, 1])
def test_client_with_a_certificate_is_served(secured: Secured, listener: int) -> None:
    certificate = secured.authority.issue_cert("somebody")
    assert ask(secured.addresses[listener], secured.context(certificate)) == 200


@pytest.mark.parametrize("listener", [0, 1])
def test_client_without_a_certificate_is_not_served(secured: Secured, listener: int) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(secured.addresses[listener], secured.context())


@pytest.mark.parametrize("listener", [0, 1])
def test_certificate_of_another_authority_is_not_taken(secured: Secured, listener: int) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(secured.addresses[listener], secured.context(trustme.CA().issue_cert("somebody")))


@pytest.mark.parametrize("listener", [0, 1])
def test_plain_http_is_not_spoken(secured: Secured, listener: int) -> None:
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(secured.addresses[listener], None)
