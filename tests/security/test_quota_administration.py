"""Quotas that administrators set at run time, over HTTP and the command line, and what users meet who exceed them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from quiver.cli import main
from quiver.errors import ConflictError, OverloadedError
from quiver.testing.local_cluster import LocalCluster


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quotas")


@pytest.fixture(scope="module")
def cluster(data: Path) -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, directory=str(data)) as running:
        yield running


def ask(
    cluster: LocalCluster, method: str, path: str, body: object = None, *, token: str = ""
) -> tuple[int, dict[str, str], Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with closing(http.client.HTTPConnection(cluster.urls[0].removeprefix("http://"), timeout=60)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read()
    is_json = "json" in response.headers.get("Content-Type", "")
    return response.status, dict(response.headers), json.loads(data) if is_json else data.decode()


def add_user(cluster: LocalCluster, name: str) -> str:
    """Return the token of a new administrator, who has quotas like everybody else."""
    assert ask(cluster, "POST", "/users", {"user": name})[0] < 300
    assert ask(cluster, "POST", "/acls", {"subject": f"user:{name}", "verb": "admin", "kind": "cluster"})[0] < 300
    token = ask(cluster, "POST", "/tokens", {"user": name})[2]["token"]
    assert ask(cluster, "GET", "/topics", token=token)[0] == 200
    return str(token)


def set_quota(cluster: LocalCluster, subject: str, **limits: int) -> None:
    status, _, answer = ask(cluster, "POST", "/quotas", {"subject": subject, **limits})
    assert status < 300, answer


def test_quotas_are_set_listed_and_removed_over_http(cluster: LocalCluster) -> None:
    set_quota(cluster, "topic:web", bytes_in_per_second=10**9)
    set_quota(cluster, "topic:web", requests_per_second=0)
    (found,) = ask(cluster, "GET", "/quotas?subject=topic:web")[2]["quotas"]
    assert found["limits"] == {"bytes_in_per_second": 10**9, "requests_per_second": 0}
    set_quota(cluster, "topic:web", weight=3)
    (found,) = ask(cluster, "GET", "/quotas?subject=topic:web")[2]["quotas"]
    assert found["limits"]["weight"] == 3
    assert ask(cluster, "POST", "/quotas", {"subject": "topic:web", "weight": 0})[0] == 422
    assert ask(cluster, "DELETE", "/quotas?subject=topic:web")[0] < 300
    assert ask(cluster, "DELETE", "/quotas?subject=topic:web")[2]["code"] == "unknown_quota"
    assert ask(cluster, "GET", "/quotas")[2]["quotas"] == []
    for body in ({"subject": "topic:web", "topics_max": 1}, {"subject": "default"}, {"subject": "x", "topics_max": 1}):
        status, _, answer = ask(cluster, "POST", "/quotas", body)
        assert (status, answer["code"]) == (422, "bad_quota")
    assert ask(cluster, "POST", "/quotas", {"subject": "default", "topics_max": -1})[0] == 422


def test_command_line_takes_quantities_as_people_write_them(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ["--url", cluster.urls[0]]
    assert (
        main(["quota", "set", "--topic", "*", "--bytes-in", "100GiB", "--requests", "unlimited", "--weight", "2", *url])
        == 0
    )
    assert main(["quota", "list", *url]) == 0
    shown = capsys.readouterr().out
    assert "100GiB" in shown
    assert "unlimited" in shown
    assert main(["quota", "list", "--topic", "*", "--json", *url]) == 0
    assert json.loads(capsys.readouterr().out)[0]["limits"] == {
        "bytes_in_per_second": 100 << 30,
        "requests_per_second": 0,
        "weight": 2,
    }
    assert main(["quota", "remove", "--topic", "*", *url]) == 0
    assert main(["quota", "remove", "--topic", "*", *url]) == 2
    assert "has no quotas" in capsys.readouterr().err
    for wrong in (["--requests", "5"], ["--default"], ["--default", "--topic", "x", "--requests", "5"]):
        assert main(["quota", "set", *wrong, *url]) == 2
    assert main(["quota", "set", "--default", "--topics", "none", *url]) == 2
    assert "is no limit: give a whole number from 1" in capsys.readouterr().err


def test_what_a_user_owns_is_bounded(cluster: LocalCluster) -> None:
    token = add_user(cluster, "owner")
    set_quota(cluster, "user:owner", topics_max=1, partitions_max=3, registrations_max=1)
    assert ask(cluster, "POST", "/topics", {"topic": "own-1", "partitions": 2}, token=token)[0] < 300
    status, _, answer = ask(cluster, "POST", "/topics", {"topic": "own-2"}, token=token)
    assert (status, answer["code"]) == (409, "quota_topics")
    assert "not done" in answer["message"]
    assert "administrator" in answer["message"]
    assert ask(cluster, "POST", "/topics", {"topic": "nobodys"})[0] < 300
    with cluster.connect(token=token) as owner:
        with pytest.raises(ConflictError) as refused:
            owner.add_partitions("own-1", 4)
        assert refused.value.code == "quota_partitions"
        with owner.producer("own-1", "first"), pytest.raises(ConflictError) as refused:
            owner.producer("own-1", "second")
        assert refused.value.code == "quota_registrations"
    set_quota(cluster, "user:owner", topics_max=2, partitions_max=0)
    assert ask(cluster, "POST", "/topics", {"topic": "own-2"}, token=token)[0] < 300
    metrics = ask(cluster, "GET", "/metrics")[2]
    for name in ("topics_max", "partitions_max", "registrations_max"):
        assert f'quiver_quota_refusals_total{{quota="{name}"}} 1' in metrics


def test_rates_of_a_user_are_answered_429_until_they_are_raised(cluster: LocalCluster) -> None:
    token = add_user(cluster, "noisy")
    set_quota(cluster, "user:noisy", mutations_per_second=1)
    body = {"topic": "noise"}
    while (answer := ask(cluster, "POST", "/producer/register", body, token=token))[0] != 429:
        assert answer[0] < 300, answer
    status, headers, refused = answer
    assert (status, refused["code"]) == (429, "quota_exceeded")
    assert int(headers["Retry-After"]) >= 1
    assert "mutations_per_second of 1" in refused["message"]
    assert ask(cluster, "GET", "/topics", token=token)[0] == 200, "a read is no mutation"
    assert ask(cluster, "POST", "/producer/register", body)[0] < 300, "others have quotas of their own"
    with cluster.connect(token=token) as noisy:  # the SDK waits as long as it is told to
        for number in range(2):
            noisy.create_topic(f"noise-{number}")
    assert ask(cluster, "DELETE", "/quotas?subject=user:noisy")[0] < 300
    assert all(ask(cluster, "POST", "/producer/register", body, token=token)[0] < 300 for _ in range(5))


def test_connections_of_a_user_are_bounded(cluster: LocalCluster) -> None:
    token = add_user(cluster, "many")
    set_quota(cluster, "user:many", connections_max=1)
    with cluster.connect(token=token) as first:
        first.list_topics()
        with pytest.raises(OverloadedError) as refused:
            list_topics_of(cluster, token)
        assert "connections_max" in refused.value.message
        first.list_topics()
    wait_until(lambda: list_topics_of(cluster, token) is not None)  # the server may not know yet that it is closed


def list_topics_of(cluster: LocalCluster, token: str) -> list[str]:
    with cluster.connect(token=token, timeout=5.0) as other:
        return other.list_topics()


def test_changes_are_in_the_ledger_with_their_principal(
    cluster: LocalCluster, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = add_user(cluster, "boss")
    assert ask(cluster, "POST", "/quotas", {"subject": "default", "registrations_max": 10_000}, token=token)[0] < 300
    assert ask(cluster, "DELETE", "/quotas?subject=default", token=token)[0] < 300
    assert main(["metadata", "log", "--data", str(data), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(one["request"], one["subject"]) for one in lines if one["principal"] == "user:boss"}
    assert ("set_quota", "quota of default: registrations_max=10000") in found
    assert ("remove_quota", "quota of default") in found
