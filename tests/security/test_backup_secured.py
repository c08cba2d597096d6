"""Backup of a secure cluster with the documented grants, and its restore into another one: users go on with their own.

What an administrator alone may read or decide (internal topics, quotas, owners) is restored, left out or said.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from reading import read_to_end
from secured_cluster import SecuredCluster, secured_cluster
from waiting import wait_until

import quiver
from quiver.cli import main
from quiver.errors import NotAllowedError
from quiver.operations.backup_folder import read_cluster, read_manifest, write_manifest
from quiver.security.limits import QuotaLimits
from quiver.security.permissions import Verb

USERS = ("alice", "bob")
VERBS = (Verb.READ, Verb.WRITE)
PAGE = Path(__file__).parents[2] / "docs/operations/backup.md"
SETTINGS = {"log.durability": "none"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    """A cluster in which alice and bob have used topics, named clients and a queue."""
    with secured_cluster(tmp_path_factory.mktemp("source"), SETTINGS) as secured:
        tokens = add_users(secured)
        with secured.admin() as admin:
            for topic in ("logs", "jobs"):
                admin.create_topic(topic, partitions=2)
            admin.access.change_owner("topic", topic_id(admin, "logs"), "user:alice")
            admin.access.set_quota("user:alice", QuotaLimits(registrations_max=50))
        with secured.connect(tokens["alice"]) as alice, secured.connect(tokens["bob"]) as bob:
            use(alice, bob)
        yield secured


@pytest.fixture
def target(tmp_path: Path) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path / "target", SETTINGS) as secured:
        yield secured


def add_users(secured: SecuredCluster) -> dict[str, str]:
    grants = [(verb, topic) for verb in VERBS for topic in ("logs", "jobs")]
    return {user: secured.add_user(user, *grants) for user in USERS}


def topic_id(cluster: quiver.Cluster, topic: str) -> int:
    return int(cluster.offsets(topic).topic_id)


def use(alice: quiver.Cluster, bob: quiver.Cluster) -> None:
    with alice.producer("logs", name="web") as producer:
        for number in range(100):
            producer.send(f"line {number}")
    with bob.producer("jobs", name="shop") as producer:
        for number in range(20):
            producer.send(f"job {number}", partition=0)
    with alice.consumer("logs", name="report", idle_timeout=60) as consumer:
        assert len(list(islice(consumer, 30))) == 30
        consumer.commit()
    with bob.consumer("logs", group="readers", idle_timeout=60) as consumer:
        assert len(list(islice(consumer, 40))) == 40
        consumer.commit()
    with bob.queue("jobs", "mailer", lease=60, max_attempts=9, dead_letter_topic="logs") as queue:
        for _ in range(7):
            (job,) = queue.receive(1, timeout=60)
            job.ack()


def documented_grants() -> list[list[str]]:
    """Return the commands by which the page makes the user of backups, without the program's name."""
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith("$ quiver user create backup")]
    return [command.replace("'", "").split()[1:] for command in re.sub(r"^\$ ", "", line).split(" && ")]


def run(secured: SecuredCluster, command: Sequence[str], token_file: str = "") -> int:
    return main([*command, *secured.flags(token_file)])


