"""`quiver acl`: subjects and resources as people write them."""

from __future__ import annotations

import pytest

from quiver.cli import main
from quiver.cli.acl import parse_resource, parse_subject
from quiver.errors import RequestError
from quiver.security.permissions import ResourceKind


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        ("alice", "user:alice"),
        ("user:alice", "user:alice"),
        ("role:readers", "role:readers"),
        ("anonymous", "anonymous"),
        ("user:anonymous", "user:anonymous"),
    ],
)
def test_name_alone_is_a_user(text: str, subject: str) -> None:
    assert parse_subject(text) == subject


@pytest.mark.parametrize(
    ("text", "kind", "name", "is_prefix"),
    [
        ("logs.web", ResourceKind.TOPIC, "logs.web", False),
        ("logs.*", ResourceKind.TOPIC, "logs.", True),
        ("*", ResourceKind.TOPIC, "", True),
        ("topic:cluster", ResourceKind.TOPIC, "cluster", False),
        ("consumer:report", ResourceKind.CONSUMER, "report", False),
        ("producer:web-*", ResourceKind.PRODUCER, "web-", True),
        ("consumer:*", ResourceKind.CONSUMER, "", True),
        ("cluster", ResourceKind.CLUSTER, "", False),
    ],
)
def test_resource_is_a_topic_unless_its_kind_is_named(
    text: str, kind: ResourceKind, name: str, is_prefix: bool
) -> None:
    assert parse_resource(text) == (kind, name, is_prefix)


@pytest.mark.parametrize("text", ["", "topic:", "cluster:x", "group:x", "a*b", "**"])
def test_bad_resource_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_resource(text)
    assert refused.value.code == "bad_resource"


def test_verdict_is_about_one_resource(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "test", "alice", "read", "logs.*"]) == 2
    assert "name one resource" in capsys.readouterr().err
    assert main(["acl", "grant", "alice", "eat", "logs"]) == 2
    assert "verbs are: read, write" in capsys.readouterr().err


def test_token_is_not_created_if_its_file_exists(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{tmp_path}/token"
    with open(path, "w"):
        pass
    assert main(["token", "create", "alice", "--out", path, "--url", "http://127.0.0.1:1"]) == 2  # nothing was asked
    assert "exists" in capsys.readouterr().err
