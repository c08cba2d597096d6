"""A secure cluster and its clients: a token reaches what its grants cover and nothing else, and is shown nowhere."""

from __future__ import annotations

import json
import logging
import os
import ssl
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from secured_cluster import SecuredCluster, secured_cluster

import quiver
from quiver import classic
from quiver.cli import main
from quiver.errors import NotAllowedError, NotFoundError, UnavailableError
from quiver.security.permissions import Verb
from quiver.security.secrets import read_secret


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path_factory.mktemp("security")) as cluster:
        with cluster.admin() as admin:
            admin.create_topic("logs.web", partitions=1)
            admin.create_topic("pay.web", partitions=1)
            admin.producer("pay.web").send("private").result()
        yield cluster


@pytest.fixture(scope="module")
def alice(secured: SecuredCluster) -> str:
    """The token file of a user that may read and write topics whose names begin with `logs.`."""
    return secured.add_user("alice", (Verb.READ, "logs."), (Verb.WRITE, "logs."))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("URL", "CONTEXT", "CA_FILE", "CERT_FILE", "KEY_FILE", "TOKEN_FILE", "USER", "PASSWORD_FILE"):
        monkeypatch.delenv(f"QUIVER_{variable}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def _denied(error: NotAllowedError) -> None:
    assert error.outcome == "not_done"
    assert error.code != "unauthenticated"


def test_token_reaches_what_its_grants_cover_and_nothing_else(secured: SecuredCluster, alice: str) -> None:
    with secured.connect(alice) as cluster:
        assert cluster.producer("logs.web").send("hello").result().partition == 0
        assert next(iter(cluster.consumer("logs.web"))).text == "hello"
        assert cluster.list_topics() == ["logs.web"]
        with pytest.raises(NotAllowedError) as refused:
            cluster.producer("pay.web").send("x").result()
        _denied(refused.value)
        with pytest.raises(NotFoundError):  # that it exists is not said
            cluster.consumer("pay.web")
        for forbidden in (lambda: cluster.delete_topic("logs.web"), lambda: cluster.access.users()):
            with pytest.raises(NotAllowedError) as refused:
                forbidden()
            _denied(refused.value)


def test_client_without_a_token_gets_nothing(secured: SecuredCluster) -> None:
    for address in (secured.url, secured.local.addresses[0]):
        with pytest.raises(NotAllowedError) as refused, quiver.connect(address, ca_file=secured.ca_file) as cluster:
            cluster.list_topics()
        assert refused.value.code == "unauthenticated"


def test_wrong_token_is_refused_with_a_sentence_and_at_once(secured: SecuredCluster) -> None:
    wrong = "qv_0011223344556677_" + "ab" * 32
    with pytest.raises(NotAllowedError) as refused:
        quiver.connect(secured.url, ca_file=secured.ca_file, token=wrong)
    assert refused.value.code == "unauthenticated"
    assert wrong not in str(refused.value)


def test_plain_text_never_reaches_a_secure_node(secured: SecuredCluster, alice: str) -> None:
    plain = secured.url.replace("https://", "http://")
    with pytest.raises(UnavailableError):
        quiver.connect(plain, token_file=alice, timeout=2)


def test_open_connection_ends_with_its_token_and_goes_on_with_the_next(secured: SecuredCluster, tmp_path: Path) -> None:
    first = secured.add_user("carol", (Verb.READ, "logs."), (Verb.WRITE, "logs."))
    path = tmp_path / "carol.token"
    os.link(first, path)
    with secured.admin() as admin, secured.connect(str(path)) as cluster:
        producer = cluster.producer("logs.web")
        producer.send("with the first token").result()
        second = secured.add_token(admin, "carol")
        os.replace(second, path)
        ids = [token.token_id for token in admin.access.tokens("carol")]
        old = next(one for one in ids if one in first)
        admin.access.revoke_token(old)
        producer.send("with the second token").result()
        new = next(one for one in ids if one != old)
        admin.access.revoke_token(new)
        with pytest.raises(NotAllowedError) as refused:
            producer.send("with none").result()
        assert refused.value.code == "unauthenticated"


def test_classic_library_uses_the_token(secured: SecuredCluster, alice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_TOKEN_FILE", alice)
    producer = classic.Producer(secured.url, ca_file=secured.ca_file)
    producer.RegisterProducer("logs.web")
    assert producer.Enqueue("logs.web", "from the classic library") == 0
    with pytest.raises(classic.myProducerError) as refused:
        producer.RegisterProducer("pay.web")
    assert refused.value.code == "not_allowed"
    monkeypatch.delenv("QUIVER_TOKEN_FILE")
    with pytest.raises(classic.myProducerError) as refused:
        classic.Producer(secured.url, ca_file=secured.ca_file).ListTopics()
    assert refused.value.code == "unauthenticated"


def test_commands_administer_users_tokens_roles_and_grants(
    secured: SecuredCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*arguments, *secured.flags()]) == code
        return capsys.readouterr().out

    out = str(tmp_path / "bob.token")
    run("user", "create", "bob")
    created = json.loads(run("token", "create", "bob", "--lasting", "1d", "--out", out, "--json"))
    assert stat.S_IMODE(os.stat(out).st_mode) == 0o600
    secured.secrets.append(read_secret(out).reveal())
    assert created["token_id"] in read_secret(out).reveal()
    printed = run("token", "create", "bob").strip()
    secured.secrets.append(printed)
    run("token", "create", "bob", code=2)  # two at a time
    tokens = json.loads(run("token", "list", "--user", "bob", "--json"))
    assert {one["token_id"] for one in tokens} == {printed.split("_")[1], created["token_id"]}

    assert run("acl", "test", "bob", "write", "logs.web", code=1).startswith("denied: no grant")
    assert run("acl", "grant", "bob", "write", "logs.*") == "user:bob may write topics logs.*\n"
    assert run("acl", "test", "bob", "write", "logs.web") == "allowed: user:bob may write topics logs.*\n"
    assert run("acl", "list", "--subject", "bob").split()[3:] == ["user:bob", "write", "topic:logs.*"]
    run("acl", "revoke", "bob", "write", "logs.*")
    run("acl", "test", "bob", "write", "logs.web", code=1)

    run("role", "create", "readers")
    run("acl", "grant", "role:readers", "read", "logs.web")
    run("role", "add", "readers", "bob")
    assert "role:readers may read topic logs.web" in run("acl", "test", "bob", "read", "logs.web")
    assert run("role", "show", "readers") == "users: bob\nrole:readers may read topic logs.web\n"
    assert "bob" in run("role", "list")
    run("role", "remove", "readers", "bob")
    run("role", "delete", "readers")

    run("user", "disable", "bob")
    with pytest.raises(NotAllowedError):
        secured.connect(out)
    run("user", "disable", "bob", "--undo")
    secured.connect(out).close()
    run("token", "revoke", code=2)
    run("token", "revoke", created["token_id"], "--in", out, code=2)
    secured.connect(out).close()
    assert run("token", "revoke", "--in", out) == f"revoked token {created['token_id']}\n"
    with pytest.raises(NotAllowedError):
        secured.connect(out)
    run("token", "revoke", printed.split("_")[1])
    run("user", "delete", "bob")
    assert "bob" not in run("user", "list")
    run("token", "create", "bob", code=2)


def test_waiting_for_brokers_ends_when_they_are_alive_or_in_time(
    secured: SecuredCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["broker", "wait", "1", *secured.flags()]) == 0
    assert capsys.readouterr().out == "alive: 1\n"
    assert main(["broker", "wait", "1", "9", "--within", "1ms", *secured.flags()]) == 3
    assert "not alive yet: broker 9" in capsys.readouterr().err


def test_context_keeps_the_file_and_commands_use_it(
    secured: SecuredCluster, alice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["context", "add", "secure", secured.url, "--ca-file", secured.ca_file, "--token-file", alice]) == 0
    capsys.readouterr()
    assert main(["topic", "list", "--names"]) == 0
    assert capsys.readouterr().out == "logs.web\n"
    assert main(["user", "list"]) == 2
    assert "user:alice may not" in capsys.readouterr().err


def _get(secured: SecuredCluster, path: str, token_file: str) -> str:
    context = ssl.create_default_context(cafile=secured.ca_file)
    request = urllib.request.Request(secured.url + path)
    request.add_header("Authorization", f"Bearer {read_secret(token_file).reveal()}")
    with urllib.request.urlopen(request, context=context) as answer:
        return str(answer.read().decode())


def _process_list(pid: int) -> str:
    """Return what every user of the machine can see of a process, and its environment."""
    return "".join(Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace") for name in ("cmdline", "environ"))


def test_secrets_are_shown_nowhere(
    secured: SecuredCluster, alice: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with secured.admin() as admin:
        secured.add_token(admin, "alice")
        shown += [repr(admin), repr(vars(admin)), repr(admin.access.users()), repr(admin.status())]
        shown += [repr(admin.access.create_token), repr(admin.checkup())]
    for arguments in (
        ["status"],
        ["status", "--json"],
        ["doctor"],
        ["user", "list", "--json"],
        ["token", "list", "--json"],
        ["acl", "list"],
        ["topic", "list", "--json"],
    ):
        main([*arguments, *secured.flags()])
    main(["status", *secured.flags()[:-1], "/nowhere"])
    main(["status", "--token", secured.secrets[0]])
    with pytest.raises(NotAllowedError) as refused:
        quiver.connect("10.0.0.1:9002", token=secured.secrets[0])
    shown.append(repr(refused.value))
    shown += [_get(secured, path, secured.admin_file) for path in ("/metrics", "/status", "/metadata")]
    command = [sys.executable, "-m", "quiver", "topic", "list", "--names", *secured.flags(alice)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        shown += [_process_list(process.pid), process.communicate()[0]]
    assert "logs.web" in shown[-1]
    shown += [caplog.text, *capsys.readouterr()]
    for folder, _, names in os.walk(os.path.dirname(secured.local._settings[1].node.data)):
        for name in names:
            shown.append(Path(folder, name).read_bytes().decode("latin-1"))
    assert len(secured.secrets) > 2
    for secret in secured.secrets:
        hidden = secret.rpartition("_")[2]
        assert not [text[:200] for text in shown if hidden in text]
