"""A running cluster that demands credentials: nobody gets in without, and nobody gets further than their grants."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from secured_cluster import SecuredCluster, secured_cluster
from waiting import wait_until

import quiver
from quiver.cli import main
from quiver.config import TlsSettings
from quiver.errors import NotAllowedError, NotFoundError, RequestError
from quiver.gateway import queue_handlers
from quiver.model import Index
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.secrets import read_secret
from quiver.security.tokens import new_token
from quiver.wire import RequestPool
from quiver.wire.security_messages import ListUsers


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path_factory.mktemp("secure"), {"log.durability": "none"}, nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alice(secure: SecuredCluster) -> str:
    return _add_user(secure, "alice", Verb.WRITE, Verb.READ, Verb.CREATE)


@pytest.fixture(scope="module")
def bob(secure: SecuredCluster) -> str:
    return _add_user(secure, "bob", Verb.WRITE, Verb.READ)


def _add_user(secure: SecuredCluster, name: str, *verbs: Verb) -> str:
    """Return the token of a new user who may do some verbs on logs."""
    return read_secret(secure.add_user(name, *((verb, "logs.") for verb in verbs))).reveal()


def test_probes_answer_everybody_and_nothing_else_does(secure: SecuredCluster) -> None:
    for path in ("/healthz", "/livez", "/readyz", "/openapi.json"):
        assert secure.call("GET", path, token="")[0] == 200
    for method, path in (("GET", "/topics"), ("GET", "/status"), ("GET", "/metrics"), ("POST", "/topics")):
        status, answer = secure.call(method, path, token="")
        assert (status, answer["code"]) == (401, "unauthenticated")
    assert secure.call("GET", "/topics", token=new_token().text)[1]["code"] == "unauthenticated"


def test_grants_bound_what_a_user_may_do(secure: SecuredCluster, alice: str, bob: str) -> None:
    made = secure.must("POST", "/producer/register", {"topic": "logs.web", "prod_name": "p"}, token=alice)
    produce = {"topic": "logs.web", "producer_id": made["producer_id"], "message": "hello"}
    assert secure.must("POST", "/producer/produce", produce, token=alice)["offset"] == 0
    for method, path, body in (
        ("POST", "/topics", {"topic": "other"}),
        ("DELETE", "/topics/logs.web", None),
        ("POST", "/producer/register", {"topic": "other"}),
        ("GET", "/topics/other", None),
        ("GET", "/users", None),
        ("POST", "/brokers/1/drain", None),
        ("POST", "/acls", {"subject": "user:alice", "verb": "admin", "kind": "cluster"}),
        ("GET", "/metrics", None),
    ):
        status, answer = secure.call(method, path, body, token=alice)
        assert (status, answer["code"]) == (403, "not_allowed"), path
    # Not the topic's creation either: bob may write, and the topic does not exist.
    status, answer = secure.call("POST", "/producer/register", {"topic": "logs.none"}, token=bob)
    assert (status, answer["code"]) == (403, "not_allowed")


def test_nobody_works_on_anothers_queue(secure: SecuredCluster, alice: str, bob: str) -> None:
    made = secure.must("POST", "/producer/register", {"topic": "logs.jobs"}, token=alice)
    produce = {"topic": "logs.jobs", "producer_id": made["producer_id"], "message": "x", "partition_id": 0}
    secure.must("POST", "/producer/produce", produce, token=alice)
    queue = {"topic": "logs.jobs", "group": "workers"}
    (job,) = secure.must("POST", "/queue/receive", {**queue, "wait_ms": 5000}, token=alice)["jobs"]
    receipt = {"receipt": job["receipt"]}
    for node in (1, 2):
        for what, more in (
            ("receive", {}),
            ("ack", receipt),
            ("nack", receipt),
            ("extend", receipt),
            ("reject", receipt),
        ):
            status, answer = secure.call("POST", f"/queue/{what}", {**queue, **more}, token=bob, node=node)
            assert (status, answer["code"]) == (403, "not_owner"), what
    # Nor with a queue of one's own: a receipt is of one group.
    secure.must("POST", "/queue/receive", {**queue, "group": "bobs"}, token=bob)
    status, answer = secure.call("POST", "/queue/ack", {**queue, "group": "bobs", **receipt}, token=bob)
    assert (status, answer["code"]) == (400, "bad_receipt")
    status, answer = secure.call("POST", "/queue/receive", {"topic": "other", "group": "workers"}, token=alice)
    assert (status, answer["code"]) == (403, "not_allowed")
    assert secure.call("POST", "/queue/ack", {**queue, **receipt}, token="")[0] == 401
    assert secure.must("POST", "/queue/ack", {**queue, **receipt}, token=alice)["count"] == 1


def test_one_user_leaves_queues_over_http_to_others(
    secure: SecuredCluster, alice: str, bob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure.must("POST", "/producer/register", {"topic": "logs.many"}, token=alice)
    monkeypatch.setattr(queue_handlers, "QUEUES_MAX", 16)  # some may be open still, from other tests

    def receive(name: str, token: str) -> str:
        body = {"topic": "logs.many", "group": name}
        return str(secure.call("POST", "/queue/receive", body, token=token)[1].get("code", ""))

    assert [receive(f"many-{number}", alice) for number in range(9)][-1] == "too_many_queues"
    assert receive("many-0", alice) == ""
    assert receive("one", bob) == ""


def test_groups_over_http_are_as_protected_as_on_the_wire(secure: SecuredCluster) -> None:
    both = ((Verb.READ, "logs."), (Verb.WRITE, "logs."))
    henry, gina = (secure.add_user(name, *both) for name in ("henry", "gina"))
    with secure.admin() as admin:
        admin.create_topic("logs.henry", partitions=1)
        with secure.connect(henry) as cluster:
            with cluster.consumer("logs.henry", name="henrys") as consumer:
                consumer.commit()
            with cluster.queue("logs.henry", group="henrys-queue"):
                pass

        def change(user: str, verb: Verb, kind: ResourceKind, name: str, *, is_removed: bool = False) -> None:
            grant = Grant(subject=f"user:{user}", verb=verb, kind=kind, name=name, is_prefix=True)
            (admin.access.remove_grant if is_removed else admin.access.add_grant)(grant)

        assert set(_ask_of_groups(secure, henry)) == {""}
        assert "" not in _ask_of_groups(secure, gina)
        for verb in (Verb.READ, Verb.CONFIGURE):
            change("gina", verb, ResourceKind.CONSUMER, "henrys")
        wait_until(lambda: set(_ask_of_groups(secure, gina)) == {""})
        # One owns the groups, one may read and configure them, and neither may read the topic.
        for user in ("henry", "gina"):
            change(user, Verb.READ, ResourceKind.TOPIC, "logs.", is_removed=True)
        for token_file in (henry, gina):
            wait_until(partial(_is_refused, secure, token_file))
        change("gina", Verb.WRITE, ResourceKind.TOPIC, "logs.", is_removed=True)
        wait_until(lambda: set(_ask_of_groups(secure, gina)) == {""})
        for path, answer in (("", {"topics": []}), ("/lag", {"lag": 0, "partitions": []})):
            found = secure.must("GET", f"/groups/henrys{path}", token=read_secret(gina).reveal())
            assert (found.get("group") or found).items() >= answer.items(), "a topic that she does not see is left out"


def _is_refused(secure: SecuredCluster, token_file: str) -> bool:
    return set(_ask_of_groups(secure, token_file)) == {"not_allowed"}


def _ask_of_groups(secure: SecuredCluster, token_file: str) -> list[str]:
    """Ask for lag and queue of henry's groups, and reset one; return the codes over HTTP at two nodes, and the wire."""
    token = read_secret(token_file).reveal()
    calls: list[tuple[str, str, object]] = [
        ("GET", "/groups/henrys/lag", None),
        ("GET", "/groups/henrys-queue/queue", None),
        ("POST", "/groups/henrys/reset", {"to": "earliest"}),
    ]
    codes = [
        str(secure.call(method, path, body, token=token, node=node)[1].get("code", ""))
        for node in (1, 2)
        for method, path, body in calls
    ]
    with secure.connect(token_file) as cluster:
        asked: tuple[Callable[[], object], ...] = (
            lambda: cluster.group_lag("henrys"),
            lambda: cluster.describe_queue("henrys-queue"),
            lambda: cluster.reset_group("henrys", "earliest"),
        )
        for ask in asked:
            try:
                ask()
            except RequestError as error:
                codes.append(error.code)
            else:
                codes.append("")
    return codes