def back_up(secured: SecuredCluster, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Make a backup as the page says; return the output."""
    for command in documented_grants():
        assert run(secured, command) == 0
    with secured.admin() as admin:
        token = secured.add_token(admin, "backup")
    capsys.readouterr()
    assert run(secured, ["backup", "create", "--to", str(folder), "--all"], token) == 0
    return capsys.readouterr().out


def test_users_go_on_with_their_own_clients_after_a_restore(
    source: SecuredCluster, target: SecuredCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "backup"
    said = back_up(source, folder, capsys)
    assert "backed up 120 records of 2 topics, 2 producers, 3 consumers with 6 cursors, 0 quotas" in said
    assert "left out: quotas, which only an administrator may read" in said
    assert "producers and consumers" not in said
    tokens = add_users(target)
    assert run(target, ["backup", "restore", "--from", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "restored 120 records of 2 topics, 2 producers, 3 consumers with 6 cursors, 0 quotas" in said
    assert "owners are not restored" not in said
    with ExitStack() as stack:
        files = (target.admin_file, *tokens.values())
        admin, alice, bob = (stack.enter_context(target.connect(file)) for file in files)
        owners = {(one.kind, one.name): one.owner for one in admin.clients() if one.name}
        assert owners == {
            ("producer", "web"): "user:alice",
            ("producer", "shop"): "user:bob",
            ("consumer", "report"): "user:alice",
            ("consumer", "readers"): "user:bob",
            ("consumer", "mailer"): "user:bob",
        }
        check_streams(alice, bob)
        check_queue(admin, bob)


def check_streams(alice: quiver.Cluster, bob: quiver.Cluster) -> None:
    """Both go on where they were, and neither uses what is the other's."""
    with alice.producer("logs", name="web") as producer:
        producer.send("one more")
    with alice.consumer("logs", name="report") as consumer:
        assert len(read_to_end(consumer)) == 71
    with bob.consumer("logs", group="readers", idle_timeout=60) as consumer:
        assert len(list(islice(consumer, 61))) == 61
        assert consumer.size() == 0
    another = pytest.raises(NotAllowedError, match="belongs to another user")
    with another, bob.producer("logs", name="web") as producer:
        producer.send("not mine")
    with another, bob.consumer("logs", name="report") as consumer:
        next(iter(consumer))


def check_queue(admin: quiver.Cluster, bob: quiver.Cluster) -> None:
    described = admin.describe_queue("mailer")
    assert (described.settings.lease_ms, described.settings.max_attempts) == (60_000, 9)
    assert described.settings.dead_letter_topic == "logs"
    with bob.queue("jobs", "mailer", lease=60) as queue:
        jobs = queue.receive(20, timeout=60)
        assert [job.value for job in jobs] == [f"job {number}".encode() for number in range(7, 20)]
        jobs.ack()


def test_administrator_saves_quotas_and_neither_saves_nor_restores_internal_topics(
    source: SecuredCluster, target: SecuredCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.admin() as admin:
        wait_until(lambda: "quiver.audit" in admin.list_topics())
    folder, old = tmp_path / "backup", tmp_path / "old"
    assert run(source, ["backup", "create", "--to", str(folder), "--all", "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)
    assert saved["left_out"] == ["internal topic quiver.audit"]
    assert (saved["topics"], saved["quotas"], saved["cursors"]) == (2, 1, 6)
    # An earlier program saved internal topics with all others.
    command = ["backup", "create", "--to", str(old), "--topic", "quiver.audit", "--topic", "logs"]
    assert run(source, command) == 0
    with target.admin() as admin:
        admin.access.create_user("alice")
        wait_until(lambda: "quiver.audit" in admin.list_topics())
        assert run(target, ["backup", "restore", "--from", str(folder), "--topic", "jobs"]) == 0
        assert "user:bob owns some of it and is no user of this cluster" in capsys.readouterr().out
        assert run(target, ["backup", "restore", "--from", str(old)]) == 0
        assert "quiver.audit: internal, not restored" in capsys.readouterr().out
        assert admin.access.quotas("user:alice")[0].limits == QuotaLimits(registrations_max=50)


def test_backup_without_grants_on_clients_says_so_and_who_is_no_administrator_owns_what_is_restored(
    source: SecuredCluster, target: SecuredCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "backup"
    token = source.add_user("reader", (Verb.READ, ""))
    assert run(source, ["backup", "create", "--to", str(folder), "--topic", "logs"], token) == 0
    assert "left out: producers and consumers that this user may not read" in capsys.readouterr().out
    assert read_cluster(str(folder)).consumers == ()
    token = target.add_user("builder", *((verb, "") for verb in (*VERBS, Verb.CREATE, Verb.CONFIGURE)))
    assert run(target, ["backup", "restore", "--from", str(folder)], token) == 0
    assert "owners are not restored" in capsys.readouterr().out


def test_clients_of_a_backup_without_owners_belong_to_their_first_user(
    source: SecuredCluster, target: SecuredCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "backup"
    assert run(source, ["backup", "create", "--to", str(folder), "--topic", "logs"]) == 0
    content = read_cluster(str(folder))
    assert {one.owner for one in content.consumers} == {"user:alice", "user:bob"}
    assert [one.owner for one in content.topics] == ["user:alice"]
    forget_owners(folder)
    tokens = add_users(target)
    assert run(target, ["backup", "restore", "--from", str(folder)]) == 0
    with target.connect(tokens["alice"]) as alice, alice.consumer("logs", name="report") as consumer:
        assert len(read_to_end(consumer)) == 70


def forget_owners(folder: Path) -> None:
    """Make a backup as an earlier program would have made it."""
    content = json.loads((folder / "cluster.json").read_text())
    for one in (*content["topics"], *content["producers"], *content["consumers"]):
        del one["owner"]
    data = json.dumps(content).encode()
    (folder / "cluster.json").write_bytes(data)
    manifest = read_manifest(str(folder))
    files = tuple(
        msgspec.structs.replace(one, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        if one.name == "cluster.json"
        else one
        for one in manifest.files
    )
    write_manifest(str(folder), msgspec.structs.replace(manifest, files=files))
