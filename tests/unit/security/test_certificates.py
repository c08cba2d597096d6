"""The authority and its certificates, and the files from which a secure cluster starts."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from quiver.cli.security import parse_nodes, security
from quiver.config import SecurityMode, decide_mode, load_settings
from quiver.errors import ConfigError, RequestError
from quiver.security.admin_file import load_admin_file
from quiver.security.bootstrap import initialize, load_authority, renew_certificate
from quiver.security.certificates import (
    Authority,
    expiry_s,
    fingerprint,
    hosts_of,
    load_certificate,
    make_authority,
    make_key,
    make_request,
)
from quiver.security.secrets import Secret
from quiver.security.tokens import matches, parse_token


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(*make_authority("test"))


def test_certificate_names_the_node_and_its_hosts(authority: Authority) -> None:
    pem = authority.issue(3, ["10.0.0.3", "broker-3.example", "fd00::3"], make_request(make_key(), 3))
    names = load_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["urn:quiver:node:3"]
    assert names.get_values_for_type(x509.DNSName) == ["node-3", "broker-3.example", "localhost"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == [
        "10.0.0.3",
        "fd00::3",
        "127.0.0.1",
        "::1",
    ]
    assert set(hosts_of(pem)) >= {"10.0.0.3", "broker-3.example", "fd00::3"}
    load_certificate(pem).verify_directly_issued_by(load_certificate(authority.certificate))
    assert expiry_s(pem) < expiry_s(authority.certificate)


def test_what_the_request_claims_is_ignored(authority: Authority) -> None:
    pem = authority.issue(3, ["h"], make_request(make_key(), 1))
    assert load_certificate(pem).subject.rfc4514_string() == "CN=node-3,O=quiver"


@pytest.mark.parametrize("host", ["", "a b", "a..b", "-\n", "x" * 300, "*.example", "ü.example"])
def test_host_that_is_none_is_refused(authority: Authority, host: str) -> None:
    with pytest.raises(RequestError, match="not a host name"):
        authority.issue(3, [host], make_request(make_key(), 3))


def test_host_that_looks_like_the_identity_of_a_node_is_refused(authority: Authority) -> None:
    with pytest.raises(RequestError, match="reserved for the identities of nodes"):
        authority.issue(3, ["node-1"], make_request(make_key(), 3))


@pytest.mark.parametrize("hosts", [[], ["h"] * 17])
def test_number_of_hosts_is_bounded(authority: Authority, hosts: list[str]) -> None:
    with pytest.raises(RequestError, match="1 to 16 hosts"):
        authority.issue(3, hosts, make_request(make_key(), 3))


@pytest.mark.parametrize(
    "request_", ["", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----"]
)
def test_request_that_is_none_is_refused(authority: Authority, request_: str) -> None:
    with pytest.raises(RequestError) as refused:
        authority.issue(3, ["h"], request_)
    assert refused.value.code == "bad_csr"


def test_key_of_another_authority_is_refused(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="does not belong"):
        Authority(authority.certificate, make_authority("other")[1])
    with pytest.raises(ConfigError, match="not an unencrypted private key"):
        Authority(authority.certificate, Secret("secret nonsense"))


# Files.


def modes(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}


def test_files_are_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    directory = tmp_path / "security"
    before = os.umask(0)
    try:
        initialize(str(directory), {1: ["127.0.0.1"], 2: ["127.0.0.2"]})
    finally:
        os.umask(before)
    found = modes(directory)
    assert {name for name, mode in found.items() if mode == 0o700} == {"node-1", "node-2"}
    assert {mode for name, mode in found.items() if name not in ("node-1", "node-2")} == {0o600}
    assert {name for name in found if name.startswith("node-1/")} == {
        f"node-1/{name}" for name in ("ca.pem", "ca.key", "node.pem", "node.key", "admin.hash")
    }
    assert {name for name in found if "/" not in name} >= {"ca.pem", "ca.key", "admin.token", "admin.hash"}


def test_token_file_and_hash_belong_together(tmp_path: Path) -> None:
    initialize(str(tmp_path), {1: ["h"]})
    token = parse_token((tmp_path / "admin.token").read_text())
    token_id, secret_hash = load_admin_file(str(tmp_path / "node-1" / "admin.hash"))
    assert token_id == token.id
    assert matches(token.secret, secret_hash)
    with pytest.raises(ConfigError, match="does not hold the id and the hash"):
        load_admin_file(str(tmp_path / "admin.token"))


def test_running_it_again_changes_nothing_and_adds_nodes(tmp_path: Path) -> None:
    initialize(str(tmp_path), {1: ["h"]})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = initialize(str(tmp_path), {1: ["other"], 4: ["h4"]})
    assert (again.has_new_authority, again.kept, again.made) == (False, [1], [4])
    assert {path: path.read_bytes() for path in before} == before
    assert not (tmp_path / "node-4" / "ca.key").exists(), "only the first managers sign"


def test_renewed_certificate_has_the_same_key_and_hosts(tmp_path: Path) -> None:
    initialize(str(tmp_path), {1: ["10.0.0.1", "one.example"]})
    files = {name: tmp_path / "node-1" / name for name in ("node.pem", "node.key")}
    old, key = files["node.pem"].read_text(), files["node.key"].read_text()
    renew_certificate(str(files["node.pem"]), load_authority(str(tmp_path / "ca.pem"), str(tmp_path / "ca.key")))
    new = files["node.pem"].read_text()
    assert (new != old, files["node.key"].read_text()) == (True, key)
    assert hosts_of(new) == hosts_of(old)
    assert stat.S_IMODE(files["node.pem"].stat().st_mode) == 0o600
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files["node.pem"], files["node.key"])


def test_authority_is_found_again(tmp_path: Path) -> None:
    initialize(str(tmp_path), {1: ["h"]}, can_sign=False)
    found = load_authority(str(tmp_path / "ca.pem"), str(tmp_path / "ca.key"))
    assert fingerprint(found.certificate) == fingerprint((tmp_path / "node-1" / "ca.pem").read_text())
    assert not (tmp_path / "node-1" / "ca.key").exists()


# The command.


@pytest.mark.parametrize(
    ("texts", "nodes"),
    [
        (("1@10.0.0.1", "2@10.0.0.2"), {1: ["10.0.0.1"], 2: ["10.0.0.2"]}),
        (("a", "b,10.0.0.2"), {1: ["a"], 2: ["b", "10.0.0.2"]}),
        (("7@host:9002",), {7: ["host"]}),
        (("1@[fd00::1]:9002", "2@fd00::2"), {1: ["fd00::1"], 2: ["fd00::2"]}),
    ],
)
def test_nodes_are_parsed_as_operators_write_them(texts: tuple[str, ...], nodes: dict[int, list[str]]) -> None:
    assert parse_nodes(texts) == nodes


@pytest.mark.parametrize("texts", [("x@host",), ("0@host",), ("1@a", "1@b"), ("2@a", "b")])
def test_other_nodes_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as refused:
        parse_nodes(texts)
    assert refused.value.code == "bad_node"


def test_command_prints_what_to_do_and_no_secret(tmp_path: Path) -> None:
    result = CliRunner().invoke(security, ["init", "1@10.0.0.1", "--directory", str(tmp_path / "s")])
    assert result.exit_code == 0, result.output
    assert f"scp -r {tmp_path}/s/node-1 root@10.0.0.1:/etc/quiver\n" in result.output
    assert "quiver node --settings-file /etc/quiver/quiver.toml\n" in result.output
    assert "quiver context add prod https://10.0.0.1:8002 --ca-file " in result.output
    assert f"--token-file {tmp_path}/s/admin.token --use\n" in result.output
    assert parse_token((tmp_path / "s" / "admin.token").read_text()).secret not in result.output


def test_command_writes_settings_with_which_nodes_start_secure(tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    nodes = ["1@10.0.0.1", "2@broker-2.example,10.0.0.2", "3@fd00::3"]
    assert CliRunner().invoke(security, ["init", *nodes, "--directory", made]).exit_code == 0
    assert CliRunner().invoke(security, ["init", "4@10.0.0.4", "--directory", made]).exit_code == 0
    found = {node: load_settings((tmp_path / f"made/node-{node}/quiver.toml").read_text()) for node in (1, 2, 3, 4)}
    managers = {1: "10.0.0.1:9002", 2: "broker-2.example:9002", 3: "[fd00::3]:9002"}
    for node, settings in found.items():
        assert (settings.node.id, settings.node.managers) == (node, managers)
        assert ("manager" in settings.node.role_names) is (node <= 3)
        assert decide_mode(settings) is SecurityMode.SECURE
        assert settings.tls.key_file == "/etc/quiver/node.key"
    assert (found[2].node.wire, found[2].node.advertise) == ("0.0.0.0:9002", "broker-2.example")
    assert (found[3].node.http, found[3].node.advertise) == ("[fd00::3]:8002", "")
    (tmp_path / "made/node-1/quiver.toml").write_text("mine")
    assert CliRunner().invoke(security, ["init", "1@10.0.0.1", "--directory", made]).exit_code == 0
    assert (tmp_path / "made/node-1/quiver.toml").read_text() == "mine"


def test_certificate_is_renewed_by_its_own_authority_alone(tmp_path: Path) -> None:
    initialize(str(tmp_path / "one"), {1: ["h"]})
    initialize(str(tmp_path / "two"), {1: ["h"]})
    ours, theirs = tmp_path / "one/node-1/node.pem", str(tmp_path / "two")
    before = ours.read_text()
    for path, directory in ((ours, theirs), (tmp_path / "one/ca.pem", str(tmp_path / "one"))):
        result = CliRunner().invoke(security, ["renew", str(path), "--directory", directory])
        assert isinstance(result.exception, RequestError)
        assert str(result.exception).startswith("not done")
    assert ours.read_text() == before
    result = CliRunner().invoke(security, ["renew", str(ours), "--days", "30"])
    assert result.exit_code == 0, result.output
    assert expiry_s(ours.read_text()) < expiry_s(before)
