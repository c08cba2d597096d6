"""The stand-ins of programs that a machine may lack do what the documentation asks of the programs."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from stand_ins import PROGRAMS, provide_missing, write_program
from walkthrough import PAGES, ROOT, commands


def run(directory: Path, command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        env={"PATH": f"{directory}:/usr/bin:/bin"},
        cwd=directory.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Echo(BaseHTTPRequestHandler):
    """Answers with the request."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(409 if self.path == "/refused" else 200)
        self.end_headers()
        self.wfile.write(f"{self.command} {self.path} ".encode() + body)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        pass


def test_curl_sends_what_it_is_given_and_prints_every_answer(tmp_path: Path) -> None:
    program = write_program(tmp_path / "bin", "curl")
    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            at = f"127.0.0.1:{server.server_address[1]}"
            sent = run(program.parent, f'curl -X POST {at}/produce -d \'{{"topic": "logs"}}\'')
            assert sent == 'POST /produce {"topic": "logs"}'
            assert run(program.parent, f"curl '{at}/consume?topic=logs&consumer_id=1'").startswith(
                "GET /consume?topic=logs&consumer_id=1"
            )
            assert run(program.parent, f"curl -X POST {at}/refused -d x") == "POST /refused x"
        finally:
            server.shutdown()
            thread.join()


def test_certificates_of_the_page_about_tls_verify_each_other(tmp_path: Path) -> None:
    program = write_program(tmp_path / "bin", "openssl")
    for command in commands(ROOT / "docs/operations/tls.md"):
        if command.startswith("openssl"):
            run(program.parent, command)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "node-1.pem", tmp_path / "node-1.key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    ours, theirs = socket.socketpair()

    def accept() -> None:
        with server.wrap_socket(theirs, server_side=True) as accepted:
            accepted.sendall(b"verified")

    thread = threading.Thread(target=accept)
    thread.start()
    with client.wrap_socket(ours, server_hostname="broker-1.example") as connected:
        assert connected.recv(100) == b"verified"
    thread.join()


def test_only_missing_programs_are_provided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = tmp_path / "present"
    write_program(present, "curl")
    monkeypatch.setenv("PATH", str(present))
    provide_missing(tmp_path / "provided")
    assert {one.name for one in (tmp_path / "provided").iterdir()} == set(PROGRAMS) - {"curl"}


def test_pages_use_no_other_program_that_may_be_missing() -> None:
    basic = {"quiver", ".venv/bin/quiver", "python", "pip", "kill"}
    basic |= {"cat", "echo", "grep", "head", "sed", "seq", "sort", "tail", "wc"}
    used = {command.split()[0] for page in PAGES for command in commands(page)}
    assert used <= basic | set(PROGRAMS)
