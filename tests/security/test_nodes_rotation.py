"""Certificates are replaced while a node runs; what is open stays open, and nothing is half replaced."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
from wire_hosts import Host, client, run, serve

from quiver.cli import main
from quiver.clock import SystemClock
from quiver.config import TlsSettings
from quiver.model import Buffer, NodeId, Offset, PartitionId, TopicId
from quiver.security.bootstrap import initialize
from quiver.security.certificates import load_certificate
from quiver.wire import Caller
from quiver.wire.certificate_reload import CertificateReloader
from quiver.wire.messages import AnyRequest, Produce, Produced
from quiver.wire.requests import Response

PRODUCE = Produce(topic_id=TopicId(1), partition_id=PartitionId(0))


async def answer(caller: Caller, request: AnyRequest, payload: memoryview) -> tuple[Response, Sequence[Buffer]]:
    return Produced(base_offset=Offset(0)), ()


def settings_in(directory: Path) -> TlsSettings:
    own = directory / "node-1"
    return TlsSettings(
        is_enabled=True,
        certificate_file=str(own / "node.pem"),
        key_file=str(own / "node.key"),
        ca_file=str(own / "ca.pem"),
    )


async def serial_shown_by(host: Host, ca_file: str) -> int:
    """Return the serial number of the certificate that a new connection gets to see."""
    context = ssl.create_default_context(cafile=ca_file)
    _, writer = await asyncio.open_connection(*host.network.address, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return load_certificate(ssl.DER_cert_to_PEM_cert(der)).serial_number


def serial_in(path: str) -> int:
    return load_certificate(Path(path).read_text()).serial_number


def replace(path: str, by: Path) -> None:
    Path(path).write_bytes(by.read_bytes())


def test_renewed_certificate_is_shown_and_open_connections_stay(tmp_path: Path) -> None:
    initialize(str(tmp_path), {1: ["127.0.0.1"]})
    tls = settings_in(tmp_path)

    async def test() -> None:
        trust = TlsSettings(is_enabled=True, ca_file=tls.ca_file)
        reloader = CertificateReloader(tls, SystemClock(), node=NodeId(1), host="127.0.0.1")
        async with serve(answer, tls=tls) as host, client(tls=trust) as pool:
            reloader.track(*host.network.tls_contexts)
            await pool.call(host.address, PRODUCE, timeout_ms=10_000)
            before = serial_in(tls.certificate_file)
            reloader.check()
            assert reloader.reloads == 0, "nothing has changed"
            assert main(["security", "renew", tls.certificate_file]) == 0
            reloader.check()
            assert reloader.reloads == 1
            assert await serial_shown_by(host, tls.ca_file) == serial_in(tls.certificate_file) != before
            await pool.call(host.address, PRODUCE, timeout_ms=10_000)
            assert host.server.status().client_connections == 1, "the same connection"

    run(test())


def test_files_that_cannot_be_used_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    initialize(str(tmp_path), {1: ["127.0.0.1"], 2: ["127.0.0.1"]})
    tls = settings_in(tmp_path)

    async def test() -> None:
        reloader = CertificateReloader(tls, SystemClock(), node=NodeId(1), host="127.0.0.1")
        async with serve(answer, tls=tls) as host:
            reloader.track(*host.network.tls_contexts)
            shown = await serial_shown_by(host, tls.ca_file)
            replace(tls.certificate_file, tmp_path / "node-2" / "node.pem")
            for _ in range(3):
                reloader.check()
            assert await serial_shown_by(host, tls.ca_file) == shown
            # Once the key has been replaced as well, both are used.
            replace(tls.key_file, tmp_path / "node-2" / "node.key")
            reloader.check()
            assert await serial_shown_by(host, tls.ca_file) == serial_in(tls.certificate_file) != shown

    with caplog.at_level(logging.WARNING):
        run(test())
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["certificate not reloaded", "certificate is refused by others"], "it names node 2"


def test_hangup_reloads_although_nothing_seems_changed(tmp_path: Path) -> None:
    initialize(str(tmp_path), {1: ["127.0.0.1"]})

    async def test() -> None:
        reloader = CertificateReloader(settings_in(tmp_path), SystemClock(), node=NodeId(1), host="127.0.0.1")
        watching = asyncio.ensure_future(reloader.run())
        await asyncio.sleep(0)
        reloader.reload_now()
        while not reloader.reloads:  # noqa: ASYNC110 - seen from outside
            await asyncio.sleep(0.001)
        watching.cancel()

    run(test())


@pytest.mark.parametrize("host", ["broker-1.example.com", "10.9.8.7"])
def test_certificate_that_does_not_name_its_host_is_reported_until_the_command_mends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    initialize(str(tmp_path), {1: ["127.0.0.1"]})
    tls = settings_in(tmp_path)
    reloader = CertificateReloader(tls, SystemClock(), node=NodeId(1), host=host)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reloader.rehearse()
    assert [record.getMessage() for record in caplog.records] == ["certificate is refused by others"]
    sentence, _, advice = reloader.problem.partition("; ")
    for part in (tls.certificate_file, f"they dial {host!r}", "it names node-1, localhost, 127.0.0.1"):
        assert part in sentence
    command = advice.partition("quiver ")[2].partition(";")[0].split()
    assert main(command) == 0
    reloader.check()
    assert reloader.problem == ""


def test_certificate_of_another_node_or_authority_is_reported(tmp_path: Path) -> None:
    initialize(str(tmp_path / "own"), {1: ["127.0.0.1"]})
    initialize(str(tmp_path / "other"), {1: ["127.0.0.1"]})
    tls = settings_in(tmp_path / "own")
    reloader = CertificateReloader(tls, SystemClock(), node=NodeId(2), host="127.0.0.1")
    reloader.rehearse()
    assert "they dial 'node-2'" in reloader.problem
    assert reloader.problem.endswith("quiver security init 2@127.0.0.1")
    replace(tls.ca_file, tmp_path / "other" / "ca.pem")
    reloader = CertificateReloader(tls, SystemClock(), node=NodeId(1), host="127.0.0.1")
    reloader.rehearse()
    assert reloader.problem.endswith(f"use a certificate of the authority in {tls.ca_file}")
    assert reloader.problem.count("; ") == 1


@pytest.mark.parametrize(("days", "warnings"), [(10, 1), (60, 0)])
def test_certificate_that_ends_soon_is_warned_about_once_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, warnings: int
) -> None:
    initialize(str(tmp_path), {1: ["127.0.0.1"]}, days=days)

    async def test() -> None:
        reloader = CertificateReloader(settings_in(tmp_path), SystemClock(), node=NodeId(1), host="127.0.0.1")
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                reloader.warn_before_expiry()

    asyncio.run(test())
    assert [record.getMessage() for record in caplog.records] == ["certificate expires soon"] * warnings
