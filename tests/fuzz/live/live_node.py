"""The node of the wire's fuzzer: its own process and disk, open or secure, and what its administrator sees of it."""

from __future__ import annotations

import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

from wire_logins import Credentials

import quiver
from quiver.security.bootstrap import initialize, node_directory
from quiver.security.files import CA_NAME, TOKEN_NAME
from quiver.security.permissions import Grant, ResourceKind, Verb

MARKER = "hid5d1c"
"""In the names and records that no user of the fuzzer may see."""
HIDDEN = f"topic-{MARKER}"
OPEN = "open"
DEFECTS = "quiver_wire_handler_failures_total"
COMPLAINTS = re.compile(r"request handler failed|^error defect|\bCRITICAL\b|Traceback", re.M)
STOP_TIMEOUT_S = 60


@dataclass
class LiveNode:
    """A running node."""

    process: subprocess.Popen[str]
    directory: Path
    wire: str
    http: str
    security: Path | None
    """The administrator's files, if it is secure."""
    peak_bytes: int = 0

    @property
    def tls(self) -> ssl.SSLContext | None:
        if self.security is None:
            return None
        return ssl.create_default_context(cafile=str(self.security / CA_NAME))

    def admin(self) -> quiver.Cluster:
        if self.security is None:
            return quiver.connect(self.wire)
        ca_file, token_file = str(self.security / CA_NAME), str(self.security / TOKEN_NAME)
        return quiver.connect(f"https://{self.http}", ca_file=ca_file, token_file=token_file)

    def check(self) -> None:
        """Hold the node to living within its memory."""
        assert self.process.poll() is None, f"the node has ended\n{self.tail()}"
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        self.peak_bytes = max(self.peak_bytes, int(found[1]) * 1024)

    def check_health(self) -> None:
        """Hold the node to answering probes, and to having met no defect of its own."""
        self.check()
        for path in ("/livez", "/healthz"):
            status, page = self.get(path)
            assert status == 200, f"{path}: {status} {page}"
        status, page = self.get("/metrics")
        defects = re.search(rf"^{DEFECTS} (\d+)", page, re.M)
        assert status == 200, page
        assert defects is not None, page
        assert defects[1] == "0", f"{defects[1]} defects\n{self.tail()}"

    def get(self, path: str) -> tuple[int, str]:
        """Return status and answer of an administrator's HTTP request."""
        headers = {}
        if self.security is not None:
            headers["Authorization"] = f"Bearer {(self.security / TOKEN_NAME).read_text().strip()}"
        with closing(self._connect_http()) as connection:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def _connect_http(self) -> HTTPConnection:
        tls = self.tls
        if tls is None:
            return HTTPConnection(self.http, timeout=30)
        return HTTPSConnection(self.http, timeout=30, context=tls)

    def complaints(self) -> list[str]:
        """Return what the node has logged that it must never have to."""
        return COMPLAINTS.findall(self.log())

    def log(self) -> str:
        return (self.directory / "node.log").read_text(errors="replace")

    def tail(self) -> str:
        return self.log()[-4000:]


@contextmanager
def running_node(directory: Path, *, is_secure: bool) -> Iterator[LiveNode]:
    """Run a node; it must end well."""
    directory.mkdir()
    command = [sys.executable, "-m", "quiver", "node", "--id", "1", "--data", str(directory / "data")]
    command += ["--wire", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    security = directory / "security" if is_secure else None
    if security is not None:
        initialize(str(security), {1: ["127.0.0.1", "localhost"]})
        command += ["--security-mode", "secure", "--security-directory", node_directory(str(security), 1)]
    with (directory / "node.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            wire, address = wait_ready(process)
            node = LiveNode(process, directory, wire, address, security)
            yield node
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=STOP_TIMEOUT_S)
    assert status == 0, f"the node ended with {status}\n{node.tail()}"
    assert not node.complaints(), f"{node.complaints()}\n{node.tail()}"


def wait_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the addresses that the node prints when it is ready: of the wire, and of HTTP."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"^ready .*wire=(\S+) http=(\S+)", line):
            return found[1], found[2]
    raise AssertionError("the node ended before it was ready")


def serve_honestly(node: LiveNode, topic: str) -> None:
    """Hold the node to serving an honest client."""
    with node.admin() as client:
        client.create_topic(topic, partitions=1)
        with client.producer(topic) as producer:
            assert producer.send(b"x").result().offset == 0


def find_topics(node: LiveNode) -> dict[str, int]:
    """Return the topics, by name, with their ids."""
    with node.admin() as client:
        return {topic: int(client.describe_topic(topic).topic_id) for topic in client.list_topics()}


# -- a secure node's users and secrets ---------------------------------------------------------------


def populate(node: LiveNode) -> Credentials:
    """Make users with few grants, credentials that are not valid any more, and topics that nobody may see."""
    passwords = {"mallory": "the word of mallory", "trent": "the word of trent"}
    with node.admin() as cluster:
        for topic in (OPEN, HIDDEN):
            cluster.create_topic(topic, partitions=1)
            with cluster.producer(topic) as producer:
                for _ in range(5):
                    producer.send(f"record of {topic}".encode()).result()
        for name in ("mallory", "trent", "dora", "eve", "rex"):
            cluster.access.create_user(name, password=passwords.get(name, ""))
        for user, verb in (("mallory", Verb.READ), ("mallory", Verb.WRITE), ("trent", Verb.READ)):
            cluster.access.add_grant(Grant(subject=f"user:{user}", verb=verb, kind=ResourceKind.TOPIC, name=OPEN))
        with cluster.consumer(HIDDEN, name=f"reader-{MARKER}") as consumer:
            consumer.commit()
        cluster.hold(HIDDEN, "held", {0: 0}, lasting=3_600)
        tokens = {name: cluster.access.create_token(name).secret.reveal() for name in ("mallory", "trent")}
        return Credentials(tokens, passwords, _make_bad_tokens(cluster))


def _make_bad_tokens(cluster: quiver.Cluster) -> tuple[str, ...]:
    """Return tokens that were valid once: of a disabled user, expired, revoked."""
    disabled, expired = cluster.access.create_token("dora"), cluster.access.create_token("eve", lasting=0.5)
    revoked = cluster.access.create_token("rex")
    cluster.access.enable_user("dora", is_enabled=False)
    cluster.access.revoke_token(revoked.token_id)
    time.sleep(1)  # until the second one has expired
    return tuple(one.secret.reveal() for one in (disabled, expired, revoked))


def describe(node: LiveNode) -> dict[str, object]:
    """Return what no ordinary user can change."""
    with node.admin() as cluster:
        access = cluster.access
        topic, clients = cluster.describe_topic(HIDDEN), cluster.clients()
        return {
            "users": access.users(),
            "roles": access.roles(),
            "grants": access.grants(),
            "quotas": access.quotas(),
            "topics": sorted(cluster.list_topics()),
            "hidden topic": (topic.topic_id, len(topic.partitions), topic.retention, cluster.offsets(HIDDEN)),
            "hidden clients": [(one.id, one.name, one.owner, one.epoch) for one in clients if HIDDEN in one.topics],
            "holds": [one for one in cluster.holds() if one.topic == HIDDEN],
            "brokers": [(one.node, one.roles, one.is_draining) for one in cluster.brokers()],
            "managers": [one.node for one in cluster.managers().managers],
        }
