"""A secure cluster with an identity provider: its tokens on the wire and over HTTP, their roles and their end."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from secured_cluster import SecuredCluster, secured_cluster
from token_provider import AUDIENCE, ISSUER, KeyServer, key_set, new_key, sign

import quiver
from quiver.access.json_web_tokens import LEEWAY_S
from quiver.cli import main
from quiver.errors import NotAllowedError
from quiver.security.permissions import Grant, ResourceKind, Verb

KEY = new_key("ES256")
LATER = new_key("EdDSA")


@pytest.fixture(scope="module")
def server() -> Iterator[KeyServer]:
    with KeyServer(key_set({"1": KEY})) as running:
        yield running


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, server: KeyServer) -> Iterator[SecuredCluster]:
    settings = {
        "oidc.issuer": ISSUER,
        "oidc.audience": AUDIENCE,
        "oidc.jwks_url": server.url,
        "oidc.refresh_ms": "1000",
        "oidc.roles_claim": "roles",
    }
    with secured_cluster(tmp_path_factory.mktemp("security"), settings) as cluster:
        with cluster.admin() as admin:
            admin.create_topic("logs.web", partitions=1)
            admin.create_topic("pay.web", partitions=1)
            admin.access.create_role("writers")
            for verb in (Verb.READ, Verb.WRITE, Verb.CREATE):
                grant = Grant(subject="role:writers", verb=verb, kind=ResourceKind.TOPIC, name="logs.", is_prefix=True)
                admin.access.add_grant(grant)
        yield cluster


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("URL", "CONTEXT", "CA_FILE", "TOKEN_FILE", "USER", "PASSWORD_FILE"):
        monkeypatch.delenv(f"QUIVER_{variable}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def _ask(secured: SecuredCluster, path: str, token: str, body: Any = None) -> tuple[int, Any]:
    context = ssl.create_default_context(cafile=secured.ca_file)
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(secured.url + path, data, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.parametrize("by", ["http", "wire"])
def test_roles_of_the_token_decide_on_the_wire_and_over_http(secured: SecuredCluster, by: str) -> None:
    address = secured.url if by == "http" else secured.local.addresses[0]
    token = sign(KEY, "1", roles=["quiver-writers", "admin"])
    with quiver.connect(address, ca_file=secured.ca_file, token=token) as cluster:
        cluster.producer("logs.web").send("hello").result()
        cluster.create_topic(f"logs.{by}", partitions=1)  # the primary decides, by the same roles
        with pytest.raises(NotAllowedError) as refused:
            cluster.producer("pay.web").send("x").result()
        assert refused.value.code == "not_allowed"
    assert _ask(secured, "/topics", token)[0] == 200
    made = _ask(secured, "/topics", token, {"topic_name": f"logs.{by}.2"})
    assert made[0] == 201, made
    assert _ask(secured, "/topics", token, {"topic_name": "pay.2"})[0] == 403
    with quiver.connect(address, ca_file=secured.ca_file, token=sign(KEY, "1")) as cluster:
        assert cluster.list_topics() == []


def test_user_of_the_provider_has_grants_of_its_own_and_can_be_refused(secured: SecuredCluster) -> None:
    token = sign(KEY, "1", sub="bob")
    with secured.admin() as admin, quiver.connect(secured.url, ca_file=secured.ca_file, token=token) as cluster:
        admin.access.create_user("oidc.bob")
        admin.access.add_grant(Grant(subject="user:oidc.bob", verb=Verb.READ, kind=ResourceKind.TOPIC, name="pay.web"))
        assert cluster.list_topics() == ["pay.web"]
        admin.access.enable_user("oidc.bob", is_enabled=False)
        with pytest.raises(NotAllowedError) as refused:
            cluster.list_topics()
        assert refused.value.code == "unauthenticated"
    assert _ask(secured, "/topics", token)[0] == 401


def test_provider_cannot_name_the_clusters_own_administrator(secured: SecuredCluster) -> None:
    token = sign(KEY, "1", sub="admin")
    assert _ask(secured, "/users", token)[0] == 403
    assert _ask(secured, "/users", sign(KEY, "1", roles=["quiver-admin"]))[0] == 200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"exp": 1}, "it has expired"), ({"aud": "x"}, "another audience"), ({"iss": "x"}, "another issuer")],
)
def test_invalid_token_is_refused_with_a_sentence(
    secured: SecuredCluster, changes: dict[str, Any], reason: str
) -> None:
    token = sign(KEY, "1", **changes)
    status, answer = _ask(secured, "/topics", token)
    assert (status, answer["code"]) == (401, "unauthenticated")
    assert reason in answer["message"]
    assert token not in str(answer)
    with pytest.raises(NotAllowedError, match=reason) as refused:
        quiver.connect(secured.url, ca_file=secured.ca_file, token=token)
    assert refused.value.code == "unauthenticated"


def test_end_of_a_token_ends_the_session_and_the_next_one_continues_it(secured: SecuredCluster, tmp_path: Path) -> None:
    path = tmp_path / "token"

    def write(token: str) -> None:
        replacement = tmp_path / "new"
        replacement.write_text(token)
        replacement.chmod(0o600)
        os.replace(replacement, path)

    life_s = 2
    while True:
        ends_s = int(time.time()) + life_s
        write(sign(KEY, "1", exp=ends_s - LEEWAY_S, roles=["quiver-writers"]))
        try:
            cluster = quiver.connect(secured.url, ca_file=secured.ca_file, token_file=str(path))
            producer = cluster.producer("logs.web")
            producer.send("with the first token").result()
            break
        except NotAllowedError:  # this machine is slow: the token ended before
            life_s *= 2
    with cluster:
        time.sleep(max(0.0, ends_s - time.time()))
        with pytest.raises(NotAllowedError) as refused:
            producer.send("with an expired one").result()
        assert (refused.value.code, refused.value.outcome) == ("unauthenticated", "not_done")
        write(sign(KEY, "1", roles=["quiver-writers"]))
        cluster.producer("logs.web").send("with the second token").result()


def test_rotated_key_is_found_by_the_first_token_that_it_signs(secured: SecuredCluster, server: KeyServer) -> None:
    server.content = key_set({"1": KEY, "2": LATER})
    token = sign(LATER, "2", roles=["quiver-writers"])
    with quiver.connect(secured.local.addresses[0], ca_file=secured.ca_file, token=token) as cluster:
        assert "logs.web" in cluster.list_topics()
    assert _ask(secured, "/topics", token)[0] == 200


def test_failing_provider_is_in_the_status_and_its_keys_stay_in_use(
    secured: SecuredCluster, server: KeyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 500
    try:
        with secured.admin() as admin:
            while not (problem := admin.status().nodes[0].provider_problem):
                time.sleep(0.05)
        assert "status 500" in problem
        assert main(["status", *secured.flags()]) == 0
        assert "keeps the keys that it has" in "".join(capsys.readouterr())
        assert _ask(secured, "/topics", sign(KEY, "1"))[0] == 200
    finally:
        server.status = 200


def test_audit_log_says_how_and_why(secured: SecuredCluster) -> None:
    assert _ask(secured, "/topics", sign(KEY, "1", sub="audited"))[0] == 200
    assert _ask(secured, "/topics", sign(new_key("ES256"), "1", sub="audited"))[0] == 401
    wanted = {("user:oidc.audited", "done", "oidc 1"), ("anonymous", "unauthenticated", "oidc its signature is wrong")}
    while wanted:
        for line in (line for file in secured.audit_files() for line in file.read_text().splitlines()):
            event = json.loads(line)["event"]
            wanted.discard((event.get("principal", "anonymous"), event["outcome"], event.get("detail", "")))
        time.sleep(0.05)