def test_user_of_a_topic_may_make_a_queue_with_settings(secure: SecuredCluster) -> None:
    token_file = secure.add_user("dave", (Verb.READ, "logs."), (Verb.WRITE, "logs."))
    with secure.connect(token_file) as cluster:
        with secure.admin() as admin:
            admin.create_topic("logs.dave", partitions=1)
        with cluster.producer("logs.dave") as producer:
            producer.send("his").result()
        with cluster.queue("logs.dave", group="daves", lease=60, max_attempts=2) as queue:
            assert queue.settings.lease_ms == 60_000
            (job,) = queue.receive(timeout=30)
            job.ack()
        cluster.configure_queue("daves", lease=90)
        with pytest.raises(NotFoundError):  # a topic that he may not see
            cluster.queue("other", group="daves")


def test_nobody_takes_anothers_producer_or_cursor(secure: SecuredCluster, alice: str, bob: str) -> None:
    made = secure.must("POST", "/producer/register", {"topic": "logs.own", "prod_name": "own"}, token=alice)
    body = {"topic": "logs.own", "prod_name": "own"}
    assert secure.call("POST", "/producer/register", body, token=bob)[1]["code"] == "not_owner"
    produce = {"topic": "logs.own", "producer_id": made["producer_id"], "message": "x"}
    for node in (1, 2):
        status, answer = secure.call("POST", "/producer/produce", produce, token=bob, node=node)
        assert (status, answer["code"]) == (403, "not_owner")
    secure.must("POST", "/producer/produce", produce, token=alice)
    consumer = secure.must("POST", "/consumer/register", {"topic": "logs.own"}, token=alice)["consumer_id"]
    path = f"/consumer/consume?topic=logs.own&consumer_id={consumer}"
    assert secure.call("GET", path, token=bob)[1]["code"] == "not_owner"
    assert secure.must("GET", path, token=alice)["message"] == "x"
    assert secure.must("POST", "/producer/register", body)["epoch"] == 1, "an administrator may"


