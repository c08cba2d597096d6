"""The rule that decides how a node is protected: by its addresses, unless its operator says otherwise."""

from __future__ import annotations

import pytest

from quiver.config import NodeProof, SecurityMode, decide_mode, decide_proof, load_settings
from quiver.errors import ConfigError

FILES = {"security.directory": "/etc/quiver/security"}
REMOTE = {"node.id": "1", "node.wire": "10.0.0.1:9002", "node.http": "10.0.0.1:8002"}


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ({}, "development"),
        ({"node.wire": "localhost:9002", "node.http": "[::1]:8002"}, "development"),
        ({"node.wire": "127.0.0.3:9002", "node.advertise": "127.0.0.3"}, "development"),
        ({"node.http": "0.0.0.0:8002", "node.roles": "manager,broker"}, "development"),
        ({"node.id": "1", "node.join": "1@127.0.0.1:9002,2@127.0.0.1:9003"}, "development"),
        (FILES, "development"),
        ({"security.mode": "insecure"}, "insecure"),
        (REMOTE | {"security.mode": "insecure"}, "insecure"),
        ({"security.mode": "secure"} | FILES, "secure"),
        (REMOTE | FILES, "secure"),
        (REMOTE | FILES | {"tls.client_certificates": "all"}, "secure"),
        (REMOTE | FILES | {"node.http": "127.0.0.1:8002", "gateway.tls": "off"}, "secure"),
        ({"node.advertise": "broker.example"} | FILES, "secure"),
        ({"node.id": "4", "node.join": "1@10.0.0.1:9002", "node.roles": "broker"} | FILES, "secure"),
    ],
)
def test_mode_follows_from_the_settings(flags: dict[str, str], mode: str) -> None:
    assert decide_mode(load_settings(flags=flags)) == mode


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (REMOTE, "node.wire is 10.0.0.1:9002, which other machines can reach, but the node has no certificate"),
        ({"node.id": "1", "node.wire": "0.0.0.0:9002"}, "node.wire is 0.0.0.0:9002"),
        ({"node.id": "1", "node.wire": "[::]:9002"}, "which other machines can reach"),
        ({"node.id": "1", "node.http": "example:8002"}, "node.http is example:8002"),
        ({"node.id": "1", "node.advertise": "127.0.0.1.example"}, "node.advertise is 127.0.0.1.example"),
        ({"node.id": "2", "node.join": "1@10.0.0.1:9002,2@127.0.0.1:9002"}, "node.join names 10.0.0.1:9002"),
        ({"node.id": "1", "security.mode": "secure"}, "security.mode is secure, but the node has no certificate"),
        (REMOTE | FILES | {"tls.client_certificates": "none"}, "anybody could pose as a node"),
        (REMOTE | FILES | {"gateway.tls": "off"}, "tokens would travel in plain text"),
        (
            FILES | {"node.id": "1", "gateway.tls": "off", "gateway.admin_listen": "10.0.0.1:8003"},
            "tokens would travel in plain text",
        ),
        (
            REMOTE | {"tls.is_enabled": "true", "tls.certificate_file": "c.pem"},
            "security.admin_file is not set, so that nobody could administer",
        ),
    ],
)
def test_node_that_must_be_secure_and_is_not_is_refused(flags: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decide_mode(load_settings(flags=flags))
    assert reason in refused.value.message
    assert "run `quiver security init " in refused.value.message
    assert refused.value.code == "not_secure"


def test_refusal_has_the_command_for_this_cluster() -> None:
    managers = "1@10.0.0.1:9002,2@broker-2:9002,3@[fd00::3]:9002"
    settings = load_settings(flags={"node.id": "1", "node.wire": "0.0.0.0:9002", "node.join": managers})
    with pytest.raises(ConfigError, match=r"`quiver security init 1@10\.0\.0\.1 2@broker-2 3@fd00::3`"):
        decide_mode(settings)


@pytest.mark.parametrize(
    ("flags", "proof"),
    [
        ({}, NodeProof.SECRET),
        (FILES, NodeProof.CERTIFICATE),
        (FILES | {"tls.client_certificates": "none"}, NodeProof.SECRET),
        (REMOTE | FILES, NodeProof.CERTIFICATE),
        (REMOTE | {"security.mode": "insecure"}, NodeProof.NONE),
        (REMOTE | {"security.mode": "insecure", "security.node_secret_file": "/s"}, NodeProof.SECRET),
        (REMOTE | FILES | {"security.mode": "insecure"}, NodeProof.CERTIFICATE),
    ],
)
def test_nodes_prove_themselves_by_the_best_that_they_have(flags: dict[str, str], proof: NodeProof) -> None:
    assert decide_proof(load_settings(flags=flags)) is proof


def test_directory_names_every_file_that_is_not_named() -> None:
    settings = load_settings(flags=FILES)
    assert settings.tls.is_enabled
    assert settings.tls.certificate_file == "/etc/quiver/security/node.pem"
    assert settings.tls.key_file == "/etc/quiver/security/node.key"
    assert settings.tls.ca_file == "/etc/quiver/security/ca.pem"
    assert settings.security.admin_file == "/etc/quiver/security/admin.hash"
    own = load_settings(flags=FILES | {"tls.certificate_file": "/own.pem", "security.ca_key_file": "/own.key"})
    assert (own.tls.certificate_file, own.tls.key_file) == ("/own.pem", "")
    assert own.security.ca_key_file == "/own.key"


def test_modes_have_names() -> None:
    assert [str(mode) for mode in SecurityMode] == ["development", "secure", "insecure"]
