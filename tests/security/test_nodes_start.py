"""How nodes start: refused where they would be open to others, locked down by one flag, with files of one user."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from quiver.cli import main
from quiver.security.bootstrap import initialize
from quiver.security.certificates import expiry_s
from quiver.testing.local_cluster import _free_ports

QUIVER = (sys.executable, "-m", "quiver")


class Secured:
    """A running `quiver up --secure` with one node, started with the most careless umask."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.http_port, self.wire_port = _free_ports(2)
        ports = ("--http-port", str(self.http_port), "--wire-port", str(self.wire_port))
        self.process = subprocess.Popen(
            (*QUIVER, "up", "--secure", "--nodes", "1", "--data", str(data), *ports),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=0,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("ready"):
                return
        raise AssertionError("".join(self.lines))

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.data / "security" / "ca.pem"))

    @property
    def node_pid(self) -> int:
        """Return the process of the node, as the table shows it."""
        return next(int(line.split()[1]) for line in self.lines if line.split()[:1] == ["1"])

    def shown_certificate(self) -> bytes:
        """Return the certificate that a new HTTPS connection gets to see."""
        with (
            socket.create_connection(("127.0.0.1", self.http_port), timeout=30) as plain,
            self.context().wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
        ):
            return encrypted.getpeercert(binary_form=True) or b""

    def expiry(self, connection: http.client.HTTPSConnection) -> float:
        """Return when the certificate ends, by the node's metrics."""
        token = (self.data / "security" / "admin.token").read_text().strip()
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        lines = connection.getresponse().read().decode().splitlines()
        name = "quiver_tls_certificate_expiry_timestamp_seconds "
        return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    running = Secured(tmp_path_factory.mktemp("up") / "data")
    yield running
    running.close()


@pytest.mark.parametrize(
    "arguments",
    [("node", "--id", "1", "--wire", "0.0.0.0:0", "--http", "127.0.0.1:0"), ("up", "--host", "0.0.0.0")],
    ids=["node", "up"],
)
def test_node_that_others_can_reach_does_not_start_without_tls(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    data = tmp_path / "data"
    command = (*QUIVER, *arguments, "--data", str(data))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error not_secure: node.wire is 0.0.0.0" in done.stderr
    assert "`quiver security init 1@" in done.stderr
    assert not data.exists(), "nothing is made before the node is allowed to start"


def test_operator_is_told_what_clients_need(secured: Secured) -> None:
    directory = secured.data / "security"
    told = "".join(secured.lines)
    assert f"export QUIVER_URL=https://127.0.0.1:{secured.http_port}\n" in told
    assert f"export QUIVER_CA_FILE={directory}/ca.pem\n" in told
    assert f"export QUIVER_TOKEN_FILE={directory}/admin.token\n" in told
    assert (directory / "admin.token").read_text().strip() not in told


def test_every_file_is_the_users_alone(secured: Secured) -> None:
    open_to_others = [
        f"{path}: {stat.S_IMODE(path.stat().st_mode):04o}"
        for path in (secured.data, *secured.data.rglob("*"))
        if path.stat().st_mode & 0o077
    ]
    assert open_to_others == []
    assert (secured.data / "node-1" / "metadata.sqlite").exists()


def test_https_is_spoken_and_plain_http_is_not(secured: Secured) -> None:
    https = http.client.HTTPSConnection("127.0.0.1", secured.http_port, context=secured.context(), timeout=30)
    https.request("GET", "/livez")
    assert https.getresponse().status == 200
    https.close()
    plain = http.client.HTTPConnection("127.0.0.1", secured.http_port, timeout=30)
    plain.request("GET", "/livez")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        plain.getresponse()
    plain.close()


def test_hangup_of_the_process_shows_a_renewed_certificate_and_drops_nothing(secured: Secured) -> None:
    own = secured.data / "security" / "node-1"
    kept = http.client.HTTPSConnection("127.0.0.1", secured.http_port, context=secured.context(), timeout=30)
    before, expiry = secured.shown_certificate(), secured.expiry(kept)
    assert expiry == pytest.approx(expiry_s((own / "node.pem").read_text()))
    socket_before = kept.sock
    assert main(["security", "renew", str(own / "node.pem"), "--days", "40"]) == 0
    os.kill(secured.node_pid, signal.SIGHUP)
    wait_until(lambda: secured.shown_certificate() != before)
    assert secured.shown_certificate() == ssl.PEM_cert_to_DER_cert((own / "node.pem").read_text())
    assert secured.expiry(kept) == pytest.approx(expiry_s((own / "node.pem").read_text()))
    assert secured.expiry(kept) < expiry
    assert kept.sock is socket_before, "the same connection"
    kept.close()


def test_node_whose_certificate_does_not_name_its_host_says_so_and_starts_once_it_is_mended(tmp_path: Path) -> None:
    """Its wire address is 127.0.0.2: it reaches the primary, itself, no more than others would."""
    initialize(str(tmp_path), {1: ["127.0.0.1"]})
    http_port, wire_port = _free_ports(2)
    address = f"127.0.0.2:{wire_port}"
    command = [*QUIVER, "node", "--id", "1", "--data", str(tmp_path / "data"), "--security-mode", "secure"]
    command += ["--security-directory", str(tmp_path / "node-1"), "--join", f"1@{address}", "--wire", address]
    log = tmp_path / "node.log"
    with log.open("wb") as output:
        node = subprocess.Popen([*command, "--http", f"127.0.0.1:{http_port}"], stdout=output, stderr=output)
    try:
        wait_until(lambda: "heartbeat not delivered" in log.read_text())
        wait_until(lambda: "its certificate does not name 127.0.0.2" in _unready(http_port, tmp_path))
        (line,) = [one for one in log.read_text().splitlines() if "certificate is refused by others" in one]
        assert "they dial '127.0.0.2'" in line.replace("\\", "")
        mending = re.search(r"quiver (security renew \S+ --host 127\.0\.0\.2)", line)
        assert mending is not None, line
        assert main(mending[1].split()) == 0
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: _unready(http_port, tmp_path) == "")
    finally:
        node.send_signal(signal.SIGTERM)
        assert node.wait(timeout=60) == 0


def _unready(port: int, directory: Path) -> str:
    """Return why the node is not ready; empty if it is."""
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    connection = http.client.HTTPSConnection(f"127.0.0.1:{port}", timeout=30, context=context)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        answer = response.read().decode()
    finally:
        connection.close()
    return "" if response.status == 200 else answer


def test_wire_is_not_spoken_in_plain_text(secured: Secured) -> None:
    with socket.create_connection(("127.0.0.1", secured.wire_port), timeout=30) as plain:
        plain.sendall(b"\x10\x00\x00\x00" + bytes(16))
        try:
            received = plain.recv(4096)
        except ConnectionError:
            received = b""
        assert b"quiver" not in received
        assert len(received) <= 7, "at most a TLS alert"


def test_secrets_are_not_in_the_arguments_of_processes(secured: Secured) -> None:
    token = (secured.data / "security" / "admin.token").read_text().strip()
    children = Path(f"/proc/{secured.process.pid}/task/{secured.process.pid}/children")
    if not children.exists():
        pytest.skip("this system has no /proc with children of processes")
    for pid in children.read_text().split():
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"node" in arguments
        assert token.encode() not in arguments
        assert os.stat(f"/proc/{pid}").st_uid == os.getuid()


def test_secure_and_insecure_exclude_each_other() -> None:
    done = subprocess.run((*QUIVER, "up", "--secure", "--insecure"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