def test_lists_show_what_is_granted(secure: SecuredCluster, alice: str) -> None:
    secure.must("POST", "/topics", {"topic": "secret"})
    assert "secret" in secure.must("GET", "/topics")["topics"]
    assert "secret" not in secure.must("GET", "/topics", token=alice)["topics"]


def test_verdict_is_explained(secure: SecuredCluster, alice: str) -> None:
    verdict = secure.must("GET", "/acls/test?principal=alice&verb=write&name=logs.web")
    assert verdict["is_allowed"]
    assert verdict["reason"] == "user:alice may write topics logs.*"
    denied = secure.must("GET", "/acls/test?principal=alice&verb=delete&name=logs.web", token=alice)
    assert (denied["is_allowed"], denied["grant"]) == (False, None)


def test_revoked_token_stops_working_on_every_node_and_open_connection(secure: SecuredCluster) -> None:
    token = _add_user(secure, "carol", Verb.READ, Verb.WRITE, Verb.CREATE)
    with quiver.connect(*secure.local.addresses, ca_file=secure.ca_file, token=token) as cluster:
        cluster.create_topic("logs.carol", partitions=1)
        with pytest.raises(NotAllowedError):
            _send_until_refused(secure, cluster, token)
    wait_until(lambda: all(secure.call("GET", "/topics", token=token, node=node)[0] == 401 for node in (1, 2)))


def _send_until_refused(secure: SecuredCluster, cluster: quiver.Cluster, token: str) -> None:
    with cluster.producer("logs.carol") as producer:
        producer.send(b"x").result()
        secure.must("DELETE", f"/tokens/{token.split('_')[1]}")
        wait_until(lambda: producer.send(b"y").result() is None)  # until this raises


def test_new_token_works_at_once_on_every_node(secure: SecuredCluster) -> None:
    """Also on those that have not applied it yet."""
    secure.must("POST", "/users", {"user": "frank"})
    for _ in range(3):
        made = secure.must("POST", "/tokens", {"user": "frank"})
        assert [secure.call("GET", "/topics", token=made["token"], node=node)[0] for node in (1, 2)] == [200, 200]
        secure.must("DELETE", f"/tokens/{made['token_id']}")
        with secure.admin() as admin:
            path = secure.add_token(admin, "frank")
        for url in reversed(secure.local.urls):
            with secure.connect(path, url=url) as cluster:
                assert "quiver.audit" not in cluster.list_topics()
        token_id = read_secret(path).reveal().split("_")[1]
        secure.must("DELETE", f"/tokens/{token_id}")


def test_sdk_without_credentials_gets_nothing(secure: SecuredCluster) -> None:
    with pytest.raises(NotAllowedError) as caught, secure.connect() as cluster:
        cluster.describe_topic("logs.web")
    assert caught.value.code == "unauthenticated"


def test_strangers_are_refused_before_they_wait(secure: SecuredCluster) -> None:
    async def ask() -> None:
        async with RequestPool(name="stranger", tls=TlsSettings(is_enabled=True, ca_file=secure.ca_file)) as pool:
            await pool.call(secure.local.addresses[0], ListUsers(known_index=Index(2**40)), timeout_ms=5_000)

    with pytest.raises(NotAllowedError) as caught:
        asyncio.run(ask())
    assert caught.value.code == "unauthenticated"


def test_tokens_are_shown_once_and_stored_as_hashes(secure: SecuredCluster, alice: str) -> None:
    # The other node may have created it: the one that is asked learns of it in a moment.
    wait_until(lambda: secure.must("GET", "/tokens?user=alice")["tokens"])
    tokens = secure.must("GET", "/tokens?user=alice")["tokens"]
    assert [set(one) for one in tokens] == [{"token_id", "user", "created_ms", "expires_ms"}]
    secret = alice.split("_")[2].encode()
    for path in secure.data.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes(), path


def test_audit_log_says_who_did_what_and_who_was_refused(secure: SecuredCluster, alice: str) -> None:
    secure.must("POST", "/users", {"user": "audited"})
    secure.call("DELETE", "/users/audited", token=alice)

    def events() -> list[tuple[str, str, str, str]]:
        return [
            (one["kind"], one.get("principal", ""), one.get("request", ""), one["outcome"])
            for one in secure.audit_events()
        ]

    wait_until(lambda: ("denial", "user:alice", "delete_user", "not_allowed") in events())
    assert ("change", "user:admin", "create_user", "done") in events()
    assert any(one[0] == "authentication" and one[3] == "done" for one in events())
    for path in secure.audit_files():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_audit_topic_is_for_administrators(secure: SecuredCluster, alice: str) -> None:
    secure.must("POST", "/users", {"user": "published"})
    wait_until(lambda: "quiver.audit" in secure.must("GET", "/topics")["topics"])
    consumer = secure.must("POST", "/consumer/register", {"topic": "quiver.audit"})["consumer_id"]
    path = f"/consumer/consume_batch?topic=quiver.audit&consumer_id={consumer}&max=10000"
    found: list[str] = []

    def is_published() -> bool:
        found.extend(one["message"] for one in secure.call("GET", path)[1].get("messages", ()))
        return any('"resource":"user published"' in one for one in found)

    wait_until(is_published)
    status, answer = secure.call("POST", "/consumer/register", {"topic": "quiver.audit"}, token=alice)
    assert (status, answer["code"]) == (403, "not_allowed")
    assert "quiver.audit" not in secure.must("GET", "/topics", token=alice)["topics"]


def test_metadata_log_is_the_ledger(secure: SecuredCluster, capsys: pytest.CaptureFixture[str]) -> None:
    secure.must("POST", "/roles", {"role": "ledger"})
    directory = secure.audit_files()[0].parent
    assert main(["metadata", "log", "--data", str(directory), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["request"], row["subject"], row["principal"]) for row in rows]
    assert ("create_role", "role ledger", "user:admin") in found
